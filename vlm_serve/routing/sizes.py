"""How large requests are: guessed from their keys, corrected by what they turn out to be."""

from __future__ import annotations

from vlm_serve.preprocess.affinity import AffinityKey, place_of

RATE = 1 / 8
"""By so much of what it is off a figure moves with every request."""
MIN_FACTOR, MAX_FACTOR = 1 / 64, 8.0
MAX_ANSWER_TOKENS = 65_536


class Sizes:
    """Tokens of requests and of their answers.

    How many tokens a byte of an upload is depends on the model, and nobody reads uploads here. So
    the guesses are corrected by a factor, one for each magnitude of what a medium is guessed to be:
    clips are guessed larger than pictures, so they have a factor of their own; one is for texts.

    Args:
        answer_tokens: what answers are taken to have at first.

    Attributes:
        answer: tokens of an answer.
    """

    def __init__(self, answer_tokens: float) -> None:
        self.answer = answer_tokens
        self._factors: dict[int, float] = {}

    def guess(self, key: AffinityKey) -> float:
        """Tokens of a request whose longest key this is."""
        return place_of(key).tokens * self.factor(key)

    def factor(self, key: AffinityKey) -> float:
        """What guesses of a request with this key are to be multiplied with."""
        return self._factors.get(_magnitude(key), 1.0)

    def learn(self, key: AffinityKey, prompt_tokens: float, answer_tokens: float) -> None:
        """A request whose longest key this is had so many tokens, and its answer so many."""
        self.answer += RATE * (min(max(answer_tokens, 0.0), MAX_ANSWER_TOKENS) - self.answer)
        factor = self.factor(key)
        found = prompt_tokens / max(1, place_of(key).tokens)
        factor += RATE * (min(max(found, MIN_FACTOR), MAX_FACTOR) - factor)
        self._factors[_magnitude(key)] = factor


def _magnitude(key: AffinityKey) -> int:
    """Of its media as they are guessed, 0 to 16; -1: it has none."""
    place = place_of(key)
    return (place.media_units // place.media).bit_length() if place.media else -1
