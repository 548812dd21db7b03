"""Version of this package."""

from __future__ import annotations

from vlm_serve import __version__


def own_version() -> str:
    """Return the version of the code that runs, installed or not."""
    return __version__
