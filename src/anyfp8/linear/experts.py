"""y_t = Σ_j g_tj · W2_j (act(W1_j x_t) ⊙ W3_j x_t): experts as linear layers of their own.

transformers holds all experts of a layer in two 3-D parameters, checkpoints hold three weights for
each expert. `split_experts` puts the checkpoint's form into the model, so that every expert is
loaded, quantized, calibrated and saved as any linear is.

The surprise: the sum over a token's experts is taken in the order of the router's choice, in one
reduction. Adding them up expert by expert, in 16 bits, depends on what else is in the batch.
"""

from __future__ import annotations

from typing import Any

import torch

# gate, up and down by the names that checkpoints use
LEAVES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))

# attribute of transformers' experts -> the only value that is run, and what another one means
_FORM = {
    "has_gate": (True, "have no gate"),
    "has_bias": (False, "have biases"),
    "is_transposed": (False, "are stored transposed"),
    "is_concatenated": (True, "have gate and up interleaved"),
    "has_post_expert_norm": (False, "are normalised before they are added up"),
}


class Expert(torch.nn.Module):
    """One expert: three linears, by a checkpoint's names.

    Args:
        leaves: names of gate, up and down. gating: see `Experts`.
        linears: gate, up and down, without biases.
    """

    def __init__(
        self, leaves: tuple[str, str, str], linears: tuple[torch.nn.Linear, ...], gating: Any
    ) -> None:
        super().__init__()
        self.leaves = leaves
        # in a tuple, which registers no module: it belongs to all experts
        self._gating = (gating,)
        for leaf, linear in zip(leaves, linears, strict=True):
            self.add_module(leaf, linear)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up, down = (self._modules[leaf] for leaf in self.leaves)
        assert gate is not None
        assert up is not None
        assert down is not None
        return down(self._gating[0]._apply_gate(torch.cat((gate(x), up(x)), -1)))


class Experts(torch.nn.ModuleList):
    """The experts of a layer, called as transformers calls its fused ones."""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Mix the experts that a router has chosen.

        Args:
            hidden_states: [T, K]. top_k_index: [T, k] int64. top_k_weights: [T, k].

        Returns:
            [T, K] of hidden_states' dtype.
        """
        tokens, choices = top_k_index.shape
        chosen = top_k_index.reshape(-1)
        order = chosen.argsort(stable=True)
        # the one wait for the device: how many rows each expert has
        counts = chosen.bincount(minlength=len(self)).tolist()
        rows = hidden_states[order // choices]
        y = hidden_states.new_empty(tokens * choices, hidden_states.shape[1])
        start = 0
        for expert, count in zip(self, counts, strict=True):
            if count:
                part = slice(start, start + count)
                y[order[part]] = expert(rows[part])
                start += count
        mixed = y.view(tokens, choices, y.shape[1]) * top_k_weights.unsqueeze(-1)
        return mixed.sum(1).to(hidden_states.dtype)


def fused_experts(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Modules that hold all experts of a layer in 3-D parameters, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if any(p is not None and p.ndim == 3 for p in module._parameters.values())
        and {"gate_up_proj", "up_proj"} & module._parameters.keys()
        and "down_proj" in module._parameters
    }


def why_not_split(module: Any) -> str:
    """Why fused experts cannot be linears of their own, a clause; "" where they can."""
    for attribute, (wanted, otherwise) in _FORM.items():
        # transformers before 5.20 has no norm behind its experts
        if getattr(module, attribute, wanted) != wanted:
            return f"its experts {otherwise}"
    if "gate_up_proj" not in module._parameters or not hasattr(module, "_apply_gate"):
        return f"{type(module).__name__} has a forward of its own"
    return ""


def split_experts(
    model: torch.nn.Module, name: str, leaves: tuple[str, str, str] = LEAVES[0]
) -> Experts:
    """Put experts of their own in the place of fused ones; their weights share its memory.

    Args:
        name: of a module that `fused_experts` lists and `why_not_split` lets pass.
        leaves: names of gate, up and down.
    """
    fused: Any = model.get_submodule(name)
    gate_up, down = fused._parameters.pop("gate_up_proj"), fused._parameters.pop("down_proj")
    width = gate_up.shape[1] // 2
    experts = Experts()
    for i in range(len(gate_up)):
        weights = (gate_up.data[i, :width], gate_up.data[i, width:], down.data[i])
        linears = tuple(_linear(weight, gate_up.requires_grad) for weight in weights)
        experts.append(Expert(leaves, linears, fused))
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, experts.train(fused.training))
    return experts


def _linear(weight: torch.Tensor, requires_grad: bool) -> torch.nn.Linear:
    n, k = weight.shape
    linear = torch.nn.Linear(k, n, bias=False, device="meta")
    linear.weight = torch.nn.Parameter(weight, requires_grad=requires_grad)
    return linear
