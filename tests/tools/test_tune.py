"""The tuner without a GPU: what is written is what won, whatever happens to candidates and to it.

Times come from a function; measuring processes are little scripts that hang, die and lie.
"""

import json
import os
import random
import signal
import time
from concurrent.futures import Future
from dataclasses import replace

import pytest

from anyfp8 import env
from anyfp8.device import find_device
from anyfp8.errors import TableError
from anyfp8.problem import Scheme
from anyfp8.select import Request, plan
from anyfp8.select.predict import estimate
from anyfp8.select.selection import select
from anyfp8.select.table import Header, Row, file_name, load_tables, read_table, write_table
from anyfp8.tools.tune import LocalQueue, Tuned, run_gpu
from anyfp8.tools.tune_cells import Cell, cells_of, read_shapes, willing
from anyfp8.tools.tune_child import ChildFailed
from anyfp8.tools.tune_compile import Ready
from anyfp8.tools.tune_contest import Contest, Race, judged_us
from anyfp8.tools.tune_journal import Book, Refusal, mend
from anyfp8.tools.tune_readback import read_back
from anyfp8.tools.tune_search import QUICK, Effort

H200 = find_device("h200")
ROW = Scheme("channel", "token", True)
HEADER = Header(H200.name, "a test", "2026-01-01")
SMALL = Effort(first=4, diverse=2, most=10, again=3, finalists=2)
LIBRARY_US = 30.0


def model_us(cell, op, backend, config):
    """The ranker's model, of which the best is then the best by definition."""
    us = estimate(replace(cell.problem(op), op="gemm"), H200, backend, config)
    return LIBRARY_US if backend.name == "torch_scaled_mm" else us


class Fake:
    """A measurer whose GPU is a function of (cell, op, backend, config)."""

    def __init__(self, us=model_us, refused=(), before=lambda: None, noise=None):
        self.us, self.refused, self.before, self.noise = us, dict(refused), before, noise
        self.timed, self.races = [], 0

    def open(self, cell):
        return self.refused

    def time(self, cell, backend, config, share):
        self.before()
        found = self._of(cell, cell.ops[0], backend, config)
        self.timed.append((cell.key, backend, tuple(config.items()), share))
        return found

    def race(self, cell, op, entries, default):
        self.before()
        self.races += 1
        us, refused = {}, {}
        for name, entry in entries.items():
            found = self._of(cell, op, entry["backend"], entry["config"])
            if isinstance(found, Refusal):
                refused[name] = (found.kind, found.reason)
            else:
                us[name] = found
        base = us.get(default)
        ratios = {n: (base / u, base / u * 0.999, base / u * 1.001) for n, u in us.items() if base}
        return Race(us | {"torch bf16": 50.0}, ratios, refused, ("torch bf16",))

    def _of(self, cell, op, name, config):
        backend = next(b for b in willing(cell, op, H200, {}) if b.name == name)
        found = self.us(cell, op, backend, backend.config_class.from_dict(config))
        if self.noise is not None and not isinstance(found, Refusal):
            found *= self.noise()
        return found


def cells(ms=(1, 16), shapes=("512,1024",), scheme=ROW, tp=1):
    return cells_of(read_shapes(shapes, scheme, tp=tp)[0], H200, ms)


def tune(folder, todo, measurer, effort=SMALL, complete=True):
    """Run to the end; returns what was reported and the book."""
    book = Book(folder / file_name(H200.name), HEADER, {"cells": [c.key for c in todo]})
    found = [
        Tuned(c, dict.fromkeys(c.ops)) for c in todo if c.key in book.done
    ]  # done by an earlier run
    queue = LocalQueue([c for c in todo if c.key not in book.done])
    run_gpu(queue, measurer, Ready(), book, H200, "today", effort, found.append)
    book.close(complete)
    return found, book


def choices(folder, todo):
    """What the runtime takes for each cell and op."""
    tables = load_tables(H200, env.snapshot({"ANYFP8_TABLE_DIR": str(folder)}))
    return {
        (c.key, op): select(c.problem(op), H200, Request(tune=True), tables)
        for c in todo
        for op in c.ops
    }


