"""What the options of `vlm-serve eval` choose among."""

from __future__ import annotations

PARTS = ("direct", "two-turn", "two-turn-omitting", "scoring")
"""Of LongBench v2."""
DEFAULT_PARTS = ("direct", "two-turn", "scoring")
DECODING = ("greedy", "seeded")
"""How answers are sampled."""
THROUGH = ("server", "pipeline")
"""How lmms-eval asks the model."""
