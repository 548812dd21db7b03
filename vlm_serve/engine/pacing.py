"""How many prompt tokens a step may take while others wait for its end."""

from __future__ import annotations

import math

from vlm_serve.engine.plan import StepPlan

_KEPT = 0.8
"""Share of what was known that a further step leaves."""
_KEPT_OF_DEPTHS = 0.98
"""The same of what is known about depth, of which one step says little."""
_APART = 0.02
"""How far apart the depths of steps must be, as a share, to tell what depth costs."""
_MIN_DEPTH = 256.0
"""Attention to so many tokens costs no more than the rest of a token's work."""
_UNLIMITED = 1 << 30


class _Depths:
    """What a token costs beside how far it looks back: `a + b * context`, by least squares over
    the time of each step's tokens, old steps counting less and less."""

    def __init__(self) -> None:
        self._steps = self._context = self._square = self._cost = self._both = 0.0
        self.doubling = math.inf
        """Tokens of context that cost as much as all else; infinite as long as that is unknown."""

    def learn(self, context: float, cost: float) -> None:
        """A step took `cost` a token, which looked back at `context` of them on average."""
        self._steps = _KEPT_OF_DEPTHS * self._steps + 1
        self._context = _KEPT_OF_DEPTHS * self._context + context
        self._square = _KEPT_OF_DEPTHS * self._square + context * context
        self._cost = _KEPT_OF_DEPTHS * self._cost + cost
        self._both = _KEPT_OF_DEPTHS * self._both + context * cost
        spread = self._steps * self._square - self._context**2
        if spread <= _APART * self._steps * self._square:
            return
        flat = self._cost * self._square - self._both * self._context
        slope = self._both * self._steps - self._cost * self._context
        if slope <= 0:
            self.doubling = math.inf
        else:
            self.doubling = max(_MIN_DEPTH, flat / slope)


class Pace:
    """Tokens that fit into the time that a step is meant to take, from what steps took lately. A
    token deep in a long prompt costs more than one of its beginning.

    Where cuts lie changes no bit of an answer, so measured times may decide about them.

    Args:
        seconds: that a step is to take at most; 0: there is no limit.
        least: tokens that a step may always take: smaller ones cost more than they are worth.
    """

    def __init__(self, seconds: float, least: int) -> None:
        self._target = seconds
        self._least = least
        self._depths = _Depths()
        self._work = 0.0
        self._seconds = 0.0

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """Takes in what a step took. One with few tokens, or with media to encode, says little
        about what a token more would cost."""
        tokens = plan.num_tokens
        if 2 * tokens < self._least or plan.encodes:
            return
        looked = sum((item.end - item.start) * (item.start + item.end) / 2 for item in plan.slices)
        self._depths.learn(looked / tokens, seconds / tokens)
        self._work = _KEPT * self._work + tokens + looked / self._depths.doubling
        self._seconds = _KEPT * self._seconds + seconds

    def most(self, start: int) -> int:
        """Tokens of the next step; no limit before anything is known.

        Args:
            start: of the prompt that has them.
        """
        if not self._target or not self._seconds:
            return _UNLIMITED
        # n * (1 + (start + n / 2) / doubling) = work
        work, doubling = self._target * self._work / self._seconds, self._depths.doubling
        at_start = 1 + start / doubling
        fit = 2 * work / (at_start + math.sqrt(at_start * at_start + 2 * work / doubling))
        return max(self._least, int(fit))
