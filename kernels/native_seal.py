"""Digest at the end of a cached library's file, to detect damage. The loader ignores it.

Loading a truncated or changed library kills the process, by SIGBUS or SIGSEGV.
"""

from __future__ import annotations

import os
from pathlib import Path

from blake3 import blake3

_MARK = b"vlm-serve kernels 1"
_DIGEST_BYTES = 32


def seal(path: Path) -> None:
    """Append the digest to a file. Raises OSError."""
    with path.open("r+b") as file:
        digest = blake3(file.read()).digest()
        file.write(digest + _MARK)
        file.flush()
        os.fsync(file.fileno())  # A power cut must not leave the name without its content.


def is_sealed(descriptor: int) -> bool:
    """Return True if a file is unchanged since `seal`. Raises OSError."""
    with open(os.dup(descriptor), "rb") as file:
        file.seek(0)
        data = file.read()
    content, end = data[: -_DIGEST_BYTES - len(_MARK)], data[-_DIGEST_BYTES - len(_MARK) :]
    return bool(content) and end == blake3(content).digest() + _MARK
