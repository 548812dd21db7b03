"""Readers of further picture formats, from optional packages.

HEIC and HEIF need `pi-heif` (the extra `media`) or `pillow-heif`; JPEG XL needs
`pillow-jxl-plugin`.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import PIL.Image

_PLUGINS: tuple[tuple[str, str, str], ...] = (
    ("pi_heif", "pi-heif", "HEIF"),
    ("pillow_heif", "pillow-heif", "HEIF"),
    ("pillow_jxl", "pillow-jxl-plugin", "JXL"),
)
"""(module, package, format as Pillow names it); of two for a format the first one is taken."""
REMEDIES = {
    "a HEIC picture": "install vlm-serve[media] to read it",
    "a HEIF picture": "install vlm-serve[media] to read it",
    "a JPEG XL picture": "install pillow-jxl-plugin to read it",
}
"""What helps, by kind of file (`file_kind`)."""


@cache
def plugins() -> dict[str, str]:
    """Register the installed plugins with Pillow; return their versions by format."""
    found: dict[str, str] = {}
    for module, package, form in _PLUGINS:
        if form in found:
            continue
        try:
            number = version(package)
            loaded = import_module(module)
        except (PackageNotFoundError, ImportError, OSError):
            continue
        if form == "HEIF":
            loaded.register_heif_opener()
        if form in PIL.Image.OPEN:
            found[form] = f"{package} {number}"
    return found
