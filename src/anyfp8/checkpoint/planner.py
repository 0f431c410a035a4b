"""read_plan(path) -> CheckpointPlan, or an error before anything is allocated.

Two witnesses are heard. The config says which modules are quantized and how; the tensors say which
weights are FP8, what their scales are called and which shape they have. The plan exists only where
both agree and every tensor has a place: a weight without its scale, a scale without its weight, a
misspelt name or a bad value is an error that names the file and the tensor.

The surprise: whatever its name ("weight_scale", "weight_scale_inv", ...), a scale is multiplied.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from anyfp8.checkpoint import (
    compressed_tensors,
    fbgemm,
    finegrained,
    modelopt,
    quark,
    torchao,
    w8a8_fp8,
)
from anyfp8.checkpoint.declaration import Algorithm, ConfigFiles, Declaration
from anyfp8.checkpoint.files import FLOATS, TensorFiles, list_tensors
from anyfp8.checkpoint.linears import is_linear
from anyfp8.checkpoint.plan import CheckpointPlan, LayerPlan
from anyfp8.checkpoint.scales import SCALE_DTYPES, check_scale, fit_scale
from anyfp8.errors import CheckpointError
from anyfp8.problem import Scheme

# one file per format, the first that claims a config reads it
FORMATS = (compressed_tensors, finegrained, fbgemm, quark, torchao, w8a8_fp8, modelopt)

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
_SCALE_LIKE = re.compile(r"(weight|input|activation|act)_?(scale|zero_point)|scale_(weight|input)")
# activations beyond 448 times these are not met in working models; uninitialised memory is
_PLAUSIBLE = (1e-9, 1e5)
_PACKED = ".weight_packed"
_FP8 = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")


def read_plan(
    path: str | Path,
    *,
    allow_missing_scale: bool = False,
    dynamic_fallback: bool = False,
    strict: bool = True,
) -> CheckpointPlan:
    """Plan the load of a checkpoint folder.

    Args:
        path: folder with config.json and safetensors.
        allow_missing_scale: take an FP8 weight without a scale as scale 1, with a warning.
        dynamic_fallback: quantize activations dynamically, with a warning, where a static layer's
            input_scale is absent or unusable.
        strict: raise for tensors without a place; False lists them in `unaccounted`.

    Raises:
        CheckpointError: anything that would make the loaded model wrong; names file and tensor.
    """
    folder = checkpoint_folder(path)
    configs = ConfigFiles.read(folder)
    declared = declare(configs)
    files = list_tensors(folder)
    if declared.format == torchao.NAME:
        files = torchao.rename(files)
    planner = _Planner(files, declared, allow_missing_scale, dynamic_fallback)
    return planner.plan(folder, configs.config, strict)


def checkpoint_folder(path: str | Path) -> Path:
    """The folder of a checkpoint. Raises CheckpointError where there is none."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    raise CheckpointError(
        f"no checkpoint at {path}",
        got="a file" if folder.exists() else "nothing there",
        want="a folder with config.json and safetensors",
        hint="download it first: hf download NAME --local-dir FOLDER",
    )


def declare(configs: ConfigFiles) -> Declaration:
    """What the config of a checkpoint says, in whichever format it is.

    Raises:
        CheckpointError: a format that no file of this folder reads, or an algorithm for the whole
            checkpoint that this library doesn't run.
    """
    if not configs.quantization and not configs.modelopt:
        return Declaration("hf16")
    reader = next((r for r in FORMATS if r.claims(configs)), None)
    if reader is None:
        raise CheckpointError(
            f"cannot read the quantization format of {configs.folder.name}",
            got=f"quant_method {configs.quantization.get('quant_method')!r}",
            want=", ".join(repr(r.NAME) for r in FORMATS),
            hint="start from the 16-bit original: anyfp8 quantize ORIGINAL OUT",
        )
    declared = reader.declare(configs)
    if declared.default is not None and declared.default.scheme is None:
        raise CheckpointError(
            f"cannot run the quantization of {configs.folder.name}",
            got=f"{declared.format} algorithm {declared.algorithm}: {declared.default.refusal}",
            want=reader.READABLE,
            hint="start from the 16-bit original: anyfp8 quantize ORIGINAL OUT",
        )
    return declared


