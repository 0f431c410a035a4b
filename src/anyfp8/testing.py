"""Tools for whoever writes a kernel: compare, poison, and run another architecture's code.

`on_architecture("sm_80")` compiles every quantization launch of the block for the A100 and runs
that PTX on the GPU at hand (the driver assembles it), so that the code path can be tested without
the card. It proves numerics, not speed or shared-memory limits. `compile_launch` needs no GPU at
all.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from anyfp8 import reference
from anyfp8.device import find_device
from anyfp8.errors import DeviceError
from anyfp8.form import settle
from anyfp8.gemm.compile import gpu_target
from anyfp8.problem import QTensor
from anyfp8.quantize.launch import Launch, Target, use_target

_TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.uint8: "*u8",
    torch.int32: "*i32",
}
# CUdevice_attribute and CUfunction_attribute values of cuda.h
_MAX_DYNAMIC_SHARED = 8
_POISON = 0xFF


def poison(*tensors: torch.Tensor) -> None:
    """Fill whole storages with 0xFF (NaN in fp32, bf16, fp16 and e4m3fn), padding included."""
    for tensor in tensors:
        storage = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        storage.set_(tensor.untyped_storage()).fill_(_POISON)


def assert_matches(got: QTensor, want: QTensor) -> None:
    """Bit equality of data and scale, and equality of shapes, scale strides and layout.

    Raises:
        AssertionError: names the first element that differs, with both bytes or values.
    """
    assert got.packed == want.packed, f"packed: {got.packed} != {want.packed}"
    assert got.block == want.block, f"block: {got.block} != {want.block}"
    _assert_bits("scale", got.scale, want.scale)
    _assert_bits("data", got.codes, want.codes)
    # the stride of a dimension that is never stepped along means nothing
    steps = [d for d, size in enumerate(want.scale.shape) if size > 1 and want.scale.numel()]
    strides = [tuple(q.scale.stride(d) for d in steps) for q in (got, want)]
    assert strides[0] == strides[1], f"scale strides: {strides[0]} != {strides[1]}"


def _assert_bits(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)} != {tuple(want.shape)}"
    assert got.dtype == want.dtype, f"{name}: dtype {got.dtype} != {want.dtype}"
    a, b = got.detach().cpu().contiguous(), want.detach().cpu().contiguous()
    if a.dtype == torch.float32:
        a, b = a.view(torch.int32), b.view(torch.int32)
    different = (a != b).nonzero()
    if len(different):
        index = tuple(different[0].tolist())
        raise AssertionError(
            f"{name}: {len(different)} of {a.numel()} differ, first at {index}: "
            f"got {got[index].item()!r}, want {want[index].item()!r}"
        )


def assert_normed(
    y: torch.Tensor, h: torch.Tensor, weight: torch.Tensor, norm_eps: float = 1e-6
) -> None:
    """y is the RMSNorm of h within 2^-19 in fp32, a unit in the last place of few 16-bit values.

    That is half of 40 fp32 additions, and a rounding to y's dtype.

    Args:
        y, h: [M, K] of one dtype, on any device. weight: [K], on the CPU.
    """
    y, h = y.cpu(), h.cpu()
    mean = h.double().square().mean(-1, keepdim=True)
    exact = h.double() / (mean + norm_eps).sqrt() * weight.double()
    if y.dtype == torch.float32:
        assert ((y - exact).abs() <= exact.abs() * 2**-19).all(), "more than 2^-19 off"
        return
    want = reference.rms_norm(h, weight, norm_eps)
    steps = (y.view(torch.int16).long() - want.view(torch.int16).long()).abs()
    assert steps.max() <= 1, f"{steps.max()} units in the last place off"
    assert (steps != 0).float().mean() < 1e-3, "too many last bits differ"


def random_rows(
    m: int, k: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0, device: str = "cpu"
) -> torch.Tensor:
    """[m, k] normal values whose rows have scales from 2^-8 to 2^8: every row needs its own."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + m * 131 + k)
    rows = torch.exp2(torch.rand(m, 1, generator=generator) * 16 - 8)
    return (torch.randn(m, k, generator=generator) * rows).to(dtype).to(device)


def every_16_bit_pattern(dtype: torch.dtype) -> torch.Tensor:
    """[65536] of bf16 or fp16: each bit pattern once, NaNs and infinities included."""
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)


def e4m3_ties() -> torch.Tensor:
    """fp32: every midpoint of neighbouring e4m3fn codes and its two fp32 neighbours, both signs."""
    from anyfp8 import fp8

    values = fp8.decode_table(fp8.E4M3FN)[:127]
    middle = (values[1:] + values[:-1]) / 2
    below = torch.nextafter(middle, torch.zeros_like(middle))
    above = torch.nextafter(middle, torch.full_like(middle, 1e9))
    positive = torch.cat([values, middle, below, above])
    return torch.cat([positive, -positive])


def compile_launch(launch: Launch, architecture: str) -> Any:
    """Compile a launch for "sm_80", "gfx942", … with Triton; needs no GPU.

    Returns:
        Triton's compiled kernel: `.asm` ("ttir", "ptx", …), `.metadata.shared` (bytes).
    """
    import triton
    from triton.compiler import ASTSource

    settle(launch.kernel)
    signature, constants, attributes = _specialize(launch)
    source = ASTSource(launch.kernel, signature, constants, attributes)
    target = gpu_target(find_device(architecture).arch)
    return triton.compile(source, target=target, options=launch.options)


