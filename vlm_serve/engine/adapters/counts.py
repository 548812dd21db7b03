"""What requests with adapters have used, by adapter."""

from __future__ import annotations

from collections import Counter

from vlm_serve.engine.outputs import Usage

MAX_NAMES = 100
"""Most names to count one by one; later ones are counted together, as OTHERS."""
OTHERS = "other adapters"


class AdapterCounts:
    """Sums over ended requests by names of adapters, which are bounded in number. Used by the
    engine's thread."""

    def __init__(self) -> None:
        self._by_name: dict[str, Counter[str]] = {}

    def add(self, name: str, usage: Usage) -> None:
        """Count an ended request."""
        if name not in self._by_name and len(self._by_name) >= MAX_NAMES:
            name = OTHERS
        accepted = usage.accepted_prediction_tokens
        used = {
            "requests": 1,
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "generated_tokens": usage.completion_tokens,
            "draft_tokens": accepted + usage.rejected_prediction_tokens,
            "accepted_tokens": accepted,
        }
        self._by_name.setdefault(name, Counter()).update(used)

    def as_dict(self) -> dict[str, dict[str, int]]:
        """Return the sums by name."""
        return {name: dict(each) for name, each in list(self._by_name.items())}
