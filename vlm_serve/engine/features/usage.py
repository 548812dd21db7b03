"""Token counts of ended requests by names, which are bounded in number."""

from __future__ import annotations

from collections import Counter

from vlm_serve.engine.requests.outputs import Usage

MAX_NAMES = 100
"""Names with counts of their own at most; those that come later are counted together."""


class UsageByName:
    """Sums over ended requests. Used by the engine's thread.

    Args:
        others: the name of all that come after MAX_NAMES.
    """

    def __init__(self, others: str) -> None:
        self._others = others
        self._by_name: dict[str, Counter[str]] = {}

    def bounded(self, name: str) -> str:
        """Return the name that a request is counted under."""
        known = name in self._by_name or len(self._by_name) < MAX_NAMES
        return name if known else self._others

    def add(self, name: str, usage: Usage) -> None:
        """Count an ended request."""
        accepted = usage.accepted_prediction_tokens
        used = {
            "requests": 1,
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "generated_tokens": usage.completion_tokens,
            "draft_tokens": accepted + usage.rejected_prediction_tokens,
            "accepted_tokens": accepted,
        }
        self._by_name.setdefault(self.bounded(name), Counter()).update(used)

    def as_dict(self) -> dict[str, dict[str, int]]:
        """Return the sums by name."""
        return {name: dict(counts) for name, counts in list(self._by_name.items())}
