"""read_plan(path) -> CheckpointPlan, or an error before anything is allocated.

Two witnesses are heard. The config says which modules are quantized and how; the tensors say which
weights are FP8, what their scales are called and which shape they have. The plan exists only where
both agree and every tensor has a place: a weight without its scale, a scale without its weight, a
misspelt name or a bad value is an error that names the file and the tensor.

The surprise: whatever its name ("weight_scale", "weight_scale_inv", ...), a scale is multiplied.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from anyfp8.checkpoint.beside import INPUT_SCALES, OPTIONAL, WEIGHT_SCALES, Beside
from anyfp8.checkpoint.declaration import Algorithm, ConfigFiles, Declaration
from anyfp8.checkpoint.files import FLOATS, TensorFiles
from anyfp8.checkpoint.fused_experts import split_experts
from anyfp8.checkpoint.linears import is_linear
from anyfp8.checkpoint.places import FP8, find_places, refuse_unaccounted
from anyfp8.checkpoint.plan import CheckpointPlan, LayerPlan
from anyfp8.checkpoint.shards import list_tensors
from anyfp8.errors import CheckpointError
from anyfp8.problem import Scheme

# one file per format, the first that claims a config reads it
FORMATS = (compressed_tensors, finegrained, fbgemm, quark, torchao, w8a8_fp8, modelopt)

_PACKED = ".weight_packed"


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
    if declared.format == finegrained.NAME and declared.default is not None:
        assert declared.default.scheme is not None
        files = split_experts(files, declared.default.scheme.block)
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
        self.layers: dict[str, LayerPlan] = {}
        # warning -> the modules it is about: one sentence each, however many layers
        self.notes: dict[str, list[str]] = {}
        has_config = declared.format != "hf16"
        self.beside = Beside(files, self._note, has_config, allow_missing_scale, dynamic_fallback)

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
            if self.tensors[f"{module}.weight"].dtype in FP8:
                self.layers[module] = self._layer(module, algorithm)
            else:
                self._check_unquantized(module, algorithm)
        for name in self.declared.layers.keys() - algorithms.keys():
            self._note("the config lists layers that have no weight", name)
        redundant = [name for module in self.layers for name in self.beside.redundant(module)]
        places = find_places(self.tensors, self.layers, redundant)
        unaccounted = tuple(name for name in self.tensors if not places[name])
        if unaccounted and strict:
            refuse_unaccounted(self.tensors, unaccounted)
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
        scheme, scale = self.beside.weight_scale(module, where, algorithm.scheme, n, k)
        scheme, input_scale = self.beside.input_scale(module, scheme)
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

    def _check_unquantized(self, module: str, algorithm: Algorithm | None) -> None:
        weight = self.tensors[f"{module}.weight"]
        # a plain ".scale" beside a 16-bit weight is some layer's own parameter
        strays = self.beside.found(module, (*WEIGHT_SCALES[:-1], *INPUT_SCALES))
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


def _expected_fp8(name: str, shape: tuple[int, ...]) -> bool:
    # every tool leaves the head alone, and half of them without saying so
    return is_linear(name, shape) and not name.endswith("lm_head.weight")


def _list(names: list[str], most: int = 3) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
