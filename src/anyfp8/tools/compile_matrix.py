"""Kernel × architecture × dtype -> compiled or not: proof without a GPU.

For each quantization launch and each architecture that Triton can target: it compiles, has no FP8
pointer argument, multiplies no row by a stride in 32 bits, fits the shared memory of a block, and
on SM89 does not truncate to fp16 on the way to FP8. `python -m anyfp8.tools.compile_matrix` runs it
on the Triton at hand; the table of several versions is merged into one file.
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

from anyfp8 import fp8, quantize, testing
from anyfp8.device import ARCHES
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


@dataclass(frozen=True)
class Report:
    """What compiling one launch showed; no faults is a pass."""

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
        "group nan_to_zero": lambda: quantize.per_group(x, nan_to_zero=True),
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


def check(launch: Launch, architecture: str) -> Report:
    """Compile a launch and look for what must not be there."""
    faults = []
    try:
        compiled = testing.compile_launch(launch, architecture)
    except Exception as error:  # whatever the compiler raises is the finding
        return Report((f"does not compile: {str(error).strip().splitlines()[-1][:200]}",), 0)
    ttir = compiled.asm["ttir"]
    pointers = re.findall(r"!tt\.ptr<(\w+)>", ttir)
    faults += [f"FP8 pointer argument {kind}" for kind in sorted(set(pointers)) if "f8" in kind]
    faults += [f"32-bit row · stride: {line}" for line in testing.i32_products(ttir, STRIDES)]
    shared, limit = compiled.metadata.shared, ARCHES[architecture].shared_memory
    if shared > limit:
        faults.append(f"{shared} bytes of shared memory, limit {limit}")
    code = compiled.asm.get("ptx", "")
    if architecture == "sm_89" and "cvt.rz.f16.f32" in code:
        faults.append("truncates to fp16 before the FP8 conversion")
    compiled_code = re.sub(r"// begin inline asm.*?// end inline asm", "", code, flags=re.DOTALL)
    if "fma.rn.f32" in compiled_code and not launch.constants.get("SILU_MUL"):
        # contraction changes bits; exp needs it inside, where no bits are promised
        faults.append("contracts a multiplication and an addition")
    return Report(tuple(faults), shared)


def run(architectures: Sequence[str] = ARCHITECTURES) -> dict[str, Any]:
    """{architecture: {dtype: {kernel: shared bytes, or its faults}}} of the Triton at hand."""
    matrix: dict[str, Any] = {}
    for architecture in architectures:
        for dtype_name, dtype in DTYPES.items():
            found = matrix.setdefault(architecture, {}).setdefault(dtype_name, {})
            for name, launch in kernels(architecture, dtype):
                report = check(launch, architecture)
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

    parser = argparse.ArgumentParser(description="Compile every quantization kernel offline.")
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
