"""Estimates the tokens of requests from their keys, corrected by the usage of past requests."""

from __future__ import annotations

from vlm_serve.preprocess.affinity import AffinityKey, place_of

RATE = 1 / 8
"""Weight of a new request in the moving averages."""
MIN_FACTOR, MAX_FACTOR = 1 / 64, 8.0
MAX_ANSWER_TOKENS = 65_536


class SizeEstimator:
    """Estimates the tokens of requests and of their answers.

    The tokens per byte of an upload depend on the model, and a router does not decode uploads. So
    the guess from the key is multiplied by a learned factor. There is one factor per power of two
    of the guessed size per medium, to separate images from larger clips, and one for texts.

    Args:
        answer_tokens: initial estimate for answers.

    Attributes:
        answer: estimated tokens of an answer.
    """

    def __init__(self, answer_tokens: float) -> None:
        self.answer = answer_tokens
        self._factors: dict[int, float] = {}

    def guess(self, key: AffinityKey) -> float:
        """Estimate the tokens of a request from its longest key."""
        return place_of(key).tokens * self.factor(key)

    def factor(self, key: AffinityKey) -> float:
        """Return the correction factor for requests with this longest key."""
        return self._factors.get(_magnitude(key), 1.0)

    def learn(self, key: AffinityKey, prompt_tokens: float, answer_tokens: float) -> None:
        """Learn from the token counts of an ended request, given its longest key."""
        self.answer += RATE * (min(max(answer_tokens, 0.0), MAX_ANSWER_TOKENS) - self.answer)
        factor = self.factor(key)
        found = prompt_tokens / max(1, place_of(key).tokens)
        factor += RATE * (min(max(found, MIN_FACTOR), MAX_FACTOR) - factor)
        self._factors[_magnitude(key)] = factor


def _magnitude(key: AffinityKey) -> int:
    """Return the bit length of the guessed size per medium, 0 to 16; -1 without media."""
    place = place_of(key)
    return (place.media_units // place.media).bit_length() if place.media else -1
