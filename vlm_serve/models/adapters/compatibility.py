"""Files and tensors beside an adapter's factors must be the model's own: a tokenizer, a chat
template, and the output projection, which PEFT saves too.

Tensors change nothing if they are the model's. Otherwise the adapter was made for another model, or
changes more than its factors say.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vlm_serve.errors import CheckpointError
from vlm_serve.models.adapters.changes import unprefixed
from vlm_serve.models.adapters.folder import WEIGHTS_FILE, AdapterFile, shown
from vlm_serve.models.files import SafetensorsFile, TensorFile, TensorsInMemory, open_files
from vlm_serve.preprocess.text.family import QWEN2, QWEN3_5, Family, family_of
from vlm_serve.preprocess.text.template import named_chat_template
from vlm_serve.preprocess.text.tokenizer import read_json

_log = logging.getLogger(__name__)


_TOKENIZER_FILE = "tokenizer.json"
_MATCHED_BY = ("single_word", "lstrip", "rstrip", "normalized")
"""Flags of an added token that decide where a text has it; `special` does not."""
_DEFAULTS = {"add_prefix_space": True, "use_regex": True, "invert": False}
"""Of the steps of a pre-tokenizer that have these fields."""
_Step = dict[str, Any]
_Flags = tuple[bool, ...]


_HEAD, _EMBEDDINGS = "lm_head", "embed_tokens"
_PLAIN = {"weight", "bias"}
"""Tensors of a module that is not quantised."""
_NUMBERS = 1 << 24
"""Compared at a time."""


def check_files(checkpoint: Path, folder: Path, *, template: str | None = None) -> None:
    r"""Compare the files beside an adapter with its model's.

    A pattern without `\p{M}`, which transformers writes for many models, is a line in the log.

    Args:
        checkpoint: of the model.
        folder: of the adapter.
        template: file of the chat template that options name in place of the checkpoint's.

    Raises:
        CheckpointError: the adapter has another tokenizer or another chat template.
    """
    if (folder / _TOKENIZER_FILE).is_file() and (checkpoint / _TOKENIZER_FILE).is_file():
        _check_tokens(checkpoint, folder)
    name, template_there = named_chat_template(folder)
    if not template_there:
        return
    if template:
        models = _text(Path(template))
    else:
        _, models = named_chat_template(checkpoint)
    if _plain(template_there) != _plain(models):
        raise CheckpointError(
            f"the adapter has a chat template in {name} other than the model's: name it with "
            "--chat-template for all requests, or remove it there to use the model's"
        )


def _check_tokens(checkpoint: Path, folder: Path) -> None:
    tokens, model, family = _read_tokens(folder), _read_tokens(checkpoint), _family_in(checkpoint)
    other = difference(tokens, model, family)
    if other:
        raise CheckpointError(
            f"the adapter has a {_TOKENIZER_FILE} with other tokens than the model's, which is not "
            f"supported: it has {other}; without that file it gets the model's"
        )
    if _lacks_marks(tokens, model, family):
        _log.warning(
            "the adapter in %s has a %s that splits words at combining marks, as the class "
            "Qwen2Tokenizer of transformers writes it, and the model's does not: such words may "
            "have other tokens than in training",
            folder.name,
            _TOKENIZER_FILE,
        )


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file.name} cannot be read") from error


def _plain(template: str) -> str:
    """Return a template without what an editor or a writer of JSON changes."""
    return template.replace("\r\n", "\n").strip()


@dataclass(frozen=True, slots=True)
class TokenRules:
    """What decides the ids that a tokenizer gives to a text.

    Trainers save a tokenizer again beside an adapter, and transformers writes the same one in other
    words. So its parts are compared by their meaning. Post-processor, truncation, padding and
    decoder are not: the server adds and cuts no tokens, and decodes with the model's files.

    Attributes:
        added: id and flags of the added tokens of tokenizer.json, by text.
        more: likewise, of tokens that other files add.
        vocabulary: ids of the other tokens.
        merges: pairs to join, in their order.
        fields: of the model, such as `ignore_merges`, without those that change nothing.
        normalizer, pre_tokenizer: their steps.
        padding: the text of the token that fills rows in training; None: not named.
    """

    added: Mapping[str, tuple[int, _Flags]]
    more: Mapping[str, tuple[int, _Flags]]
    vocabulary: Mapping[str, int]
    merges: list[tuple[str, ...]]
    fields: Mapping[str, Any]
    normalizer: list[_Step]
    pre_tokenizer: list[_Step]
    padding: str | None


def _read_tokens(folder: Path) -> TokenRules:
    """Read the tokenizer of a folder with a tokenizer.json.

    Raises:
        CheckpointError: a file cannot be read.
    """
    try:
        raw = json.loads((folder / _TOKENIZER_FILE).read_text(encoding="utf-8"))
        config = read_json(folder / "tokenizer_config.json")
        listed = read_json(folder / "added_tokens.json")
        model = {"type": "BPE", **raw["model"]}
        more = {str(text): _entry(int(index), {}) for text, index in listed.items()}
        for index, flags in (config.get("added_tokens_decoder") or {}).items():
            more[str(flags["content"])] = _entry(int(index), flags)
        return TokenRules(
            added={
                token["content"]: _entry(token["id"], token)
                for token in raw.get("added_tokens") or ()
            },
            more=more,
            vocabulary=_vocabulary(model.pop("vocab")),
            merges=[_pair(merge) for merge in model.pop("merges", None) or ()],
            fields=_with_effect(model),
            normalizer=list(_steps(raw.get("normalizer"))),
            pre_tokenizer=list(_steps(raw.get("pre_tokenizer"))),
            padding=_padding(config.get("pad_token")),
        )
    except (OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{_TOKENIZER_FILE} cannot be read") from error


def _entry(index: int, flags: Mapping[str, Any]) -> tuple[int, _Flags]:
    plain = {"normalized": not flags.get("special", False), **flags}
    return index, tuple(bool(plain.get(name)) for name in _MATCHED_BY)


def _padding(raw: Any) -> str | None:
    return raw.get("content") if isinstance(raw, Mapping) else raw


def _vocabulary(raw: Any) -> dict[str, int]:
    """Return the ids of tokens. Kinds other than BPE list them, with numbers of theirs."""
    if isinstance(raw, list):
        return {str(token): index for index, token in enumerate(raw)}
    return {str(text): int(index) for text, index in raw.items()}


def _pair(merge: Any) -> tuple[str, ...]:
    parts = merge.split(" ") if isinstance(merge, str) else merge
    return tuple(str(part) for part in parts)


def _with_effect(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's fields: null, "", 0 and false mean what no field means."""
    used = {name: value for name, value in model.items() if value}
    if "unk_token" not in used:
        used.pop("fuse_unk", None)
    return used


