"""GGUF vocabulary -> tokenizer.json and tokenizer_config.json.

Byte-level BPE models only (tokenizer.ggml.model "gpt2"). The split before BPE is not in the file,
only its name (tokenizer.ggml.pre), so the known names are a table here.

The surprise: "smollm" splits numbers into digits first. Transformers' own conversion forgets that,
and its ids differ on texts with numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anyfp8.errors import CheckpointError, MissingPackage

# llama.cpp's llama_token_type
_CONTROL, _USER_DEFINED = 3, 4
# the split of Llama 3 and, with single digits, Qwen 2 (their published tokenizer.json)
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{DIGITS}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    "llama-bpe": _WORDS.replace("{DIGITS}", "{1,3}"),
    "qwen2": _WORDS.replace("{DIGITS}", ""),
}
PRE_TOKENIZERS = ("smollm", "gpt-2", "default", *_SPLITS)


def write_tokenizer(folder: Path, values: Mapping[str, Any], length: int, file: str) -> None:
    """Write the two tokenizer files that transformers reads.

    Args:
        folder: where to.
        values: metadata by key without "tokenizer.", such as "ggml.tokens".
        length: longest input of the model, in tokens.
        file: name of the GGUF file, for messages.

    Raises:
        CheckpointError: a kind of tokenizer that is not known here.
        MissingPackage: without `tokenizers`.
    """
    try:
        from tokenizers import AddedToken, Tokenizer, decoders, models, processors
    except ImportError as error:
        raise MissingPackage(
            "making a tokenizer from a GGUF file needs the tokenizers package",
            got=str(error),
            hint="pip install 'anyfp8[models]'",
            want="tokenizers 0.22 or newer",
        ) from error
    from anyfp8.checkpoint.sources import write_json

    check_tokenizer(values, file)
    tokens: list[str] = values["ggml.tokens"]
    kinds = values.get("ggml.token_type") or [1] * len(tokens)
    merges = [tuple(merge.split(" ", 1)) for merge in values["ggml.merges"]]
    pre = values.get("ggml.pre", "default")
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=merges,
            ignore_merges=pre == "llama-bpe",
        )
    )
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    special = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(special)
    names = {
        role: tokens[values[key]]
        for role, key in (
            ("bos_token", "ggml.bos_token_id"),
            ("eos_token", "ggml.eos_token_id"),
            ("unk_token", "ggml.unknown_token_id"),
            ("pad_token", "ggml.padding_token_id"),
        )
        if values.get(key) is not None
    }
    if values.get("ggml.add_bos_token") and "bos_token" in names:
        bos = names["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, values["ggml.bos_token_id"])],
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": length,
        **names,
    }
    if values.get("chat_template"):
        config["chat_template"] = values["chat_template"]
    write_json(folder / "tokenizer_config.json", config)


def check_tokenizer(values: Mapping[str, Any], file: str) -> None:
    """Refuse a tokenizer that `write_tokenizer` cannot write; called before any long work."""
    model, pre = values.get("ggml.model"), values.get("ggml.pre", "default")
    if model != "gpt2" or pre not in PRE_TOKENIZERS:
        raise CheckpointError(
            f"cannot convert the tokenizer of {file}",
            got=f"tokenizer.ggml.model {model!r}, tokenizer.ggml.pre {pre!r}",
            want=f"'gpt2' with one of {', '.join(PRE_TOKENIZERS)}",
            hint="start from the model's Hugging Face folder",
        )


def _pre_tokenizer(pre: str) -> Any:
    from tokenizers import Regex, pre_tokenizers

    if pre in _SPLITS:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_SPLITS[pre]), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    return byte_level
