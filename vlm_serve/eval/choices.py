"""Choices of the options of `vlm-serve eval`."""

from __future__ import annotations

PARTS = ("direct", "two-turn", "two-turn-omitting", "scoring")
"""Parts of LongBench v2."""
DEFAULT_PARTS = ("direct", "two-turn", "scoring")
DECODING = ("greedy", "seeded")
"""Decoding of answers."""
THROUGH = ("server", "pipeline")
"""Interfaces between lmms-eval and the model."""
