"""Another user of this machine, for tests of what belongs to whom. Becoming one takes root."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")


def as_nobody(script: str, *arguments: Path | str) -> subprocess.CompletedProcess[str]:
    """Runs a shell script, which has the arguments as $1, $2 ...: nobody may be able to read the
    Python that runs this."""
    return subprocess.run(
        ["/bin/sh", "-c", script, "sh", *map(str, arguments)],
        user=NOBODY,
        group=NOBODY,
        extra_groups=(),
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )


@contextmanager
def umask(mask: int) -> Iterator[None]:
    """The process's umask; all of its threads have it."""
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@contextmanager
def open_folder() -> Iterator[Path]:
    """A folder that other users can reach and read: those of pytest are this user's alone."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def mode(path: Path) -> int:
    """The permissions of what lies at a path, or of the link there."""
    return path.lstat().st_mode & 0o7777
