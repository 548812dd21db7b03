"""Limits the prompt tokens of a step by time, since other sequences wait for its end."""

from __future__ import annotations

import math

from vlm_serve.engine.plan import StepPlan

_DECAY = 0.8
"""Weight of all earlier steps after each further step (exponential decay)."""
_DEPTH_DECAY = 0.98
"""Decay for the cost of depth; slower, since one step says little about it."""
_MIN_SPREAD = 0.02
"""Minimum relative spread of depths for an estimate of the cost of depth."""
_MIN_DEPTH = 256.0
"""Lower bound of `doubling`: attention to this many tokens costs no more than the rest of a token's
work."""
_UNLIMITED = 1 << 30


class _Depths:
    """Cost of a token by its context length: least-squares fit of `a + b * context` to the time per
    token of each step, with exponential decay."""

    def __init__(self) -> None:
        self._steps = self._context = self._square = self._cost = self._both = 0.0
        self.doubling = math.inf
        """Context length at which attention costs as much as all other work; infinite while
        unknown."""

    def learn(self, context: float, cost: float) -> None:
        """Record a step with a mean cost of `cost` per token and a mean context of `context`
        tokens."""
        self._steps = _DEPTH_DECAY * self._steps + 1
        self._context = _DEPTH_DECAY * self._context + context
        self._square = _DEPTH_DECAY * self._square + context * context
        self._cost = _DEPTH_DECAY * self._cost + cost
        self._both = _DEPTH_DECAY * self._both + context * cost
        spread = self._steps * self._square - self._context**2
        if spread <= _MIN_SPREAD * self._steps * self._square:
            return
        flat = self._cost * self._square - self._both * self._context
        slope = self._both * self._steps - self._cost * self._context
        if slope <= 0:
            self.doubling = math.inf
        else:
            self.doubling = max(_MIN_DEPTH, flat / slope)


class Pace:
    """Estimates how many tokens fit into the target duration of a step, from recent steps. A token
    deep in a long prompt costs more than one at its start.

    Measured times may decide where prompts are cut: cuts change no bit of an answer.

    Args:
        seconds: target duration of a step; 0 means no limit.
        least: tokens that a step may always have: smaller steps waste time.
    """

    def __init__(self, seconds: float, least: int) -> None:
        self._target = seconds
        self._least = least
        self._depths = _Depths()
        self._work = 0.0
        self._seconds = 0.0
        self._queued = False

    def learn(self, plan: StepPlan, seconds: float, *, awaited: bool = True) -> None:
        """Record the duration of a step. Skip steps with few tokens or with media to encode: they
        say little about the cost of a token.

        Args:
            plan: the step.
            seconds: from its plan to its output.
            awaited: False if it was only queued. Then the next awaited step has waited for both,
                and neither says what it cost.
        """
        tokens, queued = plan.num_tokens, self._queued
        self._queued = not awaited
        if queued or not awaited:
            return
        if 2 * tokens < self._least or plan.encodes:
            return
        looked = sum((item.end - item.start) * (item.start + item.end) / 2 for item in plan.slices)
        self._depths.learn(looked / tokens, seconds / tokens)
        self._work = _DECAY * self._work + tokens + looked / self._depths.doubling
        self._seconds = _DECAY * self._seconds + seconds

    def most(self, start: int) -> int:
        """Return the token limit of the next step; unlimited while nothing is known.

        Args:
            start: position of the step's first token in its prompt.
        """
        if not self._target or not self._seconds:
            return _UNLIMITED
        # Solve n * (1 + (start + n / 2) / doubling) = work for n.
        work, doubling = self._target * self._work / self._seconds, self._depths.doubling
        at_start = 1 + start / doubling
        fit = 2 * work / (at_start + math.sqrt(at_start * at_start + 2 * work / doubling))
        return max(self._least, int(fit))
