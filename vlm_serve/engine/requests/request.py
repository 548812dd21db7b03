"""Requests, and the language of answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from vlm_serve.engine.requests.detokenizer import TokenBytes
from vlm_serve.engine.requests.outputs import Delta, FinishReason
from vlm_serve.engine.requests.tenant import NOBODY, Tenant
from vlm_serve.engine.requests.thought import Thought
from vlm_serve.grammar.state import Grammar
from vlm_serve.models.adapters import Adapter
from vlm_serve.preprocess.identity.affinity import AffinityKey
from vlm_serve.preprocess.identity.prompt import Prompt
from vlm_serve.sampling_params import SamplingParams


class NextTurn(Protocol):
    """The prompt of a next turn, as far as it is known once an answer has ended.

    Attributes:
        kind: kind of the request; ends of answers are hit alike within a kind.
    """

    @property
    def kind(self) -> str: ...

    def shared(self, text: str, token_ids: Sequence[int], reason: FinishReason) -> int:
        """Return how many tokens of prompt and answer the next prompt begins with. Slow; called on
        a thread of its own.

        Args:
            text: the answer.
            token_ids: its tokens.
            reason: why it has ended.
        """
        ...


@dataclass(frozen=True, eq=False)
class Request:
    """A submitted request. `params` has the checkpoint's defaults filled in.

    A `cold` request shares nothing: it matches nothing, publishes nothing, and its media are
    encoded for it alone.
    """

    request_id: str
    prompt: Prompt
    params: SamplingParams
    on_delta: Callable[[Delta], None]
    priority: int = 0
    arrival: int = 0
    cold: bool = False
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences; the last token is banned after the others."""
    grammar: Grammar | None = None
    prediction: tuple[int, ...] = ()
    """Tokens that the caller expects in the answer."""
    affinity: tuple[AffinityKey, ...] = ()
    """Affinity keys, longest prefix first, for routers."""
    forced: tuple[tuple[int, ...], ...] = ()
    """Tokens that the answer begins with, by choice: another engine has generated them already."""
    thought: Thought | None = None
    """How the answer may think; None: thoughts are text like any other."""
    closing: tuple[int, ...] = ()
    """Tokens that end a thought whose budget is used up."""
    adapter: Adapter | None = None
    """The adapter of the weights; the one of its prompt's keys."""
    complete_experts: bool = False
    """If True, reuse only tokens with recorded experts, so that the report does not depend on the
    cache."""
    tenant: Tenant = NOBODY
    """Who it counts for."""
    next_turn: NextTurn | None = None
    """What a next turn shares with this one; None: prompt and answer, token by token."""
    progress: bool = False
    """Tell the progress of the prompt in deltas of their own."""
    on_step: Callable[[], None] | None = None
    """Called when all deltas of a step have been handed to their callbacks, once for each function
    of the step's requests; None: nobody waits for that."""


@dataclass(frozen=True)
class Language:
    """Tokenizer, stop tokens and limits of an engine's answers.

    Attributes:
        tokenizer: provides the bytes of tokens.
        stop_tokens: tokens that end an answer.
        vocabulary: width of the logits.
        max_length: maximum number of tokens of a prompt with its answer.
    """

    tokenizer: TokenBytes
    stop_tokens: frozenset[int]
    vocabulary: int
    max_length: int


def find_bad_words(
    words: Sequence[str], encode: Callable[[str], list[int]]
) -> tuple[tuple[int, ...], ...]:
    """Encode each word as it is and after a space, where those tokens differ."""
    encoded: list[tuple[int, ...]] = []
    for word in words:
        plain = tuple(encode(word.lstrip()))
        spaced = tuple(encode(" " + word.lstrip()))
        if plain:
            encoded.append(plain)
        if plain and spaced[-len(plain) :] != plain:
            encoded.append(spaced)
    return tuple(encoded)
