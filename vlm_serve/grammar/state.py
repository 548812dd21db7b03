"""Follows one choice through its compiled grammar."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

THINK_END = b"</think>"


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled grammar as a request uses it.

    Attributes:
        compiled: xgrammar's CompiledGrammar; immutable, shared between requests.
        after: the grammar begins behind these bytes of the answer; b"": at its start.
        matcher: makes a new matcher for `compiled`.
    """

    compiled: Any
    after: bytes
    matcher: Callable[[Any], Any]


class GrammarState:
    """State of one choice.

    Args:
        grammar: what to follow.
        token_bytes: the bytes a token stands for.
        vocabulary: width of the logits.
    """

    def __init__(
        self, grammar: Grammar, token_bytes: Callable[[int], bytes], vocabulary: int
    ) -> None:
        self._matcher = grammar.matcher(grammar.compiled)
        self._after = grammar.after
        self._token_bytes = token_bytes
        self._vocabulary = vocabulary
        self._tail = b""
        self._lost = False
        self.waiting = bool(grammar.after)
        self._bits = torch.zeros(1, (vocabulary + 31) // 32, dtype=torch.int32)

    @property
    def finished(self) -> bool:
        """Nothing more can come: the end of sequence has been accepted."""
        return self._lost or bool(self._matcher.is_terminated())

    def accept(self, token: int) -> None:
        """Follows a sampled token."""
        if self.finished:
            return
        if self.waiting:
            self._look_for_the_start(self._token_bytes(token))
        elif not self._matcher.accept_token(token):
            self._lost = True  # e.g. a model that computes NaN

    def _look_for_the_start(self, data: bytes) -> None:
        tail = self._tail + data
        found = tail.find(self._after)
        if found < 0:
            self._tail = tail[1 - len(self._after) :] if len(self._after) > 1 else b""
            return
        self.waiting, self._tail = False, b""
        rest = tail[found + len(self._after) :]
        # A token may hold more than the marker's end: white space there belongs to neither side.
        if rest and not self._matcher.accept_string(rest) and rest.strip():
            self._lost = True

    def mask(self, logits: torch.Tensor) -> None:
        """Sets tokens that the grammar does not allow next to -inf, in place; `[vocab]`."""
        if self.waiting or self.finished:
            return
        if not self._matcher.fill_next_token_bitmask(self._bits):
            return
        bits = self._bits[0].to(logits.device)
        shifts = torch.arange(32, device=logits.device, dtype=torch.int32)
        allowed = ((bits[:, None] >> shifts) & 1).flatten()[: self._vocabulary].bool()
        logits[: self._vocabulary].masked_fill_(~allowed, float("-inf"))
