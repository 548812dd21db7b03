"""Folders for temporary files that others cannot enter, and those of processes that were killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from vlm_serve.private_files import check_usable, check_way

FURTHER = ("/tmp", "/var/tmp", "/dev/shm")
"""Where else they may lie, if not where TMPDIR says."""


class TemporaryFolder:
    """A new folder; whoever makes another one leaves it alone as long as this process lives,
    however it ends.

    Args:
        prefix: of its name.
        longest: characters that its path may have; None: as many as it wants.
        for_code: whether what lies there is loaded as code, which not every file system allows.

    Attributes:
        path: of the folder.

    Raises OSError if there is no place for it that nobody else can change.
    """

    def __init__(self, prefix: str, longest: int | None = None, *, for_code: bool = False) -> None:
        root = _root(None if longest is None else longest - len(prefix) - 10, for_code)
        for each in {root, tempfile.gettempdir()}:
            remove_left(prefix, each)
        self.path, self._lock = _made(prefix, root)

    def remove(self) -> None:
        """Remove it with all that is in it. May be called more than once."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def remove_left(prefix: str, root: str | None = None) -> None:
    """Remove the folders of this user's processes that have ended without doing so."""
    for path in Path(root or tempfile.gettempdir()).glob(prefix + "*"):
        with contextlib.suppress(OSError):  # Another user's, or somebody is faster.
            lock = _opened(path)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_uid == os.geteuid():
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def _root(longest: int | None, for_code: bool) -> str:
    """Return the first folder that is short enough, can be written, and is trusted."""
    problem: OSError | None = None
    for root in dict.fromkeys([tempfile.gettempdir(), *FURTHER]):
        if longest is not None and len(root) > longest:
            continue
        try:
            check_way(Path(root))
            check_usable(Path(root), for_code=for_code)
        except OSError as error:
            problem = problem or error
        else:
            return root
    raise problem or OSError("there is no folder for temporary files with a path that is short")


def _made(prefix: str, root: str) -> tuple[str, int]:
    """A folder and the descriptor that locks it. Before it is locked it may be taken for one that
    was left."""
    while True:
        path = tempfile.mkdtemp(prefix=prefix, dir=root)
        with contextlib.suppress(FileNotFoundError):
            lock = _opened(Path(path))
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.path.exists(path):
                return path, lock
            os.close(lock)


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
