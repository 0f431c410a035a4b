"""k_scale, v_scale of a checkpoint → the names that an engine gives them, and who can use them.

A linear layer never reads them; an engine multiplies its FP8 KV cache by them. Each format puts
them elsewhere: on the projections (ModelOpt, and Quark as `output_scale`) or on the attention
module (compressed-tensors, and old vLLM files as one `kv_scale`).

The surprise: a GPU without FP8 units runs an FP8 checkpoint's layers weight-only, but an E4M3 KV
cache has no such way out in the engines' Triton kernels: they fail to compile at the first token
("fp8e4nv not supported in this architecture"), so it is refused here by name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from anyfp8.checkpoint.plan import CheckpointPlan
from anyfp8.checkpoint.reader import Checkpoint
from anyfp8.checkpoint.scales import check_scale
from anyfp8.device import Device
from anyfp8.errors import DeviceError, InputError

# engine -> where it keeps the scale of an attention module
_NAMES = {
    "modelopt": "{attention}.{kind}_proj.{kind}_scale",
    "compressed-tensors": "{attention}.{kind}_scale",
    "sglang": "{attention}.attn.{kind}_scale",
    "vllm": "{attention}.attn.{kind}_scale",
}
ENGINES = tuple(_NAMES)
_PROJECTIONS = {"q_proj": "q", "k_proj": "k", "v_proj": "v"}


@dataclass(frozen=True)
class KvScale:
    """One scale of one attention module.

    Attributes:
        tensor: its name in the file.
        attention: the attention module, such as model.layers.0.self_attn.
        kind: "k", "v" or "q".
    """

    tensor: str
    attention: str
    kind: str

    def name_in(self, engine: str) -> str:
        """What an engine (one of `ENGINES`) calls it. Raises InputError for another one."""
        if engine not in _NAMES:
            raise InputError("not an engine", got=repr(engine), want=", ".join(ENGINES))
        return _NAMES[engine].format(attention=self.attention, kind=self.kind)


def kv_scales(plan: CheckpointPlan) -> tuple[KvScale, ...]:
    """The KV-cache scales of a checkpoint, in the order of its file."""
    names = [name for layer in plan.layers.values() for name in layer.extras]
    found: list[KvScale] = []
    for name in (*names, *plan.optional):
        found += _read(name, bool(plan.kv_cache))
    return tuple(found)


def _read(tensor: str, declared: bool) -> Iterable[KvScale]:
    module, _, leaf = tensor.rpartition(".")
    attention, _, projection = module.rpartition(".")
    if leaf == "kv_scale":
        return [KvScale(tensor, module, kind) for kind in "kv"]
    if leaf == "output_scale":
        # the scale of a projection's output is the cache's only where the config speaks of one
        kind = _PROJECTIONS.get(projection)
        return [KvScale(tensor, attention, kind)] if kind and declared else []
    if leaf not in ("q_scale", "k_scale", "v_scale"):
        return []
    on_projection = projection in (*_PROJECTIONS, "qkv_proj", "attn")
    return [KvScale(tensor, attention if on_projection else module, leaf[0])]


def engine_scales(checkpoint: Checkpoint, engine: str) -> dict[str, torch.Tensor]:
    """The scales under an engine's names, fp32 [] each, to be copied into its attention modules.

    Raises:
        InputError: not one of `ENGINES`.
        CheckpointError: one of them is not a finite positive value.
    """
    found = {}
    for scale in kv_scales(checkpoint.plan):
        value = checkpoint.tensor(scale.tensor)
        check_scale(value, checkpoint.plan.files.tensors[scale.tensor], single=True)
        found[scale.name_in(engine)] = value.float().reshape(())
    return found


def is_e4m3(kv_cache: str) -> bool:
    """Whether a format's word for the KV cache means E4M3, which plain "FP8" does everywhere."""
    word = kv_cache.lower().replace("_", "")
    return word.startswith(("fp8", "float8")) and "e5m2" not in word


def kv_cache_refusal(kv_cache: str, device: Device) -> DeviceError | None:
    """Why a GPU cannot hold the KV cache that a checkpoint asks for; None where it can.

    Args:
        kv_cache: `CheckpointPlan.kv_cache`.
    """
    if device.vendor == "cpu" or device.has_fp8 or not is_e4m3(kv_cache):
        return None
    return DeviceError(
        f"{device.name} cannot hold the E4M3 KV cache that this checkpoint asks for",
        got=f"KV cache {kv_cache} on {device.arch.name}, which has no E4M3 conversions",
        want="a KV cache in 16 bits there, or in E5M2",
        hint="serve it with --kv-cache-dtype bfloat16; its linear layers run there",
    )


def check_kv_cache(plan: CheckpointPlan, device: Device) -> None:
    """For engines, before they allocate a cache.

    Raises:
        DeviceError: the GPU has no E4M3 and the checkpoint asks for an E4M3 KV cache.
    """
    refusal = kv_cache_refusal(plan.kv_cache, device)
    if refusal is not None:
        raise refusal
