"""The version of this package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def own_version() -> str:
    """As it was installed; a source tree on the path alone has none."""
    try:
        return version("vlm-serve")
    except PackageNotFoundError:
        return "not installed"