def _steps(raw: Any) -> Iterator[_Step]:
    """Yield the steps of a normalizer or a pre-tokenizer. A sequence may hold further ones."""
    if raw is None:
        return
    if raw["type"] == "Sequence":
        for nested in raw["normalizers"] if "normalizers" in raw else raw["pretokenizers"]:
            yield from _steps(nested)
        return
    defaults = {"ByteLevel": ("add_prefix_space", "use_regex"), "Split": ("invert",)}
    step = {name: _DEFAULTS[name] for name in defaults.get(raw["type"], ())}
    step |= {name: value for name, value in raw.items() if value is not None}
    step.pop("trim_offsets", None)  # decides where a token stood in the text
    yield step


def difference(tokens: TokenRules, model: TokenRules, family: Family) -> str | None:
    """Return what an adapter's tokenizer has that its model's has not, for a message; None if both
    give the same ids.

    Args:
        tokens: the adapter's.
        model: of the model.
        family: the model's. The server splits texts by its pattern, whatever the file has.
    """
    return (
        _other_added(tokens, model)
        or _other_vocabulary(tokens, model)
        or _other_merges(tokens.merges, model.merges)
        or _other_fields(tokens.fields, model.fields)
        or _other_steps(tokens, model, family)
    )


def _other_added(tokens: TokenRules, model: TokenRules) -> str | None:
    """Compare the added tokens. Those that only the model's tokenizer_config.json has may lack.

    Trainers add a token to fill rows with, and no prompt or answer has it.
    """
    known, wanted = {**model.more, **model.added}, {**tokens.more, **tokens.added}
    if tokens.padding not in known and tokens.padding not in model.vocabulary:
        wanted.pop(tokens.padding or "", None)
    for text, (index, flags) in wanted.items():
        if text not in known:
            return f"the added token {shown(text)} (id {index})"
        if known[text][0] != index:
            return f"the added token {shown(text)} with id {index}, not {known[text][0]}"
        if known[text][1] != flags:
            return f"the added token {shown(text)} with other {', '.join(_MATCHED_BY)}"
    lacking = next((text for text in model.added if text not in wanted), None)
    return None if lacking is None else f"no added token {shown(lacking)}"


def _other_vocabulary(tokens: TokenRules, model: TokenRules) -> str | None:
    """Compare the other tokens. A file may list the added ones there too."""
    added = {**model.more, **model.added}
    ours, theirs = (
        {text: i for text, i in tokenizer.vocabulary.items() if added.get(text, (None,))[0] != i}
        for tokenizer in (tokens, model)
    )
    if ours == theirs:
        return None
    text = next((token for token in {**ours, **theirs} if ours.get(token) != theirs.get(token)), "")
    return f"token {shown(text)} with id {ours.get(text)}, not {theirs.get(text)}"


