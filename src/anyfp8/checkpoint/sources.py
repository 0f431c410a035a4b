"""path -> Source: a model in 16 or 32 bits, read one tensor at a time, to be quantized.

Two kinds: a Hugging Face folder of safetensors, and a GGUF file (`gguf_source.py`), which is
dequantized to bf16. A tied lm_head has no tensor of its own and stays tied.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from anyfp8.checkpoint.declaration import ConfigFiles
from anyfp8.checkpoint.files import TensorSpec
from anyfp8.checkpoint.plan import CheckpointPlan
from anyfp8.checkpoint.planner import checkpoint_folder, read_plan
from anyfp8.errors import CheckpointError

# weights in any format, and what the writer makes itself
_NOT_COPIED = (
    ".safetensors",
    ".index.json",
    ".bin",
    ".pt",
    ".pth",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
    ".md",
    ".lock",
)
_WRITTEN = ("config.json", "hf_quant_config.json")


class Source(Protocol):
    """A model to quantize.

    Attributes:
        path: file or folder.
        format: "hf16" or "gguf".
        config: config.json, without any quantization_config.
        specs: name -> dtype and shape of every tensor, in file order.
    """

    @property
    def path(self) -> Path: ...

    @property
    def format(self) -> str: ...

    @property
    def config(self) -> Mapping[str, Any]: ...

    @property
    def specs(self) -> Mapping[str, TensorSpec]: ...

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor in memory of its own, of the dtype of its spec."""
        ...

    def write_sidecars(self, folder: Path) -> None:
        """Write config.json, the tokenizer and the generation config into a folder."""
        ...


@dataclass(frozen=True)
class HfSource:
    """A Hugging Face folder in 16 or 32 bits; see `Source`."""

    path: Path
    plan: CheckpointPlan = field(repr=False)
    format: str = "hf16"

    @property
    def config(self) -> Mapping[str, Any]:
        return self.plan.config

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        return self.plan.files.tensors

    def tensor(self, name: str) -> torch.Tensor:
        return self.plan.files.read(name)

    def write_sidecars(self, folder: Path) -> None:
        write_json(folder / "config.json", self.config)
        copy_sidecars(self.path, folder)


def open_source(path: str | Path) -> Source:
    """Open a model to quantize.

    Args:
        path: Hugging Face folder, GGUF file, or a folder that holds one GGUF file and no
            safetensors.

    Raises:
        CheckpointError: nothing usable there, or a model that is quantized already.
        MissingPackage: a GGUF file without the `gguf` and `tokenizers` packages.
    """
    path = Path(path).expanduser()
    file = path if path.is_file() else _only_gguf(path)
    if file is not None:
        if file.suffix.lower() != ".gguf":
            raise CheckpointError(
                f"cannot quantize the file {file.name}",
                want="a Hugging Face folder or a .gguf file",
            )
        from anyfp8.checkpoint.gguf_source import GgufSource

        return GgufSource(file)
    folder = checkpoint_folder(path)
    if is_quantized(folder):
        method = ConfigFiles.read(folder).quantization.get("quant_method", "modelopt")
        raise CheckpointError(
            f"{folder.name} is quantized already",
            got=f"quant_method {method}",
            want="a checkpoint in bf16, fp16 or fp32",
            hint="quantize its 16-bit original",
        )
    plan = read_plan(folder)
    if plan.layers:
        raise CheckpointError(
            f"{folder.name} is quantized already",
            got=f"{len(plan.layers)} FP8 weights, such as {next(iter(plan.layers))}",
            want="a checkpoint in bf16, fp16 or fp32",
            hint="quantize its 16-bit original, or convert it with --from-fp8",
        )
    if not plan.config:
        raise CheckpointError(
            f"no config.json in {folder.name}",
            want="a Hugging Face model folder",
            hint="copy it from the model's page",
        )
    return HfSource(folder, plan)


def is_quantized(path: str | Path) -> bool:
    """Whether a path is a folder whose config says that it is quantized, in whatever format."""
    path = Path(path).expanduser()
    if not path.is_dir() or _only_gguf(path) is not None:
        return False
    configs = ConfigFiles.read(path)
    return bool(configs.quantization or configs.modelopt)


def copy_sidecars(source: Path, folder: Path) -> None:
    """Copy what is neither weights nor config: the tokenizer, the generation config, templates."""
    for file in sorted(source.iterdir()):
        skip = file.name in _WRITTEN or file.name.startswith(".")
        if file.is_file() and not skip and not file.name.endswith(_NOT_COPIED):
            shutil.copyfile(file, folder / file.name)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file as transformers formats it."""
    path.write_text(
        json.dumps(dict(content), indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def _only_gguf(folder: Path) -> Path | None:
    if not folder.is_dir() or any(folder.glob("*.safetensors")):
        return None
    found = sorted(folder.glob("*.gguf"))
    if len(found) > 1:
        raise CheckpointError(
            f"several GGUF files in {folder.name}",
            got=", ".join(file.name for file in found),
            want="the path of one",
        )
    return found[0] if found else None