def test_what_won_is_what_the_runtime_takes(tmp_path):
    todo = cells(ms=(1, 16, 64))
    found, _ = tune(tmp_path, todo, Fake())
    assert [t.cell for t in found] == todo
    assert not read_back(found, tmp_path, H200)
    for (_, op), choice in choices(tmp_path, todo).items():
        assert choice.source == "user table"
        assert choice.backend == "triton_row"
        assert op in ("gemm", "linear")
    table = read_table(tmp_path / file_name(H200.name))
    assert {r.role for r in table.rows} == {"ours", "default", "peer"}
    winner = next(r for r in table.rows if r.backend == "triton_row")
    assert {"measured", "runner_up"} <= set(dict(winner.extra))
    assert not list(tmp_path.glob("*.journal"))


QWEN3_8B = {
    "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "torch_dtype": "bfloat16",
}  # fmt: skip


def test_a_fused_and_sharded_model_finds_all_its_rows(tmp_path):
    # q/k/v and gate/up as engines fuse them, on one of four GPUs, and a replicated 2624x7168
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    todo = cells((16,), (str(tmp_path / "config.json"),), tp=4) + cells((16,), ("2624,7168",))
    found, _ = tune(tmp_path, todo, Fake(), QUICK)
    assert {(c.n, c.k) for c in todo} == {
        (1536, 4096), (4096, 1024), (6144, 4096), (4096, 3072), (2624, 7168),
    }  # fmt: skip
    assert (todo[0].n, todo[0].k) == (6144, 4096)
    settings = env.snapshot({"ANYFP8_TABLE_DIR": str(tmp_path)})
    for one in found:
        made = plan(
            ROW, one.cell.n, one.cell.k, H200, ms=(16,), tables=load_tables(H200, settings),
            request=Request(tune=True),
        )  # fmt: skip
        assert made.choice(16).source == "user table", one.cell


FATES = {
    3: Refusal("failed", "OutOfResources: shared memory"),
    5: Refusal("failed", "does not compile: bad layout"),
    7: Refusal("hung", "gave no answer within 30 s"),
    9: Refusal("wrong", "gives 512 elements that are not finite"),
    10: Refusal("wrong", "errs by 1.00e+00, allowed 3.91e-03"),
}


class Hazards:
    """Times of which the third, fifth, seventh, ninth and tenth candidate of a cell have none.

    Were they timed, they would be the fastest.
    """

    def __init__(self):
        self.met = {}

    def __call__(self, cell, op, backend, config):
        if backend.name != "triton_row":
            return LIBRARY_US
        met = self.met.setdefault(cell.key, [])
        if config not in met:
            met.append(config)
        return FATES.get(met.index(config) + 1) or model_us(cell, op, backend, config)


def test_bad_candidates_are_recorded_with_a_reason_and_never_written(tmp_path):
    todo, hazards = cells(ms=(1, 16)), Hazards()
    found, book = tune(tmp_path, todo, Fake(hazards), Effort())
    assert {(r.kind, r.reason) for _, _, _, r in book.refusals} == {
        (r.kind, r.reason) for r in FATES.values()
    }
    for met in hazards.met.values():
        bad = [met[number - 1].to_dict() for number in FATES]
        rows = read_table(tmp_path / file_name(H200.name)).rows
        stored = [dict(row.config) for row in rows if row.config]
        assert stored
        assert not [config for config in bad if config in stored]
    assert all(t.winners["gemm"].backend == "triton_row" for t in found)


def test_where_every_candidate_fails_the_default_path_is_the_row(tmp_path):
    def us(cell, op, backend, config):
        if backend.name == "torch_scaled_mm":
            return 12.0
        return Refusal("failed", "OutOfResources")

    todo = cells(ms=(16,))
    found, _ = tune(tmp_path, todo, Fake(us))
    assert {row.role for row in found[0].winners.values()} == {"default"}
    for choice in choices(tmp_path, todo).values():
        assert (choice.backend, choice.source) == ("torch_scaled_mm", "user table")


def test_where_nothing_at_all_can_be_timed_no_row_is_written_and_it_is_said(tmp_path):
    todo = cells(ms=(16,))
    found, book = tune(tmp_path, todo, Fake(lambda *_: Refusal("failed", "no such luck")))
    assert found[0].winners == {"gemm": None, "linear": None}
    assert not read_table(book.path).rows
    for choice in choices(tmp_path, todo).values():
        assert choice.source in ("ranker", "default")


