"""Kernel + signature + constants → compiled code for any GPU, without owning one.

`explain --compile`, `tables check` and the compile tests come here: shared memory to the byte and
the PTX are Triton's own answer, not a model's.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anyfp8.errors import MissingPackage
from anyfp8.form import settle, with_cache

if TYPE_CHECKING:
    from anyfp8.device import Arch


@dataclass(frozen=True)
class Source:
    """One specialization of a kernel.

    Attributes:
        kernel: "module:function" of the `@triton.jit` function.
        signature: (argument, Triton type) of each argument that is not a constant.
        constants: (argument, value) of each compile-time constant.
        aligned: arguments divisible by 16 (pointers: aligned to 16 bytes).
        registers: as in `Launch`.
    """

    kernel: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: frozenset[str]
    num_warps: int
    num_stages: int
    registers: int | None = None

    def load(self) -> Any:
        module, name = self.kernel.split(":")
        return getattr(importlib.import_module(module), name)


def gpu_target(arch: Arch) -> Any:
    """What Triton compiles for: its target of an architecture."""
    from triton.backends.compiler import GPUTarget

    if arch.capability is not None:
        return GPUTarget("cuda", arch.capability[0] * 10 + arch.capability[1], 32)
    # CDNA has 64-wide wavefronts, RDNA 32
    return GPUTarget("hip", arch.name, 32 if "wmma" in arch.features else 64)


def triton_version() -> str:
    """Of the Triton that is installed. Raises MissingPackage where there is none."""
    try:
        import triton
    except ImportError as error:
        raise MissingPackage(
            "compiling kernels needs Triton",
            got="no module named triton",
            want="Triton 3.6 to 3.9",
            hint="pip install 'anyfp8[dev]', or a CUDA build of torch",
        ) from error
    return triton.__version__


def compile_for(source: Source, arch: Arch) -> Any:
    """Compile for an architecture: Triton's kernel, with `.asm` and `.metadata.shared` (bytes).

    Raises:
        MissingPackage: Triton is not installed.
    """
    triton_version()
    import triton
    from triton.compiler import ASTSource

    kernel = source.load()
    settle(kernel)
    constants = dict(source.constants)
    types = dict(source.signature)
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    attributes = {
        (kernel.arg_names.index(name),): [["tt.divisibility", 16]]
        for name in source.aligned
        if name in types
    }
    options = {
        "num_warps": source.num_warps,
        "num_stages": source.num_stages,
        # as launches say; see `gemm.launch`
        "enable_fp_fusion": True,
    }
    if source.registers is not None:
        options["maxnreg"] = source.registers
    return with_cache(
        lambda: triton.compile(
            ASTSource(kernel, signature, constants, attributes),
            target=gpu_target(arch),
            options=options,
        )
    )
