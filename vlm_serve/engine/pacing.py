"""How many prompt tokens a step may take while others wait for its end."""

from __future__ import annotations

from vlm_serve.engine.plan import StepPlan

_KEPT = 0.8
"""Share of what was known that a further step leaves."""
_UNLIMITED = 1 << 30


class Pace:
    """Tokens that fit into the time that a step is meant to take, from what steps took lately.

    Where cuts lie changes no bit of an answer, so measured times may decide about them.

    Args:
        seconds: that a step is to take at most; 0: there is no limit.
        least: tokens that a step may always take: smaller ones cost more than they are worth.
    """

    def __init__(self, seconds: float, least: int) -> None:
        self._target = seconds
        self._least = least
        self._tokens = 0.0
        self._seconds = 0.0

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """Takes in what a step took. One with few tokens, or with media to encode, says little
        about what a token more would cost."""
        tokens = plan.num_tokens
        if 2 * tokens < self._least or plan.encodes:
            return
        self._tokens = _KEPT * self._tokens + tokens
        self._seconds = _KEPT * self._seconds + seconds

    @property
    def most(self) -> int:
        """Tokens of the next step; no limit before anything is known."""
        if not self._target or not self._seconds:
            return _UNLIMITED
        return max(self._least, int(self._target * self._tokens / self._seconds))