def test_a_default_path_that_is_as_fast_keeps_the_cell(tmp_path):
    todo = cells(ms=(16,))

    def us(cell, op, backend, config):
        return 10.0 if backend.name == "torch_scaled_mm" else 9.9

    tune(tmp_path, todo, Fake(us))
    for choice in choices(tmp_path, todo).values():
        assert choice.backend == "torch_scaled_mm"


def test_a_lead_that_one_run_does_not_confirm_is_a_tie():
    race = Race({"default": 10.0, "ours": 9.0}, {"ours": (1.11, 0.99, 1.2)})
    assert judged_us(race, "ours", 10.0) == 10.0
    sure = Race({"default": 10.0, "ours": 9.6}, {"ours": (1.11, 1.05, 1.2)})
    assert judged_us(sure, "ours", 10.0) == pytest.approx(10.0 / 1.11)


def test_a_noisy_timer_with_a_lucky_outlier_still_finds_what_is_within_two_percent(tmp_path):
    todo = cells(ms=(16,), shapes=("4096,4096",))
    backend = next(b for b in willing(todo[0], "gemm", H200, {}) if b.name == "triton_row")
    best = min(
        model_us(todo[0], "gemm", backend, c)
        for c in backend.configs(todo[0].problem("gemm"), H200)
    )
    for seed in range(5):
        picker = random.Random(seed)
        lucky = picker.randrange(25)
        count = [0]

        def noise(picker=picker, lucky=lucky, count=count):
            count[0] += 1
            return 0.5 if count[0] == lucky else picker.uniform(0.95, 1.05)

        class Steady(Fake):
            # the final race is paired, so that its noise is small
            def race(self, *arguments):
                self.noise = lambda: 1.0
                return super().race(*arguments)

        folder = tmp_path / str(seed)
        found, _ = tune(folder, todo, Steady(noise=noise), Effort())
        winner = found[0].winners["gemm"]
        config = backend.config_class.from_dict(dict(winner.config))
        assert model_us(todo[0], "gemm", backend, config) <= 1.02 * best


@pytest.mark.parametrize("strange", [0.0, -1.0, float("inf"), float("nan")])
def test_times_that_cannot_be_are_no_times(tmp_path, strange):
    todo = cells(ms=(16,))
    wins = []

    def us(cell, op, backend, config):
        real = model_us(cell, op, backend, config)
        if backend.name == "triton_row" and config.block_k == 128:
            wins.append(config)
            return strange
        return real

    # in the race they would be as strange
    class Fair(Fake):
        def race(self, *arguments):
            self.us = model_us
            return super().race(*arguments)

    found, book = tune(tmp_path, todo, Fair(us), Effort())
    assert wins
    assert dict(found[0].winners["gemm"].config)["block_k"] != 128
    assert any("cannot be" in r.reason for _, _, _, r in book.refusals)


