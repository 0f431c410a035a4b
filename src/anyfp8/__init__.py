"""anyfp8: FP8-quantized LLM linear layers on the GPU you have.

>>> import anyfp8
>>> model = anyfp8.load("smollm2-fp8")          # any FP8 checkpoint, as a transformers model
>>> report = anyfp8.convert(my_model)            # or a 16-bit model in memory, in place

Importing this package runs nothing: every name below is fetched when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anyfp8.errors import AnyFp8Error
    from anyfp8.integrations.transformers import load
    from anyfp8.linear import Fp8Linear, convert, replan, warmup
    from anyfp8.problem import Problem, Scheme
    from anyfp8.select import Request, plan
    from anyfp8.tools.quantize import quantize_checkpoint

__version__ = "0.1.0"

_HOMES = {
    "AnyFp8Error": "anyfp8.errors",
    "Fp8Linear": "anyfp8.linear",
    "Problem": "anyfp8.problem",
    "Request": "anyfp8.select",
    "Scheme": "anyfp8.problem",
    "convert": "anyfp8.linear",
    "load": "anyfp8.integrations.transformers",
    "plan": "anyfp8.select",
    "quantize_checkpoint": "anyfp8.tools.quantize",
    "replan": "anyfp8.linear",
    "warmup": "anyfp8.linear",
}

__all__ = [
    "AnyFp8Error",
    "Fp8Linear",
    "Problem",
    "Request",
    "Scheme",
    "__version__",
    "convert",
    "load",
    "plan",
    "quantize_checkpoint",
    "replan",
    "warmup",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'anyfp8' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
