"""config -> Declaration: what a checkpoint says about its layers, before a tensor is looked at.

Each format is one file that turns its own config into a Declaration; the planner then holds the
tensors against it. A format file has `NAME`, `READABLE`, `claims(configs)` and `declare(configs)`,
and is named in `planner.FORMATS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from anyfp8.checkpoint.files import read_json
from anyfp8.checkpoint.rules import PARTS, Rule, RuleSet, fused_name, normalise
from anyfp8.errors import CheckpointError
from anyfp8.problem import Scheme


@dataclass(frozen=True)
class Algorithm:
    """What a checkpoint says of one layer.

    Attributes:
        name: the format's own word, such as "FP8_PER_CHANNEL_PER_TOKEN".
        scheme: what it means here, None when this library doesn't run it.
        refusal: why not, a clause.
    """

    name: str
    scheme: Scheme | None = None
    refusal: str = ""


@dataclass(frozen=True)
class ConfigFiles:
    """The configuration of a checkpoint folder.

    Attributes:
        folder: where the files lie.
        config: config.json, {} without one.
        quantization: its quantization_config, {} without one.
        modelopt: hf_quant_config.json, {} without one.
    """

    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    quantization: Mapping[str, Any] = field(default_factory=dict)
    modelopt: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> ConfigFiles:
        """Read a folder's files. Raises CheckpointError for broken JSON."""
        contents = [
            read_json(folder / name) if (folder / name).is_file() else {}
            for name in ("config.json", "hf_quant_config.json")
        ]
        config, modelopt = contents
        # multimodal wrappers keep it in the text model's part
        text = config.get("text_config")
        quantization = config.get("quantization_config") or (
            text.get("quantization_config") if isinstance(text, dict) else None
        )
        # the name that compressed-tensors used at first
        quantization = quantization or config.get("compression_config")
        if quantization is not None and not isinstance(quantization, dict):
            raise CheckpointError(
                "cannot read the quantization_config of config.json",
                got=repr(quantization)[:80],
                want="an object",
                hint="correct config.json, or export the checkpoint again",
            )
        return cls(folder, config, quantization or {}, modelopt)


@dataclass(frozen=True)
class Declaration:
    """What a config says.

    Attributes:
        format: name of the format.
        producer: tool and version, "" unknown.
        algorithm: the format's word for the whole.
        kv_cache: the format's word for the KV cache, "" for 16 bits.
        default: algorithm of every linear that is not ignored; None where layers are listed.
        layers: algorithms of single modules, which win over the default.
        groups: algorithms by rule, the first match wins, after `layers`.
        ignore: patterns of modules that are left alone.
        warnings: what is odd but harmless.
    """

    format: str
    producer: str = ""
    algorithm: str = ""
    kv_cache: str = ""
    default: Algorithm | None = None
    layers: Mapping[str, Algorithm] = field(default_factory=dict)
    groups: tuple[tuple[Rule, Algorithm], ...] = ()
    ignore: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @cached_property
    def rules(self) -> RuleSet:
        return RuleSet(self.ignore)

    @cached_property
    def _by_name(self) -> dict[str, Algorithm]:
        return {normalise(name): algorithm for name, algorithm in self.layers.items()}

    def algorithm_of(self, module: str) -> Algorithm | None:
        """The algorithm of a module, None where the config leaves it unquantized.

        Ignore rules are not asked. A layer map that names q/k/v serves the fused module and back.

        Raises:
            CheckpointError: the parts of a fused module have different algorithms.
        """
        plain = normalise(module)
        found = self._by_name.get(plain)
        if found is None and (fused := fused_name(plain)):
            found = self._by_name.get(fused)
        head, _, leaf = plain.rpartition(".")
        if found is None and leaf in PARTS:
            parts = [self._by_name.get(f"{head}.{part}" if head else part) for part in PARTS[leaf]]
            if len(set(parts)) > 1:
                raise CheckpointError(
                    f"{module} is fused of layers with different algorithms",
                    got=", ".join(part.name if part else "none" for part in parts),
                    want="one algorithm for all parts",
                    hint="export it again with one algorithm for all parts of the layer",
                )
            found = parts[0]
        if found is not None:
            return found
        for rule, algorithm in self.groups:
            if rule.matches(module):
                return algorithm
        return self.default
