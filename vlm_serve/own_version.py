"""Version of this package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def own_version() -> str:
    """Return the installed version; a source tree only on the path has none."""
    try:
        return version("vlm-serve")
    except PackageNotFoundError:
        return "not installed"