class _Planner:
    """Gives every tensor its place, or says which has none."""

    def __init__(
        self,
        files: TensorFiles,
        declared: Declaration,
        allow_missing_scale: bool,
        dynamic_fallback: bool,
    ) -> None:
        self.files = files
        self.tensors = files.tensors
        self.declared = declared
        self.allow_missing_scale = allow_missing_scale
        self.dynamic_fallback = dynamic_fallback
        self.layers: dict[str, LayerPlan] = {}
        # warning -> the modules it is about: one sentence each, however many layers
        self.notes: dict[str, list[str]] = {}

    def plan(self, folder: Path, config: Mapping[str, Any], strict: bool) -> CheckpointPlan:
        modules = [name[: -len(".weight")] for name in self.tensors if name.endswith(".weight")]
        matched: dict[str, list[str]] = {pattern: [] for pattern in self.declared.ignore}
        # a tied lm_head has no tensor, but a rule for it is not idle
        tied = bool(config.get("tie_word_embeddings")) and "lm_head" not in modules
        for module in [*modules, *(["lm_head"] if tied else [])]:
            for rule in self.declared.rules.matching(module):
                matched[rule.pattern].append(module)
        algorithms = {module: self._algorithm(module) for module in modules}
        # what other formats pack has no weight, but a name to be refused by
        packed = [name[: -len(_PACKED)] for name in self.tensors if name.endswith(_PACKED)]
        self._refuse_algorithms(algorithms | {name: self._algorithm(name) for name in packed})
        for module, algorithm in algorithms.items():
            if self.tensors[f"{module}.weight"].dtype in _FP8:
                self.layers[module] = self._layer(module, algorithm)
            else:
                self._check_unquantized(module, algorithm)
        for name in self.declared.layers.keys() - algorithms.keys():
            self._note("the config lists layers that have no weight", name)
        places = self._places()
        unaccounted = tuple(name for name in self.tensors if not places[name])
        if unaccounted and strict:
            self._raise_unaccounted(unaccounted)
        bare = self.declared.format == "hf16" and self.layers
        return CheckpointPlan(
            path=folder,
            format="bare-fp8" if bare else self.declared.format,
            producer=self.declared.producer,
            algorithm=self.declared.algorithm,
            kv_cache=self.declared.kv_cache,
            config=config,
            layers=self.layers,
            plain=tuple(name for name, place in places.items() if place == "plain"),
            optional=tuple(name for name, place in places.items() if place == "optional"),
            rules=tuple((pattern, tuple(found)) for pattern, found in matched.items()),
            warnings=(
                *self.files.warnings,
                *self.declared.warnings,
                *(f"{note}: {_list(found)}" for note, found in self.notes.items()),
            ),
            unaccounted=unaccounted,
            files=self.files,
        )

    def _note(self, sentence: str, module: str) -> None:
        self.notes.setdefault(sentence, []).append(module)

    def _algorithm(self, module: str) -> Algorithm | None:
        """None for a module that the config leaves unquantized."""
        if self.declared.rules.ignored(module):
            return None
        return self.declared.algorithm_of(module)

    def _refuse_algorithms(self, algorithms: Mapping[str, Algorithm | None]) -> None:
        refused = {m: a for m, a in algorithms.items() if a is not None and a.scheme is None}
        if not refused:
            return
        algorithm = next(iter(refused.values()))
        same = [m for m, a in refused.items() if a == algorithm]
        raise CheckpointError(
            f"cannot run {len(refused)} of the quantized layers: {_list(same)}",
            got=f"{algorithm.name or 'an empty algorithm'}: {algorithm.refusal}",
            want="FP8 layers only",
            hint="serve it with an engine that has these kernels, or export the model again in FP8",
        )

    def _layer(self, module: str, algorithm: Algorithm | None) -> LayerPlan:
        weight = self.tensors[f"{module}.weight"]
        where = f"{weight.name} in {weight.file.name}"
        if weight.dtype != "F8_E4M3" or len(weight.shape) != 2 or 0 in weight.shape:
            raise CheckpointError(
                f"cannot use the FP8 tensor {where}",
                got=f"{weight.dtype} {list(weight.shape)}",
                want="F8_E4M3 [N, K]",
                hint="export the checkpoint again; anyfp8 reads e4m3fn weights of linear layers",
            )
        if algorithm is None:
            algorithm = self._undeclared(module, where)
        assert algorithm.scheme is not None
        n, k = weight.shape
        scheme, scale = self._weight_scale(module, where, algorithm.scheme, n, k)
        scheme, input_scale = self._input_scale(module, scheme)
        bias = f"{module}.bias"
        stored = self.tensors[scale] if scale else None
        return LayerPlan(
            name=module,
            scheme=scheme,
            algorithm=algorithm.name,
            n=n,
            k=k,
            weight=weight.name,
            weight_scale=scale,
            scale_shape=stored.shape if stored else (),
            scale_dtype=stored.dtype if stored else "F32",
            input_scale=input_scale,
            bias=bias if bias in self.tensors else None,
            extras=tuple(e for o in OPTIONAL if (e := f"{module}.{o}") in self.tensors),
        )

    def _undeclared(self, module: str, where: str) -> Algorithm:
        if self.declared.format == "hf16":
            self._note("no quantization_config: read as weight-only, by the tensors", module)
            return Algorithm("", Scheme())
        rules = [repr(rule.pattern) for rule in self.declared.rules.matching(module)]
        raise CheckpointError(
            f"the config leaves {module} unquantized, but {where} is FP8",
            got=f"ignore rule {', '.join(rules)}" if rules else "a layer map without it",
            want="config and tensors that agree",
            hint="correct the config, or export the model again",
        )

    def _weight_scale(
        self, module: str, where: str, scheme: Scheme, n: int, k: int
    ) -> tuple[Scheme, str | None]:
        found = self._beside(module, WEIGHT_SCALES)
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
            self._note("FP8 weights without a scale, taken as 1", module)
            return replace(scheme, weight="tensor", block=None, scale_format="float32"), None
        scale = self.tensors[found[0]]
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
        if fitting != scheme and self.declared.format != "hf16":
            self._note(
                f"the config says {scheme.name}, the stored scales make it {fitting.name}", module
            )
        check_scale(self.files.read(scale.name), scale)
        return fitting, scale.name

    def _input_scale(self, module: str, scheme: Scheme) -> tuple[Scheme, str | None]:
        found = self._beside(module, INPUT_SCALES)
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
            stored = self.tensors[found[0]]
            value = self.files.read(stored.name)
            check_scale(value, stored, single=True)
            if static and not _PLAUSIBLE[0] < float(value) < _PLAUSIBLE[1]:
                self._note("input scales that no calibration gives, check the outputs", module)
            return scheme, stored.name
        except CheckpointError as error:
            if not static:
                raise
            if not self.dynamic_fallback:
                error.hint = "calibrate it again, or --dynamic-fallback (dynamic_fallback=True)"
                raise
            self._note("no usable input_scale, activations quantized dynamically", module)
            return replace(scheme, dynamic=True), None

    def _check_unquantized(self, module: str, algorithm: Algorithm | None) -> None:
        weight = self.tensors[f"{module}.weight"]
        # a plain ".scale" beside a 16-bit weight is some layer's own parameter
        strays = self._beside(module, (*WEIGHT_SCALES[:-1], *INPUT_SCALES))
        # a group's pattern may also match what is no linear; a name in a layer map may not
        listed = algorithm is not None and self.declared.default is None
        listed = listed and (bool(self.declared.layers) or is_linear(weight.name, weight.shape))
        if weight.dtype not in FLOATS:
            if algorithm is not None or strays:
                raise CheckpointError(
                    f"not an FP8 weight: {weight.name} in {weight.file.name}",
                    got=f"{weight.dtype} {list(weight.shape)}",
                    want="F8_E4M3 as the config says",
                    hint="correct config.json, or export the checkpoint again",
                )
        elif algorithm is None and strays:
            self._note("scales of unquantized layers, not used", module)
        elif algorithm is not None and (strays or listed):
            raise CheckpointError(
                f"the config says FP8, the weight is not: {weight.name} in {weight.file.name}",
                got=f"{weight.dtype} {list(weight.shape)}"
                + (f" with {' and '.join(strays)}" if strays else ""),
                want=f"F8_E4M3 with its scale ({algorithm.name})",
                hint="export it again: quantized and unquantized weights are mixed up",
            )
        elif algorithm is not None and _expected_fp8(weight.name, weight.shape):
            self._note("linears that are neither quantized nor ignored, kept in 16 bits", module)

    def _beside(self, module: str, names: Iterable[str]) -> list[str]:
        return [full for name in names if (full := f"{module}.{name}") in self.tensors]

    def _near(self, module: str) -> str | None:
        """A tensor beside the weight that looks like a misspelt scale."""
        known = {*WEIGHT_SCALES, *INPUT_SCALES, *OPTIONAL, "weight", "bias"}
        leaves = [
            leaf
            for name in self.tensors
            if name.startswith(f"{module}.") and (leaf := name[len(module) + 1 :]) not in known
        ]
        near = difflib.get_close_matches("weight_scale", leaves, 1)
        return f"{module}.{near[0]}" if near else None

    def _places(self) -> dict[str, str]:
        places = dict.fromkeys(self.tensors, "")
        for layer in self.layers.values():
            places.update(dict.fromkeys(layer.tensors, "layer"))
        for name, stored in self.tensors.items():
            if not places[name]:
                module, _, leaf = name.rpartition(".")
                module = module.removesuffix(".weight") if leaf == "scale" else module
                places[name] = self._place(module, leaf, stored.dtype)
        return places

    def _place(self, module: str, leaf: str, dtype: str) -> str:
        beside_weight = f"{module}.weight" in self.tensors
        if dtype in _FP8 or (module in self.layers):
            # nothing but the known names may stand beside a quantized weight
            unused = module in self.layers and leaf in INPUT_SCALES
            return "optional" if unused and self.layers[module].scheme.dynamic else ""
        if leaf in OPTIONAL:
            return "optional"
        if _SCALE_LIKE.search(leaf):
            known = leaf in WEIGHT_SCALES or leaf in INPUT_SCALES
            return "optional" if known and beside_weight else ""
        return "plain"

    def _raise_unaccounted(self, names: tuple[str, ...]) -> None:
        name = names[0]
        stored = self.tensors[name]
        module, _, leaf = name.rpartition(".")
        known = (*WEIGHT_SCALES, *INPUT_SCALES, *OPTIONAL)
        near = difflib.get_close_matches(leaf, known, 1)
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        raise CheckpointError(
            f"no place for the tensor {name} in {stored.file.name}{more}",
            got=f"{stored.dtype} {list(stored.shape)}",
            want=f"known names beside a weight, such as {module}.{near[0] if near else known[0]}",
            hint="a misspelt or foreign scale: rename or remove it"
            if "scale" in leaf
            else "export the checkpoint again",
        )


def _expected_fp8(name: str, shape: tuple[int, ...]) -> bool:
    # every tool leaves the head alone, and half of them without saying so
    return is_linear(name, shape) and not name.endswith("lm_head.weight")


def _grid(scheme: Scheme, n: int, k: int) -> str:
    rows, columns = scheme.block or (128, 128)
    return f"[{-(-n // rows)}, {-(-k // columns)}]"


def _list(names: list[str], most: int = 3) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
