"""What a request forbids among the next tokens: lists, grammars, an early end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from vlm_serve.errors import InvalidRequestError
from vlm_serve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from vlm_serve.grammar.state import GrammarState

Bits = npt.NDArray[np.uint8]
"""Packed: bit `i % 8` of byte `i // 8` stands for token i."""


class Encoder(Protocol):
    """The part of a tokenizer that bad words need."""

    def encode_plain(self, text: str) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class LogitRules:
    """The lists of one request, shared by its choices.

    Attributes:
        allowed: ids outside of which nothing is sampled; None: all.
        bad_words: token sequences of which the last token is banned after the others.
    """

    allowed: list[int] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, params: SamplingParams, encoder: Encoder, vocabulary: int) -> LogitRules | None:
        """The rules of a request, None if it has none.

        Args:
            vocabulary: width of the logits.

        Raises InvalidRequestError for ids that are outside.
        """
        allowed = params.allowed_token_ids
        _check_ids("logit_bias", list(params.logit_bias or ()), vocabulary)
        _check_ids("allowed_token_ids", allowed or (), vocabulary)
        if allowed is None and not params.bad_words:
            return None
        return cls(
            allowed=None if allowed is None else sorted(set(allowed)),
            bad_words=_bad_words(params.bad_words, encoder),
        )


def _check_ids(name: str, ids: Sequence[int], vocabulary: int) -> None:
    for token in ids:
        if token >= vocabulary:
            raise InvalidRequestError(
                f"{name}: {token} is outside the vocabulary of {vocabulary}", param=name
            )


def _bad_words(words: Sequence[str], encoder: Encoder) -> tuple[tuple[int, ...], ...]:
    """Each word as it is and after a space, where those are other tokens."""
    found: list[tuple[int, ...]] = []
    for word in words:
        plain = tuple(encoder.encode_plain(word.lstrip()))
        spaced = tuple(encoder.encode_plain(" " + word.lstrip()))
        if plain:
            found.append(plain)
        if plain and spaced[-len(plain) :] != plain:
            found.append(spaced)
    return tuple(found)


class Constraint:
    """The rules and the grammar of one choice. Only the engine's thread uses it.

    Args:
        rules: the request's lists.
        grammar: the state of this choice's grammar.
        ends: tokens that end the answer; they are banned while the grammar has yet to begin.
        min_tokens: they are banned until so many tokens have come, too.
        vocabulary: width of the logits.
    """

    def __init__(
        self,
        rules: LogitRules | None,
        grammar: GrammarState | None,
        ends: frozenset[int],
        min_tokens: int,
        vocabulary: int,
    ) -> None:
        self._grammar = grammar
        self._ends = sorted(ends)
        self._min_tokens = min_tokens
        self._bad_words = rules.bad_words if rules is not None else ()
        self._everything = _pack(range(vocabulary), vocabulary)
        self._allowed: Bits | None = None
        if rules is not None and rules.allowed is not None:
            self._allowed = _pack(rules.allowed, vocabulary)

    @property
    def finished(self) -> bool:
        """The grammar allows nothing more."""
        return self._grammar is not None and self._grammar.finished

    @property
    def too_slow(self) -> bool:
        """The grammar takes too long to follow: what comes now need not fit it."""
        return self._grammar is not None and self._grammar.too_slow

    def accept(self, token: int) -> None:
        """Follows a token that has become part of the answer."""
        if self._grammar is not None:
            self._grammar.accept(token)

    def mask(self, token_ids: Sequence[int], num_generated: int) -> tuple[bytes | None, bool]:
        """(`SampleTask.mask`, `SampleTask.unbiased`) of the next token: where all rules together
        leave nothing, the logits as they are under what remains in force, which is the grammar,
        without one the allowed tokens.

        Args:
            token_ids: all tokens so far.
            num_generated: how many of them, the last ones, are the answer's.
        """
        grammar = None
        banned = [
            word[-1]
            for word in self._bad_words
            if len(word) <= num_generated + 1 and _ends_with(token_ids, word[:-1])
        ]
        if self._grammar is not None:
            grammar = self._grammar.allowed()
        if num_generated < self._min_tokens or (self._grammar and self._grammar.waiting):
            banned += self._ends
        if not banned and self._allowed is None and grammar is None:
            return None, False
        bits = self._everything.copy()
        for part in (self._allowed, grammar):
            if part is not None:
                bits &= part[: len(bits)]
        for token in banned:
            bits[token >> 3] &= ~(1 << (token & 7)) & 0xFF
        if bits.any():
            return bits.tobytes(), False
        remaining = self._allowed if self._grammar is None else grammar
        return None if remaining is None else remaining.tobytes(), True


def _pack(ids: Sequence[int], vocabulary: int) -> Bits:
    flags = np.zeros(vocabulary, dtype=bool)
    flags[ids] = True
    return np.packbits(flags, bitorder="little")


def _ends_with(token_ids: Sequence[int], ending: tuple[int, ...]) -> bool:
    return tuple(token_ids[len(token_ids) - len(ending) :]) == ending
