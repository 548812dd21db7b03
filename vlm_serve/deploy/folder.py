"""The folder that Ray keeps its sockets and logs in, and those of deployments that were killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "vlm-serve-ray-"


class Folder:
    """A new folder for temporary files; whoever makes another one leaves it alone as long as this
    process lives, however it ends.

    Attributes:
        path: of the folder.
    """

    def __init__(self) -> None:
        remove_left()
        self.path, self._lock = _made()

    def remove(self) -> None:
        """May be called more than once."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def remove_left() -> None:
    """Removes the folders of this user's processes that have ended without doing so."""
    for path in Path(tempfile.gettempdir()).glob(PREFIX + "*"):
        with contextlib.suppress(OSError):  # another user's, or somebody is faster
            lock = _opened(path)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_uid == os.getuid():
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def _made() -> tuple[str, int]:
    """A folder and the descriptor that locks it. Before it is locked it may be taken for one that
    was left."""
    while True:
        path = tempfile.mkdtemp(prefix=PREFIX)
        with contextlib.suppress(FileNotFoundError):
            lock = _opened(Path(path))
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.path.exists(path):
                return path, lock
            os.close(lock)


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
