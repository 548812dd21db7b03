"""Modules that the benchmark scripts share.

Importing this package first lets a script import from `examples/` and `tests/`, whatever folder it
is run from.
"""

from __future__ import annotations

import sys
from pathlib import Path

for _folder in ("tests", "examples"):
    _path = str(Path(__file__).resolve().parents[2] / _folder)
    if _path not in sys.path:
        sys.path.insert(0, _path)
