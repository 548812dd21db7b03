"""Private temporary folders, and removal of those left by killed processes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from vlm_serve.system.private_files import check_path, check_usable

FALLBACKS = ("/tmp", "/var/tmp", "/dev/shm")
"""Fallbacks for the folder that TMPDIR names."""


class TemporaryFolder:
    """A new private folder, locked while this process lives so that no other removes it.

    Args:
        prefix: of its name.
        longest: most characters of its path; None: no limit.
        for_code: the folder will hold code to load, which not every file system allows.

    Attributes:
        path: of the folder.

    Raises:
        OSError: no folder for temporary files is safe from other users and usable.
    """

    def __init__(self, prefix: str, longest: int | None = None, *, for_code: bool = False) -> None:
        root = _root(None if longest is None else longest - len(prefix) - 10, for_code)
        for each in {root, tempfile.gettempdir()}:
            remove_leftovers(prefix, each)
        self.path, self._lock = _made(prefix, root)

    def remove(self) -> None:
        """Remove the folder with its content. Repeated calls are allowed."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def remove_leftovers(prefix: str, root: str | None = None) -> None:
    """Remove the folders left behind by this user's killed processes."""
    for path in Path(root or tempfile.gettempdir()).glob(prefix + "*"):
        with contextlib.suppress(OSError):  # Another user's, or another process is faster.
            lock = _opened(path)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_uid == os.geteuid():
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def _root(longest: int | None, for_code: bool) -> str:
    """Return the first writable and trusted parent folder with a short enough path."""
    problem: OSError | None = None
    for root in dict.fromkeys([tempfile.gettempdir(), *FALLBACKS]):
        if longest is not None and len(root) > longest:
            continue
        try:
            check_path(Path(root))
            check_usable(Path(root), for_code=for_code)
        except OSError as error:
            problem = problem or error
        else:
            return root
    raise problem or OSError("there is no folder for temporary files with a path that is short")


def _made(prefix: str, root: str) -> tuple[str, int]:
    """Make a folder and return its path and the descriptor of its lock.

    Until the lock is held, another process may remove the folder as a leftover; then try again.
    """
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
