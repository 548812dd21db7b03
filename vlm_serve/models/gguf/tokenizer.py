"""The files of a tokenizer, and the chat template, from the metadata of a GGUF file."""

from __future__ import annotations

import json
from typing import Any

from vlm_serve.errors import CheckpointError
from vlm_serve.models.gguf.reader import Metadata

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_PATTERNS = ("qwen2", "qwen35")
"""Names of word patterns. The family's own is used: files of older converters confuse both."""
_PLAIN = frozenset(
    f"<|{name}|>"
    for name in ("fim_prefix", "fim_middle", "fim_suffix", "fim_pad", "repo_name", "file_sep")
)
"""Added tokens that are not special. The converter marks all that look like `<|this|>` as such."""
_END_OF_TEXT = "<|endoftext|>"
_SAMPLING = {
    "temp": "temperature",
    "top_p": "top_p",
    "min_p": "min_p",
    "top_k": "top_k",
    "penalty_repeat": "repetition_penalty",
}
_MOST_TOKEN = 1 << 16


def tokenizer_files(metadata: Metadata, vocab_size: int) -> dict[str, str]:
    """Return the contents of the files by their names.

    Args:
        vocab_size: rows of the table of embeddings.

    Raises:
        CheckpointError: the vocabulary is missing, damaged or of another kind.
    """
    own = metadata.own("tokenizer.ggml.")
    own.expect("model", "gpt2")
    own.expect("pre", *_PATTERNS)
    tokens = own.texts("tokens")
    if not tokens or len(tokens) > vocab_size:
        raise CheckpointError(
            f"{metadata.name} has {len(tokens)} tokens, but embeddings of {vocab_size}"
        )
    types = own.numbers("token_type") or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise CheckpointError(
            f"{metadata.name} has {len(tokens)} tokens, but types of {len(types)}"
        )
    vocabulary = _vocabulary(metadata, tokens, types)
    files = {
        "tokenizer.json": _backend(vocabulary, _merges(metadata, vocabulary), tokens, types),
        "tokenizer_config.json": json.dumps(_names(metadata, tokens)),
        "generation_config.json": json.dumps(_generation(metadata, tokens, vocabulary)),
    }
    if "tokenizer.chat_template" in metadata:
        files["chat_template.jinja"] = metadata.text("tokenizer.chat_template")
    return files


def _vocabulary(metadata: Metadata, tokens: list[str], types: list[int]) -> dict[str, int]:
    found: dict[str, int] = {}
    for index, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind == _UNUSED:
            continue
        if kind not in (_NORMAL, _CONTROL, _USER_DEFINED):
            raise CheckpointError(f"token {index} of {metadata.name} has the unknown type {kind}")
        if not token or len(token) > _MOST_TOKEN or token in found:
            problem = "stands there twice" if token in found else "is empty or too long"
            raise CheckpointError(f"token {index} of {metadata.name} {problem}")
        found[token] = index
    return found


def _merges(metadata: Metadata, vocabulary: dict[str, int]) -> list[list[str]]:
    pairs = [each.split(" ") for each in metadata.texts("tokenizer.ggml.merges")]
    for index, pair in enumerate(pairs):
        known = len(pair) == 2 and all(each in vocabulary for each in (*pair, "".join(pair)))
        if not known:
            raise CheckpointError(
                f"merge {index} of {metadata.name} does not join two tokens to a third"
            )
    return pairs


def _backend(
    vocabulary: dict[str, int], merges: list[list[str]], tokens: list[str], types: list[int]
) -> str:
    """Return tokenizer.json. The word pattern is left to the model's family."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {
            "id": index,
            "content": token,
            **flags,
            "special": kind == _CONTROL and token not in _PLAIN,
        }
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": level | {"use_regex": False},
        "post_processor": None,
        "decoder": level | {"use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": merges,
        },
    }
    return json.dumps(whole, ensure_ascii=False)


def _named(metadata: Metadata, kind: str, tokens: list[str]) -> str | None:
    key = f"tokenizer.ggml.{kind}_token_id"
    if key not in metadata:
        return None
    index = metadata.count(key)
    if index >= len(tokens):
        raise CheckpointError(f"{key} {index} in {metadata.name} is no token")
    return tokens[index]


def _names(metadata: Metadata, tokens: list[str]) -> dict[str, Any]:
    """Return the names of special tokens. A first token that is never added is no first token."""
    begins = metadata.flag("tokenizer.ggml.add_bos_token", default=False)
    return {
        "add_prefix_space": False,
        "bos_token": _named(metadata, "bos", tokens) if begins else None,
        "eos_token": _named(metadata, "eos", tokens),
        "pad_token": _named(metadata, "padding", tokens),
    }


def _generation(
    metadata: Metadata, tokens: list[str], vocabulary: dict[str, int]
) -> dict[str, Any]:
    """Return the ends of answers and the defaults of sampling."""
    names = [_named(metadata, kind, tokens) for kind in ("eos", "eot", "eom")]
    ends = [vocabulary[name] for name in (*names, _END_OF_TEXT) if name in vocabulary]
    own = metadata.own("general.sampling.")
    found: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(ends))} if ends else {}
    for key, field in _SAMPLING.items():
        if key in own:
            value = own.number(key)
            found[field] = int(value) if field == "top_k" else value
    if any(field in found for field in _SAMPLING.values()):
        found["do_sample"] = True
    return found
