"""Who may import whom, and that importing does nothing: no Triton, no CUDA, no output."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import anyfp8

ROOT = Path(anyfp8.__file__).parent

# layers, lowest first: a module may import its own layer and what its row names; the same table
# stands in docs/ARCHITECTURE.md
FACTS = (
    *("errors", "env", "catalogue", "device", "form", "fp8", "launcher", "problem", "reference"),
    *("replay", "stub"),
)
MAY_IMPORT = {
    "facts": (),
    "checkpoint": ("facts",),
    "kernels": (),
    "quantize": ("facts", "kernels"),
    "gemm": ("facts", "kernels"),
    "select": ("facts", "gemm"),
    # checkpoint only for its ignore rules
    "linear": ("facts", "checkpoint", "quantize", "gemm", "select"),
    "integrations": ("facts", "checkpoint", "quantize", "gemm", "select", "linear"),
    "testing": ("facts", "quantize", "gemm"),
    "testing_gemm": ("facts", "gemm"),
    "tools": (
        *("facts", "checkpoint", "kernels", "quantize", "gemm", "select", "linear"),
        *("integrations", "testing"),
    ),
    "cli": ("facts", "tools"),
    "__main__": ("cli",),
}


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        yield ".".join(("anyfp8", *parts)), path


MODULES = dict(modules())


def layer_of(module: str) -> str:
    parts = module.split(".")
    top = parts[1] if len(parts) > 1 else "anyfp8"
    return "facts" if top in FACTS else top


def imported(module: str, path: Path) -> set[str]:
    """Modules of ours that a file imports anywhere, functions and type checking included."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                parents = parents[: len(parents) - node.level + 1]
                base = ".".join([*parents, *filter(None, [node.module])])
            names = {f"{base}.{alias.name}" for alias in node.names}
            found.update(names & set(MODULES) or {base})
            if base != "anyfp8":
                found.add(base)
    return {name for name in found if name.startswith("anyfp8.")}


@pytest.mark.parametrize("module", [m for m in MODULES if m != "anyfp8"])
def test_imports_point_one_way(module):
    layer = layer_of(module)
    assert layer in MAY_IMPORT, f"{module} is in no layer: add it to the table with a reason"
    allowed = {layer, *MAY_IMPORT[layer]}
    wrong = {name for name in imported(module, MODULES[module]) if layer_of(name) not in allowed}
    assert not wrong, f"{module} ({layer}) may not import {', '.join(sorted(wrong))}"


def test_the_architecture_page_has_the_same_table():
    page = (Path(__file__).parents[1] / "docs" / "ARCHITECTURE.md").read_text()
    told = {}
    for line in page.splitlines():
        if line.startswith("| `"):
            names, imports, _ = (cell.strip() for cell in line.strip("|").split("|"))
            row = tuple(part for part in imports.split(", ") if part != "-")
            for name in re.findall(r"`(\w+)(?:/|\.py)?`", names):
                told["facts" if name in FACTS else name] = row
    assert told == MAY_IMPORT
    assert all(f"`{name}`" in page for name in FACTS)


def test_the_reader_of_imports_sees_every_form(tmp_path):
    source = """
import anyfp8.tools.run
from anyfp8 import fp8, __version__
from anyfp8.gemm import base
from . import env
from .gemm.base import Config
def f():
    from anyfp8.select import plan
"""
    path = tmp_path / "device.py"
    path.write_text(source)
    assert imported("anyfp8.device", path) == {
        *("anyfp8.tools.run", "anyfp8.fp8", "anyfp8.gemm", "anyfp8.gemm.base", "anyfp8.env"),
        "anyfp8.select",
    }


def test_kernels_alone_import_triton_at_the_top():
    for module, path in MODULES.items():
        if layer_of(module) == "kernels":
            continue
        tops = [
            n
            for n in ast.parse(path.read_text()).body
            if isinstance(n, ast.Import | ast.ImportFrom)
        ]
        names = {a.name for n in tops if isinstance(n, ast.Import) for a in n.names}
        names |= {n.module for n in tops if isinstance(n, ast.ImportFrom) and n.module}
        assert not {n for n in names if n.split(".")[0] == "triton"}, module


def python(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )


IMPORT_EACH = """
import importlib, json, sys
hidden, names = json.loads(sys.argv[1])
for name in hidden:
    sys.modules[name] = None
for name in names:
    try:
        importlib.import_module(name)
    except Exception as error:
        raise SystemExit(f"{name}: {error!r}")
import torch
assert not torch.cuda.is_initialized()
assert not any(name.startswith("anyfp8.kernels") for name in sys.modules)
"""


def test_everything_but_the_kernels_imports_without_triton_and_without_a_gpu():
    names = [m for m in MODULES if m != "anyfp8.__main__" and layer_of(m) != "kernels"]
    done = python(
        IMPORT_EACH,
        json.dumps([["triton", "triton.language"], names]),
        CUDA_VISIBLE_DEVICES="",
        # the environment is not read while importing
        ANYFP8_ENABLE_FP8_GEMM_CONFIG_TUNE="nonsense",
        ANYFP8_DEVICE_NAME="no such GPU",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


def test_the_package_alone_loads_nothing_heavy():
    code = "import sys, anyfp8; assert not {'torch', 'triton', 'transformers'} & set(sys.modules)"
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout == done.stderr == ""


def test_the_library_does_not_load_triton_or_touch_cuda():
    code = """
import sys
import anyfp8
[getattr(anyfp8, n) for n in ("Fp8Linear", "Problem", "Scheme", "plan", "convert")]
import torch
assert "triton" not in sys.modules
assert not torch.cuda.is_initialized()
"""
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_the_command_line_does_not_import_torch():
    code = "import sys, anyfp8.cli; assert not {'torch', 'triton', 'numpy'} & set(sys.modules)"
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_only_launching_needs_a_gpu():
    code = """
import torch
from anyfp8 import device, fp8, reference
from anyfp8.errors import AnyFp8Error
assert device.current_device() is device.CPU
assert device.find_device("h100").has_fp8
assert fp8.triton_type_name(torch.float8_e4m3fn) == "float8e4nv"
assert reference.quantize_per_token(torch.ones(1, 8)).scale.item() > 0
try:
    device.device_of("cuda")
except AnyFp8Error as error:
    assert error.hint
else:
    raise SystemExit("no error")
"""
    done = python(code, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr


def test_at_most_twelve_public_names_and_all_resolve():
    assert len(anyfp8.__all__) <= 12
    for name in anyfp8.__all__:
        assert getattr(anyfp8, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = anyfp8.nothing


@pytest.mark.perf
def test_help_is_quick():
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "anyfp8", "--help"], capture_output=True, check=True)
    assert time.perf_counter() - start < 0.5
