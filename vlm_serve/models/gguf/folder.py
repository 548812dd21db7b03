"""A folder with the small files of a checkpoint, made from GGUF files and pointing to them.

Everything that reads a checkpoint's folder reads this one. Weights stay in the GGUF files, which
`gguf.json` names.
"""

from __future__ import annotations

import atexit
import json
import logging
import re
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any

from vlm_serve.errors import CheckpointError
from vlm_serve.models.gguf.files import ModelFiles, check_parts
from vlm_serve.models.gguf.reader import GgufFile, Metadata
from vlm_serve.models.gguf.tensors import TOWER, GgufTensors, TensorRecipe, TextNames, types_of
from vlm_serve.models.gguf.text_config import Tensors, architecture_of, text_config
from vlm_serve.models.gguf.vision import (
    inner_tower,
    joined_thirds,
    processors,
    vision_config,
    vision_tensors,
    with_sources,
)
from vlm_serve.system.private_files import TemporaryFolder

POINTER = "gguf.json"
_PREFIX = "vlm-serve-gguf-"
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_CLASSIFIER, _ANSWERS = "Qwen3ForSequenceClassification", ["yes", "no"]
"""Labels of a reranker are those of rows of its output projection."""
_log = logging.getLogger(__name__)
_known: dict[tuple[Any, ...], TemporaryFolder] = {}


_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_PATTERNS = ("qwen2", "qwen35", "deepseek-r1-qwen")
"""Names of word patterns. The family's own is used: files of older converters confuse the first
two, and libllama takes the last for the first."""
_LOOKS_ADDED = re.compile(r"<[^<>\s]+>")
_LOOKS_SPECIAL = re.compile(r"<[|｜].+[|｜]>")
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


def folder_of(files: ModelFiles) -> Path:
    """Return a folder for a model; it is removed when this process ends.

    Raises:
        CheckpointError: a file is damaged, incomplete or of an unsupported kind.
    """
    states = [(str(file.resolve()), file.stat().st_mtime_ns) for file in files.every]
    key = (len(files.parts), files.blind, *states)
    if key not in _known:
        contents = _Model(files).contents()
        folder = TemporaryFolder(_PREFIX)
        atexit.register(folder.remove)
        for name, content in contents.items():
            (Path(folder.path) / name).write_text(content, encoding="utf-8")
        _known[key] = folder
    return Path(_known[key].path)


