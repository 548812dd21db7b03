"""Prompts of raw token ids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vlm_serve.errors import InvalidRequestError


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