def in_a_child(work):
    """Run `work` in a forked process; returns how it ended."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return os.waitpid(pid, 0)[1]


def test_a_kill_at_any_of_50_points_loses_at_most_what_was_being_timed(tmp_path):
    todo = cells(ms=(1, 16), shapes=("512,1024",))
    whole = tmp_path / "whole"
    _, _ = tune(whole, todo, plain := Fake())
    wanted = choices(whole, todo)
    asked = len(plain.timed) + plain.races
    picker = random.Random(0)
    for number in range(50):
        folder = tmp_path / f"killed{number}"
        point, cut = picker.randrange(1, asked + 1), picker.random()
        real = os.write

        def killed(point=point, cut=cut, real=real, folder=folder):
            left = [point]

            def write(file, data):
                # half of the kills come in the middle of writing a line
                if left[0] <= 0 and cut > 0.5:
                    real(file, data[: int(len(data) * cut)])
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(file, data)

            def tick():
                left[0] -= 1
                if left[0] <= 0 and cut <= 0.5:
                    os.kill(os.getpid(), signal.SIGKILL)

            os.write = write
            tune(folder, todo, Fake(before=tick))

        status = in_a_child(killed)
        assert os.WIFSIGNALED(status), number
        again = Fake()
        found, _ = tune(folder, todo, again)
        # what was under way is made again, and a cell's first race with its second
        assert len(again.timed) + again.races <= asked - point + 2, (number, point)
        assert choices(folder, todo) == wanted
        assert len({t.cell for t in found}) == len(todo)


def test_a_run_that_was_killed_goes_on_and_does_not_time_again(tmp_path):
    todo = cells(ms=(1, 16, 64))
    first = Fake()

    class Stop(Exception):
        pass

    def stop_late():
        if len(first.timed) == 15:
            raise Stop

    first.before = stop_late
    book = Book(tmp_path / file_name(H200.name), HEADER, {"cells": [c.key for c in todo]})
    with pytest.raises(Stop):
        run_gpu(LocalQueue(todo), first, Ready(), book, H200, "today", SMALL)
    book.close(complete=False)
    assert list(tmp_path.glob("*.journal"))
    second = Fake()
    tune(tmp_path, todo, second)
    assert not set(first.timed) & set(second.timed)
    reference = Fake()
    tune(tmp_path / "other", todo, reference)
    assert set(first.timed) | set(second.timed) == set(reference.timed)


def test_a_finished_run_is_tuned_anew_and_its_rows_are_replaced(tmp_path):
    todo = cells(ms=(16,))
    tune(tmp_path, todo, Fake())
    slower = Fake(lambda *a: 2 * model_us(*a))
    tune(tmp_path, todo, slower)
    assert slower.timed
    rows = read_table(tmp_path / file_name(H200.name)).rows
    assert len({(r.key, r.backend, r.role) for r in rows}) == len(rows)
    default = next(r for r in rows if r.role == "default")
    assert default.us == 2 * LIBRARY_US


def test_another_request_does_not_resume_this_one(tmp_path):
    path = tmp_path / file_name(H200.name)
    one = Book(path, HEADER, {"cells": ["a"]})
    one.timed("a", "triton_row", {"block_m": 16}, 1, 5.0)
    one.close(complete=False)
    other = Book(path, HEADER, {"cells": ["b"]})
    assert other.known("a", "triton_row", {"block_m": 16}, 1) is None
    other.close(complete=True)
    same = Book(path, HEADER, {"cells": ["a"]})
    assert same.known("a", "triton_row", {"block_m": 16}, 1) == 5.0
    same.close(complete=True)


def test_two_tuners_do_not_share_a_table(tmp_path):
    path = tmp_path / file_name(H200.name)
    one = Book(path, HEADER, {"cells": []})
    with pytest.raises(TableError, match="another tuner"):
        Book(path, HEADER, {"cells": ["x"]})
    one.close(complete=True)
    Book(path, HEADER, {"cells": ["x"]}).close(complete=True)


def test_rows_join_a_table_that_is_there_and_one_of_another_gpu_is_refused(tmp_path):
    path = tmp_path / file_name(H200.name)
    old = Row(ROW.name, 64, 64, 1, "triton_row", us=3.0)
    from anyfp8.select.table import Table

    write_table(path, Table(HEADER, (old,)))
    tune(tmp_path, cells(ms=(16,)), Fake())
    assert old in read_table(path).rows
    with pytest.raises(TableError, match="another GPU"):
        Book(path, Header("NVIDIA L40S"), {})


def test_a_line_cut_short_is_removed_before_the_next_is_written(tmp_path):
    path = tmp_path / "file"
    path.write_text('{"a": 1}\n{"b": 2}\n{"c"')
    mend(path)
    assert path.read_text() == '{"a": 1}\n{"b": 2}\n'
    mend(tmp_path / "absent")


def test_candidates_of_another_cell_are_timed_while_some_compile(tmp_path):
    todo = cells(ms=(1, 16))
    slow = {todo[0].key}

    class Compiler:
        """The first cell's kernels are ready only when the second cell is done."""

        def __init__(self):
            self.held = []

        def submit(self, cell, backend, config):
            future = Future()
            if cell.key in slow:
                self.held.append(future)
            else:
                future.set_result("")
            return future

    compiler, order = Compiler(), []
    book = Book(tmp_path / file_name(H200.name), HEADER, {})

    def report(tuned):
        order.append(tuned.cell.m)
        slow.clear()
        while compiler.held:
            compiler.held.pop().set_result("")

    start = time.monotonic()
    run_gpu(LocalQueue(todo), Fake(), compiler, book, H200, "", SMALL, report)
    book.close(complete=True)
    assert order == [16, 1]
    assert time.monotonic() - start < 10