def gguf_files(folder: Path) -> ModelFiles | None:
    """Return the files that a folder points to; None if it holds its weights itself.

    Raises:
        CheckpointError: the pointer cannot be read, or a file is gone.
    """
    try:
        content = json.loads((folder / POINTER).read_text(encoding="utf-8"))
        parts, tower = tuple(map(Path, content["parts"])), content["tower"]
        blind = bool(content.get("blind"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{POINTER} cannot be read") from error
    files = ModelFiles(parts, Path(tower) if tower else None, blind)
    for file in files.every:
        if not file.is_file():
            raise CheckpointError(f"{POINTER} names {file.name}, which is missing")
    return files


def open_tensors(files: ModelFiles) -> GgufTensors:
    """Return the tensors of a model by the names of a checkpoint.

    Raises:
        CheckpointError: as `folder_of`.
    """
    return _Model(files).tensors()


class _Model:
    def __init__(self, files: ModelFiles) -> None:
        self._files = files
        self._parts = [GgufFile(part) for part in files.parts]
        check_parts(self._parts)
        first = self._parts[0]
        self._metadata = Metadata(first.metadata, first.path.name)
        name, self._kind = architecture_of(self._metadata)
        every: Tensors = {}
        for part in self._parts:
            every |= part.tensors
        self._text = text_config(self._metadata, every)
        self._every, head = every, every.get("cls.output.weight")
        tokens = self._metadata.texts("tokenizer.ggml.tokens")
        key = f"{name}.classifier.output_labels"
        labels = self._metadata.texts(key) if key in self._metadata else _ANSWERS
        self._labels = [] if head is None else labels
        known = head is not None and head.shape[0] == 2 and labels == _ANSWERS
        self._answers = tuple(map(tokens.index, labels)) if known and {*labels} <= {*tokens} else ()
        self._vision: dict[str, Any] | None = None
        self._tower_files: list[GgufFile] = []
        if files.tower is not None:
            self._tower_files, file = [GgufFile(files.tower)], files.tower.name
            values = self._tower_files[0].metadata
            self._tower_tensors, sources = joined_thirds(self._tower_files[0].tensors)
        elif not files.blind and any(tensor.startswith(TOWER) for tensor in every):
            self._tower_files, file = self._parts, first.path.name
            values, self._tower_tensors, sources = inner_tower(first.metadata, every, name, file)
        if self._tower_files:
            self._tower_metadata, self._sources = Metadata(values, file), sources
            self._vision = self._vision_of(self._tower_metadata)

    def _vision_of(self, tower: Metadata) -> dict[str, Any]:
        name = self._metadata.name
        if not self._kind.sees:
            raise CheckpointError(f"{name} is a model of text, {tower.name} has no use")
        config = vision_config(tower, self._tower_tensors, self._kind.kind)
        if config["out_hidden_size"] != self._text["hidden_size"]:
            raise CheckpointError(
                f"{tower.name} is no vision tower of {name}: its embeddings have "
                f"{config['out_hidden_size']} numbers, the model's {self._text['hidden_size']}"
            )
        return config

    def _recipes(self) -> list[tuple[GgufFile, dict[str, TensorRecipe]]]:
        prefix = "model." if self._vision is None else "model.language_model."
        names = TextNames(self._kind, self._text, prefix, self._metadata.name)
        recipes = [(part, names.recipes(part.tensors)) for part in self._parts]
        for _, found in recipes:
            if self._answers and (head := found.pop("score.weight", None)):
                shape = self._text["vocab_size"], self._text["hidden_size"]
                found["lm_head.weight"] = TensorRecipe(head.source, shape, labels=self._answers)
        if self._vision is not None:
            tower = vision_tensors(
                self._tower_metadata, self._tower_tensors, self._vision, "model.visual."
            )
            named = {name: with_sources(recipe, self._sources) for name, recipe in tower.items()}
            for file in self._tower_files:
                here = ((name, own) for name, own in named.items() if own.source in file.tensors)
                recipes.append((file, dict(here)))
        return recipes

    def tensors(self) -> GgufTensors:
        """Return the tensors by the names of a checkpoint."""
        return GgufTensors(self._recipes())

    def contents(self) -> dict[str, str]:
        """Return the files of the folder by their names."""
        files = _tokenizer_files(self._metadata, self._text["vocab_size"])
        files["config.json"] = json.dumps(self._config())
        parts = [str(part.absolute()) for part in self._files.parts]
        tower = None if self._files.tower is None else str(self._files.tower.absolute())
        files[POINTER] = json.dumps({"parts": parts, "tower": tower, "blind": self._files.blind})
        if self._vision is not None:
            for name, content in processors(self._tower_metadata, self._vision).items():
                files[name] = json.dumps(content)
        return files

    def _config(self) -> dict[str, Any]:
        dtype, text = self._dtype(), self._text
        if self._vision is None:
            config = {"model_type": self._kind.text_kind, **text}
        else:
            kind = self._vision["model_type"].removesuffix("_vision")
            config = {
                "model_type": kind,
                "text_config": {"model_type": f"{kind}_text", **text},
                "vision_config": self._vision,
                "tie_word_embeddings": text["tie_word_embeddings"],
            }
        config["dtype"] = dtype
        if self._labels and not self._answers:
            config |= {"architectures": [_CLASSIFIER], "id2label": dict(enumerate(self._labels))}
        types: dict[str, list[str]] = defaultdict(list)
        for file, recipes in self._recipes():
            for name, kind in types_of(file, recipes).items():
                types[kind.name].append(name)
        if types:
            config["quantization_config"] = {"quant_method": "gguf", "types": types}
        return config

    def _dtype(self) -> str:
        """Return the dtype of most numbers in matrices; bfloat16 where most are in blocks."""
        sizes: dict[str, int] = defaultdict(int)
        for entry in self._every.values():
            if len(entry.shape) > 1:
                sizes[entry.type.name] += entry.nbytes
        most = max(sizes, key=lambda name: sizes[name])
        return _DTYPES.get(most, "bfloat16")


def _tokenizer_files(metadata: Metadata, vocab_size: int) -> dict[str, str]:
    """Return the contents of the files by their names.

    Args:
        vocab_size: rows of the table of embeddings.

    Raises:
        CheckpointError: the vocabulary is missing, damaged or of another kind.
    """
    tokenizer = metadata.section("tokenizer.ggml.")
    tokenizer.expect("model", "gpt2")
    tokenizer.expect("pre", *_PATTERNS)
    tokens = tokenizer.texts("tokens")
    if not tokens or len(tokens) > vocab_size:
        raise CheckpointError(
            f"{metadata.name} has {len(tokens)} tokens, but embeddings of {vocab_size}"
        )
    types = tokenizer.numbers("token_type") or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise CheckpointError(
            f"{metadata.name} has {len(tokens)} tokens, but types of {len(types)}"
        )
    pairs = metadata.texts("tokenizer.ggml.merges")
    types = _types_by_form(metadata, tokens, types, {pair.replace(" ", "") for pair in pairs})
    vocabulary = _vocabulary(metadata, tokens, types)
    files = {
        "tokenizer.json": _backend(vocabulary, _merges(metadata, vocabulary), tokens, types),
        "tokenizer_config.json": json.dumps(_names(metadata, tokens)),
        "generation_config.json": json.dumps(_generation(metadata, tokens, vocabulary)),
    }
    if "tokenizer.chat_template" in metadata:
        files["chat_template.jinja"] = metadata.text("tokenizer.chat_template")
    else:
        _log.warning(
            "%s holds no chat template: chats need one, named with --chat-template", metadata.name
        )
    return files


def _types_by_form(
    metadata: Metadata, tokens: list[str], types: list[int], merged: Collection[str]
) -> list[int]:
    """Return the types of tokens. A plain one like `<this>` that no merge makes was an added one:
    typed as plain, no text would ever have it."""
    kinds = list(types)
    for index, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind == _NORMAL and token not in merged and _LOOKS_ADDED.fullmatch(token):
            kinds[index] = _CONTROL if _LOOKS_SPECIAL.fullmatch(token) else _USER_DEFINED
    if kinds != types:
        _log.warning("special tokens of %s are typed as plain text there", metadata.name)
    return kinds


def _vocabulary(metadata: Metadata, tokens: list[str], types: list[int]) -> dict[str, int]:
    vocabulary: dict[str, int] = {}
    for index, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind == _UNUSED:
            continue
        if kind not in (_NORMAL, _CONTROL, _USER_DEFINED):
            raise CheckpointError(f"token {index} of {metadata.name} has the unknown type {kind}")
        if not token or len(token) > _MOST_TOKEN or token in vocabulary:
            problem = "stands there twice" if token in vocabulary else "is empty or too long"
            raise CheckpointError(f"token {index} of {metadata.name} {problem}")
        vocabulary[token] = index
    return vocabulary


def _merges(metadata: Metadata, vocabulary: dict[str, int]) -> list[list[str]]:
    pairs = [merge.split(" ") for merge in metadata.texts("tokenizer.ggml.merges")]
    for index, pair in enumerate(pairs):
        known = len(pair) == 2 and all(token in vocabulary for token in (*pair, "".join(pair)))
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
    """Return the names of special tokens. A template may write the first one, though by itself it
    is never added."""
    return {
        "add_prefix_space": False,
        "bos_token": _named(metadata, "bos", tokens),
        "eos_token": _named(metadata, "eos", tokens),
        "pad_token": _named(metadata, "padding", tokens),
    }


def _generation(
    metadata: Metadata, tokens: list[str], vocabulary: dict[str, int]
) -> dict[str, Any]:
    """Return the ends of answers and the defaults of sampling."""
    names = [_named(metadata, kind, tokens) for kind in ("eos", "eot", "eom")]
    ends = [vocabulary[name] for name in (*names, _END_OF_TEXT) if name in vocabulary]
    sampling = metadata.section("general.sampling.")
    fields: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(ends))} if ends else {}
    for key, field in _SAMPLING.items():
        if key in sampling:
            value = sampling.number(key)
            fields[field] = int(value) if field == "top_k" else value
    if any(field in fields for field in _SAMPLING.values()):
        fields["do_sample"] = True
    return fields
