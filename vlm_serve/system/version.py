"""Version of this package."""

from __future__ import annotations

__version__ = "0.2.0"
"""From it the package's metadata has the version, which `vlm_serve.__version__` is too."""