def test_cells_of_the_next_shape_are_timed_while_one_shape_compiles(tmp_path):
    todo = cells(ms=(1, 16), shapes=("512,1024", "1024,512"))
    held, order = {}, []

    class Compiler:
        """The first shape's kernels are ready only when the second shape is done."""

        def submit(self, cell, backend, config):
            future = Future()
            if cell.n == 512 and len(order) < 2:
                held[id(future)] = future
            else:
                future.set_result("")
            return future

    def report(tuned):
        order.append(tuned.cell.n)
        if len(order) == 2:
            for future in held.values():
                future.set_result("")

    book = Book(tmp_path / file_name(H200.name), HEADER, {})
    run_gpu(LocalQueue(todo), Fake(), Compiler(), book, H200, "", SMALL, report)
    book.close(complete=True)
    assert order == [1024, 1024, 512, 512]


def test_the_best_of_the_first_race_race_with_the_quantization(tmp_path):
    class Watched(Fake):
        raced = ()

        def race(self, cell, op, entries, default):
            self.raced = (*self.raced, (op, entries))
            return super().race(cell, op, entries, default)

    measurer = Watched()
    (cell,) = cells(ms=(16,))
    tune(tmp_path, [cell], measurer, Effort())
    (_, first), (_, second) = measurer.raced
    ours = {name: e["config"] for name, e in first.items() if e["backend"] == "triton_row"}
    assert len(ours) == Effort().finalists
    backend = next(b for b in willing(cell, "gemm", H200, {}) if b.name == "triton_row")
    known = sorted(
        ours.values(),
        key=lambda c: model_us(cell, "gemm", backend, backend.config_class.from_dict(c)),
    )
    again = [e["config"] for e in second.values() if e["backend"] == "triton_row"]
    assert again == known[:3]
    assert "default" in second


def test_a_gpu_that_cannot_even_begin_is_told_of_and_the_others_go_on(tmp_path):
    class Broken(Fake):
        def open(self, cell):
            if cell.m == 1:
                raise ChildFailed("crashed", "its process ended with SIGSEGV")
            return {}

    todo = cells(ms=(1, 16))
    found, book = tune(tmp_path, todo, Broken())
    assert [t.winners["gemm"] is None for t in found] == [True, False]
    assert any("SIGSEGV" in r.reason for _, _, _, r in book.refusals)


def test_what_the_gpu_refuses_is_not_searched(tmp_path):
    measurer = Fake(refused={"triton_row": "failed its trial"})
    found, _ = tune(tmp_path, cells(ms=(16,)), measurer)
    assert not measurer.timed
    assert found[0].winners["gemm"].backend == "torch_scaled_mm"
    assert not read_back(found, tmp_path, H200)


def test_a_table_that_the_runtime_does_not_open_is_noticed(tmp_path):
    todo = cells(ms=(16,))
    found, book = tune(tmp_path, todo, Fake())
    book.path.rename(tmp_path / "elsewhere.jsonl")
    missed = read_back(found, tmp_path, H200)
    assert [m.cell for m in missed] == todo * 2
    assert "not the table" in missed[0].why


def test_weight_only_schemes_and_gpus_without_fp8_tune_the_whole_linear():
    shapes, _ = read_shapes(["512,1024"], Scheme("channel"))
    assert cells_of(shapes, H200, [16])[0].ops == ("linear",)
    a100 = find_device("a100")
    (cell,) = cells_of(read_shapes(["512,1024"], ROW)[0], a100, [16])
    assert cell.ops == ("linear",)
    contest = Contest(cell, a100, {}, SMALL)
    assert {backend for backend, _ in contest.asks()} == {"triton_w8a16"}


def test_a_cell_survives_its_way_to_a_worker():
    for scheme in (ROW, Scheme("block", "group", True, block=(128, 128), group=128)):
        (cell,) = cells((16,), scheme=scheme)
        assert Cell.from_dict(json.loads(json.dumps(cell.to_dict()))) == cell
