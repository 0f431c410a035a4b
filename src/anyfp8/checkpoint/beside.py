"""weight → its scales: which tensors stand beside an FP8 weight, and what they make of its scheme.

The stored shape has the last word about granularity, the config about activations. A scale that is
absent, doubled, misspelt or of no fitting shape is refused by tensor and file.

The surprise: "ue8m0" in a config is a claim. Scales that are no powers of two are taken as they
are, since rounding them would change every weight of their block.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from anyfp8.checkpoint.files import FLOATS, StoredTensor, TensorFiles
from anyfp8.checkpoint.scales import SCALE_DTYPES, check_scale, fit_scale
from anyfp8.errors import CheckpointError
from anyfp8.problem import Scheme

WEIGHT_SCALES = (
    "weight_scale",
    "weight_scale_inv",
    "scale_weight",
    "qscale_weight",
    "weight.scale",
    "scale",
)
INPUT_SCALES = ("input_scale", "activation_scale", "scale_input", "qscale_act")
# written for KV caches and other kernels; kept for saving, never used by a linear
OPTIONAL = ("k_scale", "v_scale", "q_scale", "kv_scale", "output_scale", "prob_output_scale")
# what symmetric formats write all the same: compressed-tensors' and Quark's, always zero
ZERO_POINTS = ("weight_zero_point", "input_zero_point", "output_zero_point")
# FBGEMM's bound of the activations, which its config says too
BOUNDS = ("input_scale_ub", "activation_scale_ub")
KNOWN = (*WEIGHT_SCALES, *INPUT_SCALES, *OPTIONAL, *ZERO_POINTS, *BOUNDS)
# activations beyond 448 times these are not met in working models; uninitialised memory is
_PLAUSIBLE = (1e-9, 1e5)


@dataclass(frozen=True)
class Beside:
    """Finds and judges what stands beside a weight.

    Attributes:
        files: of the checkpoint.
        note: told (sentence, module) of what is odd but harmless.
        declared: whether a config has said what the layers are.
        allow_missing_scale, dynamic_fallback: as in `planner.read_plan`.
    """

    files: TensorFiles
    note: Callable[[str, str], None]
    declared: bool
    allow_missing_scale: bool
    dynamic_fallback: bool

    def found(self, module: str, names: Iterable[str]) -> list[str]:
        """The tensors of a module among the names."""
        return [full for name in names if (full := f"{module}.{name}") in self.files]

    def weight_scale(
        self, module: str, where: str, scheme: Scheme, n: int, k: int
    ) -> tuple[Scheme, str | None]:
        """The scale of a weight [N, K] and the scheme that it makes.

        Args:
            where: the weight, for messages. scheme: what the config says.
        """
        found = self.found(module, WEIGHT_SCALES)
        if len(found) > 1:
            raise CheckpointError(
                f"two scales for {where}",
                got=" and ".join(found),
                want="one of them",
                hint="remove the stale one, or export the checkpoint again",
            )
        if not found:
            near = self._near(module)
            if not self.allow_missing_scale or near:
                raise CheckpointError(
                    f"FP8 weight without its scale: {where}",
                    got=f"beside it only {near}" if near else "no scale beside it",
                    want=" or ".join(f"{module}.{name}" for name in WEIGHT_SCALES[:2]),
                    hint="rename the tensor"
                    if near
                    else "export it again; allow_missing_scale=True takes the scale as 1",
                )
            self.note("FP8 weights without a scale, taken as 1", module)
            return replace(scheme, weight="tensor", block=None, scale_format="float32"), None
        scale = self.files.tensors[found[0]]
        fitting = fit_scale(scale.shape, n, k, scheme)
        # plain bytes are exponents only where the config says so
        exponents = scale.dtype == "U8" and fitting is not None and fitting.scale_format == "ue8m0"
        if fitting is None or not (exponents or scale.dtype in SCALE_DTYPES):
            raise CheckpointError(
                f"the scale {scale.name} in {scale.file.name} fits no granularity of its weight",
                got=f"{scale.dtype} {list(scale.shape)} for a weight [{n}, {k}]",
                want=f"[], [{n}], [{n}, 1] or {_grid(scheme, n, k)} of a float dtype",
                hint="export the checkpoint again: the scale is of another weight or block",
            )
        if fitting != scheme and self.declared:
            self.note(
                f"the config says {scheme.name}, the stored scales make it {fitting.name}", module
            )
        values = self.files.read(scale.name)
        check_scale(values, scale)
        return self._claimed(module, fitting, scale, values), scale.name

    def _claimed(
        self, module: str, scheme: Scheme, stored: StoredTensor, values: torch.Tensor
    ) -> Scheme:
        if scheme.scale_format != "ue8m0" or stored.dtype not in FLOATS:
            return scheme
        mantissas, _ = torch.frexp(values.float())
        if bool((mantissas == 0.5).all()):
            return scheme
        self.note("the config says ue8m0, the scales are no powers of two and stay fp32", module)
        return replace(scheme, scale_format="float32")

    def input_scale(self, module: str, scheme: Scheme) -> tuple[Scheme, str | None]:
        """The static activation scale of a layer, and its scheme with what became of it."""
        found = self.found(module, INPUT_SCALES)
        if len(found) > 1:
            raise CheckpointError(
                f"two input scales for {module}",
                got=" and ".join(found),
                want="one of them",
                hint="remove the stale one, or export the checkpoint again",
            )
        static = scheme.activation == "tensor" and not scheme.dynamic
        if not found and not static:
            return scheme, None
        try:
            if not found:
                raise CheckpointError(
                    f"no input_scale for the static layer {module}",
                    want=f"{module}.{INPUT_SCALES[0]}, one positive value",
                )
            stored = self.files.tensors[found[0]]
            value = self.files.read(stored.name)
            check_scale(value, stored, single=True)
            if static and not _PLAUSIBLE[0] < float(value) < _PLAUSIBLE[1]:
                self.note("input scales that no calibration gives, check the outputs", module)
            return scheme, stored.name
        except CheckpointError as error:
            if not static:
                raise
            if not self.dynamic_fallback:
                error.hint = "calibrate it again, or --dynamic-fallback (dynamic_fallback=True)"
                raise
            self.note("no usable input_scale, activations quantized dynamically", module)
            return replace(scheme, dynamic=True), None

    def redundant(self, module: str) -> list[str]:
        """Tensors of a quantized module that say nothing: zero points of zero, known bounds.

        Raises:
            CheckpointError: a zero point that is none.
        """
        for name in self.found(module, ZERO_POINTS):
            stored, values = self.files.tensors[name], self.files.read(name)
            if bool((values.float() != 0).any()):
                raise CheckpointError(
                    f"cannot use the zero point {name} in {stored.file.name}",
                    got=f"{stored.dtype} {list(stored.shape)} with values that are not 0",
                    want="symmetric FP8 weights and activations",
                    hint="export the checkpoint again, with a symmetric scheme",
                )
        found = self.found(module, (*ZERO_POINTS, *BOUNDS))
        if found:
            self.note("zero points of 0 or bounds that the config repeats, not kept", module)
        return found

    def _near(self, module: str) -> str | None:
        """A tensor beside the weight that looks like a misspelt scale."""
        known = {*KNOWN, "weight", "bias"}
        leaves = [
            leaf
            for name in self.files.tensors
            if name.startswith(f"{module}.") and (leaf := name[len(module) + 1 :]) not in known
        ]
        near = difflib.get_close_matches("weight_scale", leaves, 1)
        return f"{module}.{near[0]}" if near else None


def _grid(scheme: Scheme, n: int, k: int) -> str:
    rows, columns = scheme.block or (128, 128)
    return f"[{-(-n // rows)}, {-(-k // columns)}]"
