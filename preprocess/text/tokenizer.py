"""Converts text to token ids and back with the `tokenizers` library alone.

transformers' tokenizers are not imported: they cost seconds of start-up. All they add is the
family's normaliser and split pattern, which are set up here too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import tokenizers

from vlm_serve.errors import CheckpointError, ContextLengthError, InvalidRequestError
from vlm_serve.preprocess.text.family import Family, answering_part, family_of
from vlm_serve.system.foreign_files import foreign

# Long texts are counted in pieces of this size before they are encoded as a whole.
_PIECE_CHARACTERS = 1 << 14
# Composing characters (NFC) shrinks a text to no less than a third of its bytes.
_NORMALISED = 3
# Counting in pieces splits words and adds a few tokens, so refuse only well beyond the limit.
_MARGIN = 1.25
# Characters of a token that are rare on average.
_LONG_TOKEN = 16
MAX_CACHED_WORDS = 1000


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file of the checkpoint; {} if there is no such file.

    Raises CheckpointError if the file is not a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        fault = foreign(path) or f"of the checkpoint cannot be read: {error}"
        raise CheckpointError(f"{path.name} {fault}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name} of the checkpoint is not a JSON object")
    return value


class Tokenizer:
    """The tokenizer of a checkpoint directory. Immutable after construction and thread-safe.

    Args:
        directory: holds tokenizer.json and, if there are any, tokenizer_config.json,
            special_tokens_map.json and generation_config.json.
        family: the model's; None: the one named by its config.json.
        max_tokens: the context length; `encode` and `check_length` refuse far longer texts without
            encoding all of them.
        generation: folder of another generation_config.json, which may name end tokens.
        model_config: what counts as the content of config.json; None: the file's.

    Attributes:
        family: as given or found.
        vocab_size: number of ids, added tokens included.
        special_tokens: content -> id of the special tokens; plain text never encodes to them.
        special_pattern: matches every special token, the longest first.
        eos_ids: ids that end a generation, see `_find_ends`.
        end_of_turn_ids: ids followed by a cut point.
        special_names: "eos_token" and the like -> content, as chat templates see them.
        backend: the library's tokenizer.

    Raises CheckpointError if the files are missing or unusable.
    """

    def __init__(
        self,
        directory: Path | str,
        family: Family | None = None,
        max_tokens: int | None = None,
        generation: Path | None = None,
        model_config: Mapping[str, Any] | None = None,
    ) -> None:
        directory = Path(directory)
        config = read_json(directory / "tokenizer_config.json")
        if model_config is None:
            model_config = answering_part(read_json(directory / "config.json"))
        self.family = family or family_of(str(model_config.get("model_type", "")))
        self._max_tokens = max_tokens
        self.backend = _load_backend(directory, config, self.family.split)
        self.vocab_size: int = self.backend.get_vocab_size(with_added_tokens=True)
        added = self.backend.get_added_tokens_decoder()
        special = {token_id: token for token_id, token in added.items() if token.special}
        for token in special.values():
            if token.single_word or token.lstrip or token.rstrip:
                raise CheckpointError(
                    f"special token {token.content!r} is not supported: it depends on adjacent text"
                )
        self.special_tokens: dict[str, int] = {t.content: i for i, t in special.items()}
        self._special_ids = frozenset(special)
        self._added_text = {token_id: token.content for token_id, token in added.items()}
        self._known_bytes: dict[int, bytes] = {}
        self.special_pattern = _special_pattern(self.special_tokens)
        self.special_names = special_names(config, read_json(directory / "special_tokens_map.json"))
        eos_token = self.special_names.get("eos_token", "")
        ids = map(self.token_to_id, (self.family.end_of_turn, eos_token))
        self.end_of_turn_ids = frozenset(token_id for token_id in ids if token_id is not None)
        named = read_json((generation or directory) / "generation_config.json")
        self.eos_ids = self._find_ends(eos_token, named, model_config)

    def _find_ends(
        self, eos_token: str, generation: Mapping[str, Any], config: Mapping[str, Any]
    ) -> frozenset[int]:
        """Return the ids that end an answer: the tokenizer's own, and those of every config.

        A checkpoint without generation_config.json may name in config.json only the end of a
        document. Its tokenizer then names the end of a turn.

        Args:
            eos_token: the tokenizer's; "" if it names none: then the family's `end_of_turn` ends
                too.
            generation, config: contents of generation_config.json and config.json.

        Raises CheckpointError for an unassigned id in the first file that names any.
        """
        eos_id = self.token_to_id(eos_token)
        if eos_id is None:
            eos_id = self.token_to_id(self.family.end_of_turn)
        end_ids = set() if eos_id is None else {eos_id}
        text_config = config.get("text_config")
        inner = text_config.get("eos_token_id") if isinstance(text_config, dict) else None
        given = [generation.get("eos_token_id"), config.get("eos_token_id"), inner]
        decisive = next((value for value in given if value is not None), None)
        for value in given:
            for token_id in value if isinstance(value, list) else [value]:
                if self._is_token(token_id):
                    end_ids.add(token_id)
                elif value is not None and value is decisive:
                    raise CheckpointError(
                        f"eos_token_id {token_id!r} is not a token of this checkpoint"
                    )
        return frozenset(end_ids)

    def _is_token(self, token_id: Any) -> TypeGuard[int]:
        whole = isinstance(token_id, int) and not isinstance(token_id, bool)
        return whole and 0 <= token_id < 1 << 32 and self.id_to_token(token_id) is not None

    def encode(self, text: str) -> list[int]:
        """Encode text in which special tokens keep their meaning; add no tokens.

        Raises ContextLengthError for a text far beyond the context.
        """
        self.check_specials(text)
        self.check_length(self.special_pattern.split(text))
        return self._encode(text)

    def encode_end(self, text: str, count: int) -> list[int]:
        """Encode a text of any length and return its last `count` tokens, or all.

        The time is that of encoding about as many tokens. More than the context are not returned.
        """
        count = count if self._max_tokens is None else min(count, self._max_tokens)
        at, _ = self.find_end(text, self.enough(count), self._encode)
        return self._encode(text[at:])[-count:]

    @staticmethod
    def enough(count: int) -> int:
        """Return how many tokens to count piece by piece to be sure of `count` tokens.

        Cuts between pieces, and inside a special token, add tokens to those counted.
        """
        return count + count // 16 + 256

    @staticmethod
    def find_end(text: str, count: int, encode: Callable[[str], list[int]]) -> tuple[int, int]:
        """Return where the last `count` tokens of a text begin, about, and how many follow."""
        at, tokens = len(text), 0
        while at and tokens < count:
            end, at = at, max(at - _PIECE_CHARACTERS, 0)
            tokens += len(encode(text[at:end]))
        return at, tokens

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = []
        at = 0
        for match in self.special_pattern.finditer(text):
            ids += self.encode_plain(text[at : match.start()])
            ids.append(self.special_tokens[match.group()])
            at = match.end()
        return ids + self.encode_plain(text[at:])

    def check_length(self, texts: Iterable[str], param: str = "messages") -> None:
        """Raise ContextLengthError if the texts have far more tokens than the context.

        Takes no longer than encoding about as many tokens as fit, or no time if the size alone
        decides.

        Args:
            param: the request's field that holds the texts.
        """
        limit = self._limit
        if limit is None:
            return
        texts = list(texts)
        characters = sum(map(len, texts))
        if characters <= limit:
            return
        if characters > limit * self.longest_token * _NORMALISED:
            raise self._too_long(limit, param)
        count = 0
        for text in texts:
            for at in range(0, len(text), _PIECE_CHARACTERS):
                count += len(self.encode_plain(text[at : at + _PIECE_CHARACTERS]))
                if count > limit:
                    raise self._too_long(limit, param)

    @property
    def tokens_before_check(self) -> int | None:
        """So many tokens and more may be refused by `check_length`; None: it refuses none."""
        limit = self._limit
        # It counts by pieces, which has some tokens more than a text as a whole.
        return None if limit is None else limit - limit // 16

    def is_probably_too_long(self, texts: Iterable[str]) -> bool:
        """Return True if texts can fit only with very long tokens, so that it pays to call
        `check_length` before anything else."""
        limit = self._limit
        return limit is not None and sum(map(len, texts)) > limit * _LONG_TOKEN

    @property
    def _limit(self) -> int | None:
        """Tokens far beyond the context; None for no limit."""
        return None if self._max_tokens is None else int(self._max_tokens * _MARGIN) + 256

    def _too_long(self, limit: int, param: str) -> ContextLengthError:
        length = f"more than {limit}"
        need = f"the text has {length}"
        return ContextLengthError.beyond(int(self._max_tokens or 0), length, need, param)

    def check_specials(self, text: str) -> None:
        """Raise ContextLengthError if the special tokens alone are far beyond the context."""
        limit = self._limit
        if limit is None or len(text) <= limit:
            return
        if len(text) > limit * self.longest_token * _NORMALISED or next(
            islice(self.special_pattern.finditer(text), limit, None), None
        ):
            raise self._too_long(limit, "messages")

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the longest token. One character of a byte-level token is one byte."""
        return max(
            max(map(len, self.backend.get_vocab(with_added_tokens=False)), default=1),
            max((len(text.encode()) for text in self._added_text.values()), default=1),
        )

    def encode_plain(self, text: str) -> list[int]:
        """Encode text in which special tokens are characters like any others."""
        if not text:
            return []
        ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decode ids into text; invalid UTF-8 becomes U+FFFD."""
        if skip_special_tokens:
            token_ids = [i for i in token_ids if i not in self._special_ids]
        text: str = self.backend.decode(list(token_ids), skip_special_tokens=False)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token; b"" for an unassigned id.

        The text of several byte-level tokens is the UTF-8 decoding of their joined bytes. So an
        incremental decoder decodes a stream exactly, and holds back one character at most.
        """
        token_bytes = self._known_bytes.get(token_id)
        if token_bytes is None:
            token_bytes = self._bytes_of(token_id)
            if token_bytes:
                self._known_bytes[token_id] = token_bytes
        return token_bytes

    def _bytes_of(self, token_id: int) -> bytes:
        added = self._added_text.get(token_id)
        if added is not None:
            return added.encode()
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        table = self._byte_of_character
        if any(character not in table for character in token):
            return str(self.backend.decode([token_id], skip_special_tokens=False)).encode()
        return bytes(table[character] for character in token)

    @cached_property
    def _byte_of_character(self) -> dict[str, int]:
        """Inverse of the byte-level alphabet.

        Printable bytes map to themselves, the others to the characters from U+0100 on, in order.
        """
        printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
        others = [byte for byte in range(256) if byte not in printable]
        return {chr(byte): byte for byte in printable} | {
            chr(0x100 + index): byte for index, byte in enumerate(others)
        }

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token, None if there is none."""
        token_id: int | None = self.backend.token_to_id(token)
        return token_id

    def id_to_token(self, token_id: int) -> str | None:
        """Return the token as the vocabulary spells it, None if the id is not in use."""
        token: str | None = self.backend.id_to_token(token_id)
        return token

    def is_special(self, token_id: int) -> bool:
        """Return True for a control token, which `decode` leaves out."""
        return token_id in self._special_ids


def checked_ids(token_ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """Return the ids of a prompt.

    Raises InvalidRequestError if there are none or one is out of the vocabulary.
    """
    try:
        array = np.asarray(token_ids)
    except (ValueError, OverflowError):
        array = np.empty(0, dtype=object)
    if array.ndim != 1 or len(array) == 0 or array.dtype.kind not in "iu":
        raise InvalidRequestError(
            "a prompt of token ids must be a non-empty list of whole numbers", param="prompt"
        )
    if array.min() < 0 or array.max() >= vocab_size:
        raise InvalidRequestError(f"token ids must be from 0 to {vocab_size - 1}", param="prompt")
    return tuple(array.tolist())


def _load_backend(
    directory: Path, config: dict[str, Any], split: str | None
) -> tokenizers.Tokenizer:
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError("the checkpoint has no tokenizer.json")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises no narrower type
        fault = foreign(path) or f"of the checkpoint is unusable: {error}"
        raise CheckpointError(f"tokenizer.json {fault}") from None
    if split is not None:
        _split_by(backend, split, add_prefix_space=bool(config.get("add_prefix_space")))
    # A cached word takes up to 8 KiB, so the default of 10 000 would hold 70 MiB of client data. A
    # smaller cache encodes as fast.
    if hasattr(backend.model, "_resize_cache"):
        backend.model._resize_cache(MAX_CACHED_WORDS)
    known = backend.get_added_tokens_decoder()
    entries = config.get("added_tokens_decoder") or {}
    missing = [entry for token_id, entry in sorted(entries.items()) if int(token_id) not in known]
    backend.add_tokens([tokenizers.AddedToken(**_added_token_fields(entry)) for entry in missing])
    backend.no_padding()
    backend.no_truncation()
    # Special tokens are split off before the backend sees a text: encode their spelling as text.
    backend.encode_special_tokens = True
    return backend


def _added_token_fields(entry: dict[str, Any]) -> dict[str, Any]:
    names = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    return {name: entry[name] for name in names if name in entry}


def _split_by(backend: tokenizers.Tokenizer, split: str, *, add_prefix_space: bool) -> None:
    backend.normalizer = tokenizers.normalizers.NFC()
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(split), behavior="isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=False),
        ]
    )
    backend.decoder = tokenizers.decoders.ByteLevel()


def _special_pattern(tokens: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def special_names(*configs: Mapping[str, Any]) -> dict[str, str]:
    """Return the contents of "eos_token" and the like, as chat templates see them.

    Args:
        configs: contents of tokenizer_config.json and special_tokens_map.json; the first with a
            given name wins. A token is text or an object with its `content`.
    """
    names: dict[str, str] = {}
    for name, value in ((name, value) for config in configs for name, value in config.items()):
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            names.setdefault(name, content)
    return names
