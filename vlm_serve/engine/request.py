"""What a caller asked for, and what answers are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vlm_serve.engine.detokenizer import TokenBytes
from vlm_serve.engine.outputs import Delta
from vlm_serve.grammar.state import Grammar
from vlm_serve.preprocess.affinity import AffinityKey
from vlm_serve.preprocess.prompt import Prompt
from vlm_serve.sampling_params import SamplingParams


@dataclass(frozen=True, eq=False)
class Request:
    """What the caller submitted. `params` has the checkpoint's defaults filled in.

    A `cold` one shares nothing with others: it matches nothing and publishes nothing, and its media
    are encoded for it alone.
    """

    request_id: str
    prompt: Prompt
    params: SamplingParams
    on_delta: Callable[[Delta], None]
    priority: int = 0
    arrival: int = 0
    cold: bool = False
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences of which the last token is banned after the others."""
    grammar: Grammar | None = None
    prediction: tuple[int, ...] = ()
    """Tokens that the caller expects in the answer."""
    affinity: tuple[AffinityKey, ...] = ()
    """Affinity keys, longest prefix first: whoever routes is told what is held of them."""
    forced: tuple[tuple[int, ...], ...] = ()
    """Tokens that the answer begins with, by choice: another engine has given them already."""
    complete_experts: bool = False
    """Reuses only what has its routed experts, so that no report depends on what is cached."""


@dataclass(frozen=True)
class Language:
    """What an engine's answers are made of.

    Attributes:
        tokenizer: says what tokens stand for.
        stop_tokens: end an answer.
        vocabulary: width of the logits.
        max_length: tokens of the longest prompt with its answer.
    """

    tokenizer: TokenBytes
    stop_tokens: frozenset[int]
    vocabulary: int
    max_length: int


def find_bad_words(
    words: Sequence[str], encode: Callable[[str], list[int]]
) -> tuple[tuple[int, ...], ...]:
    """Each word as it is and after a space, where those are other tokens."""
    found: list[tuple[int, ...]] = []
    for word in words:
        plain = tuple(encode(word.lstrip()))
        spaced = tuple(encode(" " + word.lstrip()))
        if plain:
            found.append(plain)
        if plain and spaced[-len(plain) :] != plain:
            found.append(spaced)
    return tuple(found)
