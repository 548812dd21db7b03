"""What a request forbids or favours among the next tokens: biases, lists and grammars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from vlm_serve.errors import InvalidRequestError
from vlm_serve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from vlm_serve.grammar.state import GrammarState

_NEVER = float("-inf")


class Encoder(Protocol):
    """The part of a tokenizer that bad words need."""

    def encode_plain(self, text: str) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class LogitRules:
    """The lists of one request, shared by its choices.

    Attributes:
        bias: (ids, values to add).
        allowed: ids outside of which nothing is sampled; None: all.
        bad_words: token sequences of which the last token is banned after the others.
    """

    bias: tuple[list[int], list[float]] = ((), ())  # type: ignore[assignment]
    allowed: list[int] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, params: SamplingParams, encoder: Encoder, vocabulary: int) -> LogitRules | None:
        """The rules of a request, None if it has none.

        Args:
            vocabulary: width of the logits.

        Raises InvalidRequestError for ids that are outside.
        """
        bias = params.logit_bias or {}
        if not (bias or params.allowed_token_ids is not None or params.bad_words):
            return None
        _check_ids("logit_bias", list(bias), vocabulary)
        _check_ids("allowed_token_ids", params.allowed_token_ids or (), vocabulary)
        allowed = params.allowed_token_ids
        return cls(
            bias=(list(bias), [float(value) for value in bias.values()]),
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
    """

    def __init__(
        self, rules: LogitRules | None, grammar: GrammarState | None, ends: frozenset[int]
    ) -> None:
        self._rules = rules
        self._grammar = grammar
        self._ends = sorted(ends)

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

    def bias(self, logits: torch.Tensor) -> None:
        """Adds the biases to one row `[vocab]` in place."""
        if self._rules is not None and self._rules.bias[0]:
            ids, values = self._rules.bias
            logits[ids] += torch.tensor(values, dtype=logits.dtype, device=logits.device)

    def mask(self, logits: torch.Tensor, history: Sequence[int]) -> None:
        """Sets what may not come next to -inf, in place. `history`: what was generated so far."""
        if self._rules is not None:
            if self._rules.allowed is not None:
                _keep(logits, self._rules.allowed)
            banned = [w[-1] for w in self._rules.bad_words if _ends_with(history, w[:-1])]
            if banned:
                logits[banned] = _NEVER
        if self._grammar is None:
            return
        if self._grammar.waiting:
            logits[self._ends] = _NEVER
        self._grammar.mask(logits)

    def mask_at_least(self, logits: torch.Tensor) -> None:
        """What remains in force where all rules together leave nothing: the grammar, without one
        the allowed tokens."""
        if self._grammar is not None:
            self._grammar.mask(logits)
        elif self._rules is not None and self._rules.allowed is not None:
            _keep(logits, self._rules.allowed)


def _keep(logits: torch.Tensor, ids: list[int]) -> None:
    kept = logits[ids]
    logits.fill_(_NEVER)
    logits[ids] = kept


def _ends_with(history: Sequence[int], ending: tuple[int, ...]) -> bool:
    count = len(ending)
    return count <= len(history) and tuple(history[len(history) - count :]) == ending