def _specialize(launch: Launch) -> tuple[dict[str, str], dict[Any, Any], dict[Any, Any]]:
    """Types, constants and 16-divisibility, as Triton's own launcher derives them from values."""
    signature: dict[str, str] = {}
    constants: dict[Any, Any] = {}
    attributes: dict[Any, Any] = {}
    for position, name in enumerate(launch.kernel.arg_names):
        if name in launch.constants or launch.arguments[name] is None:
            signature[name] = "constexpr"
            constants[(position,)] = launch.constants.get(name)
            continue
        value = launch.arguments[name]
        specialized = not launch.kernel.params[position].do_not_specialize
        if isinstance(value, torch.Tensor):
            signature[name] = _TYPES[value.dtype]
            aligned = value.data_ptr() % 16 == 0
        elif isinstance(value, float):
            signature[name] = "fp32"
            aligned = False
        elif value == 1 and specialized:
            signature[name] = "constexpr"
            constants[(position,)] = 1
            aligned = False
        else:
            signature[name] = "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
            aligned = specialized and value % 16 == 0
        if aligned:
            attributes[(position,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def run_launch(launch: Launch, architecture: str) -> None:
    """Run the PTX that a launch compiles to for `architecture` on the GPU of its tensors.

    Raises:
        DeviceError: the driver refuses the PTX or the launch.
    """
    compiled = compile_launch(launch, architecture)
    ptx = compiled.asm["ptx"]
    target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    assert target is not None
    assert target[1].rstrip("a") == architecture, f"compiled for {target[1]}, not {architecture}"
    cuda = ctypes.CDLL("libcuda.so.1")
    with torch.cuda.device(launch.device):
        torch.cuda.current_stream().synchronize()
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        _check(
            cuda.cuModuleLoadData(ctypes.byref(module), ctypes.c_char_p(ptx.encode())),
            f"cannot load the {architecture} PTX of {compiled.metadata.name}",
        )
        name = compiled.metadata.name.encode()
        _check(cuda.cuModuleGetFunction(ctypes.byref(function), module, name), "no such kernel")
        shared = compiled.metadata.shared
        if shared > 48 * 1024:
            _check(
                cuda.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, shared),
                f"cannot give {name.decode()} {shared} bytes of shared memory",
            )
        values = _kernel_parameters(launch, ptx)
        pointers = (ctypes.c_void_p * len(values))(
            *(ctypes.cast(ctypes.byref(value), ctypes.c_void_p) for value in values)
        )
        grid = (*launch.grid, 1, 1)[:3]
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        _check(
            cuda.cuLaunchKernel(
                function, *grid, 32 * launch.num_warps, 1, 1, shared, stream, pointers, None
            ),
            f"cannot launch the {architecture} PTX of {name.decode()}",
        )
        torch.cuda.current_stream().synchronize()
        _check(cuda.cuModuleUnload(module), "cannot unload the module")


def _kernel_parameters(launch: Launch, ptx: str) -> list[Any]:
    signature, _, _ = _specialize(launch)
    values: list[Any] = []
    for name, kind in signature.items():
        if kind == "constexpr":
            continue
        value = launch.arguments[name]
        if kind.startswith("*"):
            values.append(ctypes.c_uint64(value.data_ptr()))
        else:
            ctype = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}[kind]
            values.append(ctype(value))
    # Triton appends scratch pointers (two since 3.4), null where the kernel uses none
    declared = len(re.findall(r"\.param [^\n]*_param_\d+", ptx.split(")\n", 1)[0]))
    values.extend(ctypes.c_uint64(0) for _ in range(declared - len(values)))
    return values


def _check(code: int, what: str) -> None:
    if code:
        raise DeviceError(what, got=f"CUresult {code}", want="0, CUDA_SUCCESS")


@contextmanager
def on_architecture(architecture: str) -> Iterator[list[Launch]]:
    """Run every quantization launch inside the block as `architecture`'s PTX; yields the launches.

    Args:
        architecture: "sm_80", "sm_89", …: not newer than the GPU at hand.
    """
    launches: list[Launch] = []

    def run(launch: Launch) -> None:
        launches.append(launch)
        run_launch(launch, architecture)

    with use_target(Target(find_device(architecture).capability, run=run)):
        yield launches


@contextmanager
def recorded_launches(architecture: str) -> Iterator[list[Launch]]:
    """Collect the launches that the block would make on `architecture`; nothing runs."""
    launches: list[Launch] = []
    with use_target(Target(find_device(architecture).capability, run=launches.append)):
        yield launches


def i32_products(ttir: str, arguments: Sequence[str] = ()) -> list[str]:
    """Lines of TTIR that multiply an i32 by a run-time argument: row · stride that can overflow.

    Args:
        arguments: names to look for; all run-time integers by default.
    """
    wanted = {f"%{name}" for name in arguments} or set(re.findall(r"(%\w+): i32", ttir))
    found = []
    for line in ttir.splitlines():
        product = re.search(r"arith\.muli (%\w+), (%\w+) .*: (?:tensor<[^>]*x)?i32", line)
        if product and wanted & set(product.groups()):
            found.append(line.strip())
    return found
