"""Probes whether a feature pays: alternates steps with and without it and compares their cost."""

from __future__ import annotations

from collections import deque

PROBED_STEPS = 16
"""Number of steps that measure the cost of one way."""
_MIN_PERIOD, _MAX_PERIOD = 256, 8192
_OUTLIER = 4.0
"""Cap on a step's duration, as a multiple of the median: the machine was busy otherwise."""


class PayoffProbe:
    """Alternates a feature on and off, then keeps the cheaper way for a while. After that it tries
    the other way again, at longer and longer intervals as long as the result stays the same.

    Attributes:
        on: True if the next step uses the feature.
    """

    def __init__(self) -> None:
        self.on = True
        self._lately = deque[tuple[float, float]](maxlen=PROBED_STEPS)
        self._costs: dict[bool, float] = {}
        self._settled: bool | None = None
        self._left, self._period = PROBED_STEPS, _MIN_PERIOD

    def learn(self, seconds: float, tokens: float) -> None:
        """Record the duration of a step (in any unit) and the tokens that it made. The step was
        made as `on` said."""
        self._lately.append((seconds, tokens))
        self._left -= 1
        if self._left:
            return
        self._costs[self.on] = self._cost()
        self._lately.clear()
        if self._settled == self.on or len(self._costs) < 2:
            self.on, self._left = not self.on, PROBED_STEPS
        else:
            self._settle(self._costs[True] <= self._costs[False])

    def _settle(self, on: bool) -> None:
        again = self._settled == on
        self._period = min(2 * self._period, _MAX_PERIOD) if again else _MIN_PERIOD
        self.on = self._settled = on
        self._left = self._period

    def _cost(self) -> float:
        """Return the mean cost per token of the latest steps."""
        most = _OUTLIER * sorted(seconds for seconds, _ in self._lately)[len(self._lately) // 2]
        seconds = sum(min(each, most) for each, _ in self._lately)
        return seconds / sum(tokens for _, tokens in self._lately)
