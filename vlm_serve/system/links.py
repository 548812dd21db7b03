"""Check for the folders linked into this package.

`setup.py` runs this file by its path, so it imports nothing of the package.
"""

from __future__ import annotations

import os

LINKS = ("cache", "kernels", "preprocess")
"""Symbolic links in a checkout; folders in an installed package and in a source distribution."""


def find_problem(package: str) -> str | None:
    """Return the problem with the links in the package's folder and its remedy, or None.

    In an installed package the links are folders.

    Git without symbolic links (the default on Windows) and some unpackers write a small text file
    in place of each.
    """
    missing = [name for name in LINKS if not os.path.isdir(os.path.join(package, name))]
    if not missing:
        return None
    names = " ".join(f"vlm_serve/{name}" for name in missing)
    return (
        f"this copy of vlm-serve has lost its symbolic links {names}. In a Git checkout, run "
        f"`git config core.symlinks true`, delete these files and run `git checkout -- {names}` "
        "(on Windows, turn on Developer Mode first). Unpack an archive with a program that keeps "
        "symbolic links."
    )
