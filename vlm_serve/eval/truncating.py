"""Texts that are too long lose their middle: the instructions are at both ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vlm_serve.preprocess.tokenizer import Tokenizer


def keep_ends(token_ids: Sequence[int], count: int) -> list[int]:
    """The first and the last half of `count` tokens, or all of them if there are no more."""
    if len(token_ids) <= count:
        return list(token_ids)
    first = count // 2
    return [*token_ids[:first], *token_ids[len(token_ids) - (count - first) :]]


def fit(text: str, tokenizer: Tokenizer, room: int, length_of: Callable[[str], int]) -> str:
    """The text, without its middle where it is too long.

    Args:
        room: tokens of the whole prompt.
        length_of: tokens of the prompt with a text in it. It is asked only about texts that have
            no more tokens than there is room.

    Returns the text with as many tokens as fit; it may be empty.
    """
    ids = tokenizer.encode_plain(text)
    kept = min(room, len(ids))
    while kept > 0:
        shorter = text if kept == len(ids) else tokenizer.decode(keep_ends(ids, kept))
        # Cut in two, a character or a word may be encoded as more tokens than it was.
        excess = max(len(tokenizer.encode_plain(shorter)), kept) - room
        if excess <= 0:
            excess = length_of(shorter) - room
        if excess <= 0:
            return shorter
        kept -= excess
    return ""
