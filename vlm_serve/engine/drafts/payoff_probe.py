"""Whether something pays: steps with it and without it are made in turns and compared."""

from __future__ import annotations

from collections import deque

TRIED = 16
"""Steps that say what one way costs."""
_SHORTEST, _LONGEST = 256, 8192
_OUTLIER = 4.0
"""Times as long as others: something else had the machine."""


class PayoffProbe:
    """Some steps are made with it, as many without it, and then those of a while as was cheaper;
    then the other way is tried again, ever more rarely as long as it stays the dearer one.

    Attributes:
        on: whether the next step is to be made with it.
    """

    def __init__(self) -> None:
        self.on = True
        self._lately = deque[tuple[float, float]](maxlen=TRIED)
        self._costs: dict[bool, float] = {}
        self._settled: bool | None = None
        self._left, self._while = TRIED, _SHORTEST

    def learn(self, seconds: float, tokens: float) -> None:
        """What a step took, in any unit, and tokens that it made; it was made as `on` said."""
        self._lately.append((seconds, tokens))
        self._left -= 1
        if self._left:
            return
        self._costs[self.on] = self._cost()
        self._lately.clear()
        if self._settled == self.on or len(self._costs) < 2:
            self.on, self._left = not self.on, TRIED
        else:
            self._settle(self._costs[True] <= self._costs[False])

    def _settle(self, on: bool) -> None:
        again = self._settled == on
        self._while = min(2 * self._while, _LONGEST) if again else _SHORTEST
        self.on = self._settled = on
        self._left = self._while

    def _cost(self) -> float:
        """Of a token."""
        most = _OUTLIER * sorted(seconds for seconds, _ in self._lately)[len(self._lately) // 2]
        seconds = sum(min(each, most) for each, _ in self._lately)
        return seconds / sum(tokens for _, tokens in self._lately)
