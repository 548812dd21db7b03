"""Truncation in the middle of a text, since instructions are at both ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vlm_serve.preprocess.tokenizer import Tokenizer


def keep_ends(token_ids: Sequence[int], count: int) -> list[int]:
    """Return the first and the last `count / 2` tokens, or all if there are at most `count`."""
    if len(token_ids) <= count:
        return list(token_ids)
    first = count // 2
    return [*token_ids[:first], *token_ids[len(token_ids) - (count - first) :]]


def fit(text: str, tokenizer: Tokenizer, limit: int, length_of: Callable[[str], int]) -> str:
    """Return the text, cut in the middle until its prompt fits; it may become empty.

    Args:
        limit: tokens of the whole prompt.
        length_of: returns the tokens of the prompt with a given text. It is called only with texts
            of at most `limit` tokens.
    """
    ids = tokenizer.encode_plain(text)
    kept = min(limit, len(ids))
    while kept > 0:
        shorter = text if kept == len(ids) else tokenizer.decode(keep_ends(ids, kept))
        # A character or word that was cut may encode to more tokens than before.
        excess = max(len(tokenizer.encode_plain(shorter)), kept) - limit
        if excess <= 0:
            excess = length_of(shorter) - limit
        if excess <= 0:
            return shorter
        kept -= excess
    return ""
