# `make demo` runs the main job, `make test` the tests; both set up everything they need in .venv
PYTHON ?= python3
BIN := .venv/bin
MODEL ?=
# processes of `make test`; each takes up to 1 GB
TEST_WORKERS ?= 2
export OMP_WAIT_POLICY ?= passive

.PHONY: setup demo test test-slow check format

setup:
	@$(PYTHON) scripts/setup.py

demo: setup
	@$(BIN)/anyfp8 demo $(if $(MODEL),--model "$(MODEL)")

test: setup
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadgroup

test-slow: setup
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadgroup -m "slow and not perf"

check: setup
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/pyright

format: setup
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .
