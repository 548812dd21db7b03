"""Runs a command whose wall clock jumps when a file says so; its monotonic clock does not.

python -P tests/jumping_clock.py FILE serve demo ...: FILE holds the seconds to add, as text.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path


def install(file: Path) -> None:
    """Replace `time.time` and `time.time_ns`. What cannot be read adds nothing."""
    now, now_ns = time.time, time.time_ns

    def offset() -> float:
        try:
            return float(file.read_text())
        except (OSError, ValueError):
            return 0.0

    time.time = lambda: now() + offset()
    time.time_ns = lambda: now_ns() + int(offset() * 1e9)


if __name__ == "__main__":
    install(Path(sys.argv.pop(1)))
    from vlm_serve.cli import main

    sys.exit(main())
