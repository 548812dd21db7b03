"""A line of the log every ten seconds in which a server had work."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

_log = logging.getLogger(__name__)

SECONDS = 10.0
_COUNTED = ("requests", "prompt_tokens", "hit_tokens", "generated_tokens", "steps")


class TrafficLog:
    """Logs what has been done since the last line.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._counts: dict[str, int] = {}

    def note(self, status: Mapping[str, Any]) -> None:
        """Log a line if there was work and the last line is long enough ago. Call it every few
        seconds, with work or without.

        Args:
            status: the latest one, see `cache_feed.cache_status`.
        """
        counts, now = {name: status[name] for name in _COUNTED}, self._clock()
        busy = bool(self._counts) and counts != self._counts
        seconds = now - self._since
        if busy and seconds < SECONDS:
            return
        if busy:
            _log.info("%s", line_of(status, Counter(counts) - Counter(self._counts), seconds))
        self._since, self._counts = now, counts


def line_of(status: Mapping[str, Any], done: Mapping[str, int], seconds: float) -> str:
    """Return the line about a number of seconds, given the status at their end and what was counted
    in them."""
    usage, prompt = status["usage"], done["prompt_tokens"]
    rate = f"{done['hit_tokens'] / prompt:.1%}" if prompt else "none"
    return (
        f"{seconds:.0f} s: {done['requests']} requests began with {prompt} prompt tokens, hit rate "
        f"{rate}; {done['generated_tokens']} tokens generated; {status['running']} running, "
        f"{status['waiting']} waiting; blocks {usage['blocks'] - usage['free_blocks']} of "
        f"{usage['blocks']}, state rows {usage['rows']['live']} live, "
        f"{usage['rows']['ready']} snapshots"
    )
