"""Put the checkout and the folders of its scripts first in the path. Import it before the rest."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = [ROOT / "tests" / "data" / f"qwen3.5-{name}.json" for name in ("4b", "27b", "35b-a3b")]

for _folder in ("benchmarks", "examples", "tests", ""):
    sys.path.insert(0, str(ROOT / _folder))
