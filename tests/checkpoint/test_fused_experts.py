"""Experts whose scales, or weights too, lie in one tensor: as transformers' quantizer writes."""

from __future__ import annotations

import pytest
import torch

from anyfp8.checkpoint import open_checkpoint, read_plan
from anyfp8.errors import CheckpointError
from anyfp8.reference import dequantize

EXPERTS = "model.layers.0.mlp.experts"
FINE = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
HIDDEN, COUNT = 160, 3


def mixture(width=256, block=128, fuse_weights=False, single=False):
    """What transformers 5.24 writes, and each expert's gate, up and down in fp32."""
    generator = torch.Generator().manual_seed(0)

    def codes(n, k):
        return (torch.randn(n, k, generator=generator) * 50).clamp(-448, 448)

    def scales(n, k):
        shape = (1, 1) if single else (-(-n // block), -(-k // block))
        return torch.rand(shape, generator=generator) + 0.1

    def values(q, scale):
        n, k = q.shape
        rows = scale.repeat_interleave(n if single else block, 0)
        return q * rows.repeat_interleave(k if single else block, 1)[:n, :k]

    tensors, want, fused = {}, {}, {"gate_up_proj": [], "down_proj": []}
    for name, (n, k) in {"gate_up_proj": (2 * width, HIDDEN), "down_proj": (HIDDEN, width)}.items():
        grids = []
        for i in range(COUNT):
            q = codes(n, k).to(torch.float8_e4m3fn)
            grids.append(scales(n, k))
            fused[name].append(q)
            full = values(q.float(), grids[-1])
            leaves = ("gate_proj", "up_proj") if name == "gate_up_proj" else (name,)
            for leaf, w, part in zip(
                leaves, full.chunk(len(leaves)), q.chunk(len(leaves)), strict=True
            ):
                want[f"{EXPERTS}.{i}.{leaf}"] = w
                if not fuse_weights:
                    tensors[f"{EXPERTS}.{i}.{leaf}.weight"] = part.clone()
        tensors[f"{EXPERTS}.{name}_scale_inv"] = torch.stack(grids)
        if fuse_weights:
            tensors[f"{EXPERTS}.{name}"] = torch.stack([q.view(torch.uint8) for q in fused[name]])
            tensors[f"{EXPERTS}.{name}"] = tensors[f"{EXPERTS}.{name}"].view(torch.float8_e4m3fn)
    return tensors, want


@pytest.mark.parametrize("fuse_weights", [False, True], ids=["scales", "weights"])
@pytest.mark.parametrize("single", [False, True], ids=["block", "tensor"])
def test_every_expert_gets_its_part_of_fused_scales(make_folder, fuse_weights, single):
    tensors, want = mixture(fuse_weights=fuse_weights, single=single)
    block = None if single else [128, 128]
    checkpoint = open_checkpoint(make_folder(tensors, FINE | {"weight_block_size": block}))
    assert checkpoint.plan.layers.keys() == want.keys()
    for layer in checkpoint.layers():
        assert torch.equal(dequantize(layer.weight), want[layer.name])
    assert checkpoint.plan.warnings == ()
    assert checkpoint.plan.plain == ()


def test_static_activation_scales_are_each_experts_own(make_folder):
    tensors, _ = mixture(single=True)
    tensors[f"{EXPERTS}.gate_up_proj_activation_scale"] = torch.tensor([0.5, 0.25, 0.125])
    tensors[f"{EXPERTS}.down_proj_activation_scale"] = torch.tensor([2.0, 3.0, 4.0])
    config = FINE | {"weight_block_size": None, "activation_scheme": "static"}
    checkpoint = open_checkpoint(make_folder(tensors, config))
    assert checkpoint.layer(f"{EXPERTS}.1.gate_proj").input_scale == 0.25
    assert checkpoint.layer(f"{EXPERTS}.1.up_proj").input_scale == 0.25
    assert checkpoint.layer(f"{EXPERTS}.2.down_proj").input_scale == 4.0


@pytest.mark.parametrize("width", [96, 192])
@pytest.mark.parametrize("fuse_weights", [False, True])
def test_blocks_that_lie_in_gate_and_up_are_refused(make_folder, width, fuse_weights):
    # 2 x 96 rows are two blocks, of which the first lies in both
    tensors, _ = mixture(width, fuse_weights=fuse_weights)
    with pytest.raises(CheckpointError, match=r"experts\.gate_up_proj_scale_inv") as caught:
        read_plan(make_folder(tensors, FINE))
    assert f"width {width}" in caught.value.got


def test_an_experts_scale_that_is_there_twice_is_refused(make_folder):
    tensors, _ = mixture()
    tensors[f"{EXPERTS}.1.up_proj.weight_scale_inv"] = torch.ones(2, 2)
    with pytest.raises(CheckpointError, match=r"experts\.1\.up_proj\.weight_scale_inv"):
        read_plan(make_folder(tensors, FINE))


def test_16_bit_experts_that_are_fused_stay_so(make_folder, fp8_layer):
    tensors = fp8_layer("m.up_proj", input_scale=None)
    tensors["m.up_proj.weight_scale_inv"] = tensors.pop("m.up_proj.weight_scale").reshape(1, 1)
    tensors[f"{EXPERTS}.gate_up_proj"] = torch.zeros(2, 8, 4, dtype=torch.bfloat16)
    plan = read_plan(make_folder(tensors, FINE))
    assert plan.plain == (f"{EXPERTS}.gate_up_proj",)
