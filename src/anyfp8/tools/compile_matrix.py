"""Kernel × architecture × dtype -> compiled or not: proof without a GPU.

For each quantization launch, each product of a backend of ours and each architecture that Triton
can target: it compiles, multiplies no row by a stride in 32 bits, fits a block's shared memory and
on SM89 does not truncate to fp16 on the way to FP8. Quantizers have no FP8 pointer argument; what
multiplies FP8 may. `python -m anyfp8.tools.compile_matrix` runs it on the Triton at hand; the table
of several versions is merged into one file. What did not change since comes from Triton's cache.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from anyfp8 import fp8, gemm, quantize, testing
from anyfp8.device import ARCHES, generic_device
from anyfp8.gemm.compile import Source, compile_for
from anyfp8.problem import Problem, Scheme
from anyfp8.quantize.launch import Launch
from anyfp8.tools import console

ARCHITECTURES = (
    *("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"),
    *("gfx942", "gfx950", "gfx1201"),
)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ROW_STRIDES = tuple(
    f"{name}_{level}" for name in ("x", "q", "s", "residual", "y") for level in ("outer", "inner")
)
STRIDES = (*ROW_STRIDES, "s_group", "x_stride", "q_stride", "s_stride")
PRODUCT_STRIDES = ("stride_xm", "stride_wn", "stride_ym")
SCHEMES = (
    Scheme("channel"),
    Scheme("block", block=(128, 128)),
    Scheme("channel", "token", True),
    Scheme("tensor", "tensor", False),
    Scheme("block", "group", True, block=(128, 128), group=128),
)
# vector, narrow, wide and large tiles
ROWS = (1, 16, 128, 4096)


@dataclass(frozen=True)
class Report:
    """What compiling one kernel showed; no faults is a pass."""

    faults: tuple[str, ...]
    shared_bytes: int


def kernels(architecture: str, dtype: torch.dtype) -> Iterator[tuple[str, Launch]]:
    """Named launches that together contain every kernel in every form the library uses."""
    x = torch.empty(512, 4096, dtype=dtype)
    ragged = torch.empty(3, 100, dtype=dtype)
    experts = torch.empty(4, 64, 1024, dtype=dtype)
    counts = torch.empty(4, dtype=torch.int32)
    heads = torch.empty(64, 16, 576, dtype=dtype)[..., :512].transpose(0, 1)
    norm_weight = torch.empty(4096, dtype=dtype)
    one = torch.ones(())
    pdl = "pdl" in ARCHES[architecture].features
    calls: dict[str, Callable[[], Any]] = {
        "token": lambda: quantize.per_token(x),
        "token ragged": lambda: quantize.per_token(ragged),
        "token loop": lambda: quantize.per_token(torch.empty(2, 40960, dtype=dtype)),
        "token tail": lambda: quantize.per_token(torch.empty(2, 12288, dtype=dtype)),
        "token silu_mul": lambda: quantize.per_token(x, silu_mul=True),
        "token nan_to_zero": lambda: quantize.per_token(x, nan_to_zero=True),
        "token e4m3fnuz": lambda: quantize.per_token(x, fmt=fp8.E4M3FNUZ),
        "token e5m2": lambda: quantize.per_token(x, fmt=fp8.E5M2),
        "group row": lambda: quantize.per_group(x),
        "group one row": lambda: quantize.per_group(x[:1]),
        "group one row nan_to_zero": lambda: quantize.per_group(x[:1], nan_to_zero=True),
        "group nan_to_zero": lambda: quantize.per_group(x, nan_to_zero=True),
        "group tma nan_to_zero": lambda: quantize.per_group(x, layout="tma", nan_to_zero=True),
        "group tma": lambda: quantize.per_group(x, layout="tma"),
        "group packed": lambda: quantize.per_group(x, layout="packed"),
        "group silu_mul": lambda: quantize.per_group(x, silu_mul=True),
        "group ragged": lambda: quantize.per_group(ragged, 48),
        "group counts": lambda: quantize.per_group(experts, layout="tma", counts=counts),
        "tensor": lambda: quantize.per_tensor(x),
        "tensor static": lambda: quantize.per_tensor(x, one),
        "cast e4m3fn": lambda: quantize.cast(x, 0.5),
        "cast e5m2": lambda: quantize.cast(x, 0.5, fmt=fp8.E5M2),
        "block": lambda: quantize.per_block(x),
        "mla tensor": lambda: quantize.mla_per_tensor(heads),
        "mla group": lambda: quantize.mla_per_group(heads),
        "norm token": lambda: quantize.norm_per_token(x, norm_weight),
        "norm group residual": lambda: quantize.norm_per_group(
            x, norm_weight, residual=torch.empty_like(x), out_norm=torch.empty_like(x)
        ),
        "norm packed": lambda: quantize.norm_per_group(x, norm_weight, layout="packed"),
    }
    if pdl:
        calls["token pdl"] = lambda: quantize.per_token(x, pdl=True)
        calls["group pdl"] = lambda: quantize.per_group(x, pdl=True)
    for name, call in calls.items():
        with testing.recorded_launches(architecture) as launches:
            call()
        for launch in launches:
            kernel = launch.kernel.__name__
            yield (name if len(launches) == 1 else f"{name} {kernel}"), launch


def products(architecture: str, dtype: str) -> Iterator[tuple[str, Source]]:
    """Named sources of what our backends run by default, for each scheme they serve there."""
    device = generic_device(ARCHES[architecture])
    seen = set()
    for scheme in SCHEMES:
        for m in ROWS:
            problem = Problem("linear", scheme, m, 4096, 4096, dtype, dtype)
            for backend in gemm.BACKENDS:
                source_of: Any = getattr(backend, "source", None)
                quantizes = backend.kind == "w8a8"
                if source_of is None or (quantizes and scheme.activation == "none"):
                    continue
                if backend.why_not(problem, device) is not None:
                    continue
                source = source_of(problem, backend.default_config(problem, device), device)
                if source not in seen:
                    seen.add(source)
                    yield f"{backend.name} {scheme.name} m{m}", source


def check(launch: Launch, architecture: str) -> Report:
    """Compile a launch and look for what must not be there."""
    try:
        compiled = testing.compile_launch(launch, architecture)
    except Exception as error:  # whatever the compiler raises is the finding
        return _does_not_compile(error)
    faults = _faults(compiled, architecture, STRIDES)
    pointers = set(re.findall(r"!tt\.ptr<(\w+)>", compiled.asm["ttir"]))
    faults += [f"FP8 pointer argument {kind}" for kind in sorted(pointers) if "f8" in kind]
    compiled_code = re.sub(
        r"// begin inline asm.*?// end inline asm",
        "",
        compiled.asm.get("ptx", ""),
        flags=re.DOTALL,
    )
    if "fma.rn.f32" in compiled_code and not launch.constants.get("SILU_MUL"):
        # contraction changes bits; exp needs it inside, where no bits are promised
        faults.append("contracts a multiplication and an addition")
    return Report(tuple(faults), compiled.metadata.shared)


def check_product(source: Source, architecture: str) -> Report:
    """Compile a product and look for what must not be there."""
    try:
        compiled = compile_for(source, ARCHES[architecture])
    except Exception as error:  # whatever the compiler raises is the finding
        return _does_not_compile(error)
    faults = _faults(compiled, architecture, PRODUCT_STRIDES)
    return Report(tuple(faults), compiled.metadata.shared)


def _does_not_compile(error: Exception) -> Report:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return Report((f"does not compile: {lines[-1][:200]}",), 0)


def _faults(compiled: Any, architecture: str, strides: Sequence[str]) -> list[str]:
    narrow = testing.i32_products(compiled.asm["ttir"], strides)
    faults = [f"32-bit row · stride: {line}" for line in narrow]
    shared, limit = compiled.metadata.shared, ARCHES[architecture].shared_memory
    if shared > limit:
        faults.append(f"{shared} bytes of shared memory, limit {limit}")
    if architecture == "sm_89" and "cvt.rz.f16.f32" in compiled.asm.get("ptx", ""):
        faults.append("truncates to fp16 before the FP8 conversion")
    return faults


def run(architectures: Sequence[str] = ARCHITECTURES) -> dict[str, Any]:
    """{architecture: {dtype: {kernel: shared bytes, or its faults}}} of the Triton at hand."""
    matrix: dict[str, Any] = {}
    for architecture in architectures:
        for dtype_name, dtype in DTYPES.items():
            found = matrix.setdefault(architecture, {}).setdefault(dtype_name, {})
            reports = [(n, check(each, architecture)) for n, each in kernels(architecture, dtype)]
            if dtype != torch.float32:
                each_product = products(architecture, dtype_name)
                reports += [(n, check_product(each, architecture)) for n, each in each_product]
            for name, report in reports:
                found[name] = list(report.faults) if report.faults else report.shared_bytes
    return matrix


def summarize(matrix: dict[str, Any]) -> dict[str, Any]:
    """{architecture: {dtype: kernels compiled, most shared bytes, faults by kernel}}."""
    return {
        architecture: {
            dtype: {
                "compiled": len(found),
                "most_shared_bytes": max(
                    (v for v in found.values() if isinstance(v, int)), default=0
                ),
                "faults": {name: v for name, v in found.items() if isinstance(v, list)},
            }
            for dtype, found in by_dtype.items()
        }
        for architecture, by_dtype in matrix.items()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the matrix; exit status 1 where anything is at fault."""
    import triton

    parser = argparse.ArgumentParser(description="Compile every kernel offline.")
    parser.add_argument("--json", type=Path, help="file to add this Triton's summary to")
    parser.add_argument("--architectures", default=",".join(ARCHITECTURES))
    options = parser.parse_args(arguments)
    matrix = run(options.architectures.split(","))
    cells = [
        (architecture, dtype, name, value)
        for architecture, by_dtype in matrix.items()
        for dtype, by_name in by_dtype.items()
        for name, value in by_name.items()
    ]
    bad = [cell for cell in cells if isinstance(cell[3], list)]
    if options.json:
        known = json.loads(options.json.read_text()) if options.json.exists() else {}
        known[triton.__version__] = summarize(matrix)
        options.json.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    for cell in bad:
        console.data(" ".join(map(str, cell)))
    console.talk(f"Triton {triton.__version__}: {len(cells)} compiled, {len(bad)} at fault")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