def _other_merges(ours: list[tuple[str, ...]], theirs: list[tuple[str, ...]]) -> str | None:
    if ours == theirs:
        return None
    same = (one == other for one, other in zip(ours, theirs, strict=False))
    number = next((n for n, equal in enumerate(same) if not equal), min(len(ours), len(theirs)))
    return f"other merges, from number {number} on ({len(ours)} and {len(theirs)})"


def _other_fields(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    for name in {**ours, **theirs}:
        if ours.get(name) != theirs.get(name):
            return f"{shown(name)} {shown(ours.get(name))}, not {shown(theirs.get(name))}"
    return None


def _other_steps(tokens: TokenRules, model: TokenRules, family: Family) -> str | None:
    normal, split = [{"type": "NFC"}], _splits(family)
    if tokens.normalizer != model.normalizer and not (split and tokens.normalizer == normal):
        return "another normalizer"
    same = tokens.pre_tokenizer in (model.pre_tokenizer, split)
    return None if same or _lacks_marks(tokens, model, family) else "another pre-tokenizer"


def _lacks_marks(tokens: TokenRules, model: TokenRules, family: Family) -> bool:
    r"""Return True if texts are split as by Qwen2, where the model's pattern has `\p{M}` as well.

    The class Qwen2Tokenizer of transformers writes so for all models that name it.
    """
    marks = _splits(QWEN3_5)
    return tokens.pre_tokenizer == _splits(QWEN2) and marks in (
        model.pre_tokenizer,
        _splits(family),
    )


def _splits(family: Family) -> list[_Step]:
    """Return the steps by which a family's texts are split; [] if that is left to the file."""
    if family.split is None:
        return []
    level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    return [
        {"type": "Split", "pattern": {"Regex": family.split}, "behavior": "Isolated"}
        | {"invert": False},
        level,
    ]


def _family_in(checkpoint: Path) -> Family:
    """Return the family that a checkpoint's config.json names. Raises CheckpointError."""
    return family_of(str(read_json(checkpoint / "config.json").get("model_type", "")))


def check_base(
    checkpoint: Path,
    file: AdapterFile,
    *,
    tied: bool,
    tensors: Mapping[str, torch.Tensor] | None = None,
) -> frozenset[str]:
    """Compare tensors of an adapter's file that are no factors with the model's.

    Types may differ: equal as rounded to one of both types is equal.

    Args:
        checkpoint: of the model.
        file: the adapter.
        tied: whether the model's output projection is its table of embeddings.
        tensors: in the place of those in the checkpoint's files, by their names there.

    Returns:
        The model's tensors of which the adapter has copies, by their names in the files.

    Raises:
        CheckpointError: one is not the model's, or the model's is quantised.
    """
    copied = set[str]()
    if not file.base:
        return frozenset()
    stored = SafetensorsFile(file.path / WEIGHTS_FILE)
    known: dict[str, dict[str, tuple[TensorFile, str]]] = defaultdict(dict)
    for weights in (*open_files(checkpoint), TensorsInMemory(tensors or {})):
        for name in weights.names():
            module, _, kind = unprefixed(name).rpartition(".")
            known[module][kind] = weights, name
    for name in file.base:
        plain = unprefixed(name.removeprefix("base_model.model.")).replace(".base_layer.", ".")
        module, _, kind = plain.rpartition(".")
        if module == _HEAD and (tied or module not in known):
            module = _EMBEDDINGS
        if known.get(module, {}).keys() - _PLAIN:
            raise CheckpointError(
                f"{name} cannot be compared with the model's tensor, which is quantised: save the "
                "adapter without it (PEFT's save_embedding_layers=False)"
            )
        if module not in known or kind not in known[module]:
            raise CheckpointError(f"{name} is no tensor of LoRA, nor of the model: not supported")
        models, full = known[module][kind]
        if not _equal(stored.tensor(name), models.tensor(full)):
            raise CheckpointError(
                f"{name} differs from the model's tensor: an adapter that changes the model's own "
                "weights is not supported"
            )
        copied.add(models.source(full))
    return frozenset(copied)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or not one.is_floating_point():
        return False
    pieces = [torch.split(tensor.flatten(), _NUMBERS) for tensor in (one, other)]
    pairs = list(zip(*pieces, strict=True))
    return any(
        all(torch.equal(left.to(dtype), right.to(dtype)) for left, right in pairs)
        for dtype in (one.dtype, other.dtype)
    )
