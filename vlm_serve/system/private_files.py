"""Files and folders that only this user and root can write, and only this user can read.

Code to execute (compiled kernels) and data to trust (cache entries) must not come from another
user. A path is trusted if it and every folder above it, links resolved, belong to this user or to
root and no other user may write there. A sticky folder such as /tmp may be writable by all, since
only the owner of a file can replace it. Where the system shows root's files as the overflow user's
(`_overflow_user`), entries of the topmost folder count as root's.

Temporary folders are private too. Those left by killed processes are removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import grp
import os
import pwd
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_PRIVATE_FOLDER, _PRIVATE_FILE = 0o700, 0o600
_MOST_LINKS = 40
_LOCK_SECONDS = 0.5


class UnsafePathError(OSError):
    """Another user could have created or could change the file; the message names the path."""


def check_path(path: Path) -> None:
    """Raise UnsafePathError if another user could replace the path or write into this folder.

    Raises OSError if the path cannot be inspected.
    """
    todo, place, links = list(reversed(path.absolute().parts)), Path("/"), 0
    while todo:
        part = todo.pop()
        if part == os.sep:
            place = Path("/")
        elif part == os.pardir:
            place = place.parent  # `place` holds no links.
        else:
            following = place / part
            status = following.lstat()
            _check_owner(following, status)
            if stat.S_ISLNK(status.st_mode):
                links += 1
                if links > _MOST_LINKS:
                    raise OSError(f"{path}: too many links")
                todo += reversed(Path(os.readlink(following)).parts)
                continue
            place = following
        _check_folder(place, place.lstat())


def is_own(status: os.stat_result) -> bool:
    """Return True if the process's effective user owns the file."""
    return status.st_uid == os.geteuid()


def _check_owner(path: Path, status: os.stat_result) -> None:
    if status.st_uid in (0, os.geteuid()):
        return
    # Only root writes to the topmost folder. Further down it could be any unmapped user.
    if path.parent == path.parent.parent and status.st_uid == _overflow_user():
        return
    raise UnsafePathError(f"{path} belongs to another user")


@cache
def _overflow_user() -> int | None:
    """Return the user id that root's files show, if root is unmapped in this user namespace.

    In a rootless container, files of all unmapped users show the overflow user. None: root is
    mapped.
    """
    try:
        ranges = [
            [int(number) for number in line.split()]
            for line in Path("/proc/self/uid_map").read_text().splitlines()
        ]
        if any(outside == 0 for _, outside, _ in ranges):
            return None
        return int(Path("/proc/sys/kernel/overflowuid").read_text()) if ranges else None
    except (OSError, ValueError):  # No user namespaces on this system.
        return None


def _check_folder(path: Path, status: os.stat_result) -> None:
    _check_owner(path, status)
    shared = status.st_mode & OTHERS_WRITE and not status.st_mode & stat.S_ISVTX
    if shared and not _own_group_writes(status):
        raise UnsafePathError(f"others may write in {path}")


def _own_group_writes(status: os.stat_result) -> bool:
    """Return True if only the group may write, and this user is its only member.

    Several distributions give every user a group of the same name and a umask that lets it write.
    """
    if status.st_mode & stat.S_IWOTH or os.geteuid() == 0:
        return False
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(status.st_gid)
    except KeyError:
        return False
    is_private_group = user.pw_gid == group.gr_gid and user.pw_name == group.gr_name
    return is_private_group and set(group.gr_mem) <= {user.pw_name}


def make_private(folder: Path) -> None:
    """Make a folder of mode 0700, whatever the umask, and its missing parents likewise.

    An existing folder keeps its mode. Raises OSError.
    """
    if folder.is_dir():
        return
    make_private(folder.parent)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(_PRIVATE_FOLDER)
        folder.chmod(_PRIVATE_FOLDER)
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is not a folder")


def cache_path() -> Path | None:
    """Return the folder for rebuildable files; None if there is no home folder.

    A relative XDG_CACHE_HOME is ignored, as its specification demands: it would depend on the
    current folder.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        with contextlib.suppress(RuntimeError):
            base = Path.home() / ".cache"
    return base / "vlm-serve" if base.is_absolute() else None


def secure_cache(folder: Path) -> None:
    """Make the existing folders down to a cache folder private; older versions did not.

    If others could write into one of this user's folders, its content is not trusted, and `folder`
    is emptied.

    Args:
        folder: below `cache_path()`, or that folder itself, which is never emptied.

    Raises:
        UnsafePathError: another user could change the content.
        OSError: a folder cannot be inspected.
    """
    root = cache_path()
    assert root is not None
    check_path(_nearest(root.parent))
    if not os.path.lexists(root):
        return
    shared = False
    with folder_lock(root):
        for level in reversed((folder, *folder.parents)):
            if root in (level, *level.parents) and os.path.lexists(level):
                shared = _restrict(level) or shared
                check_path(level)
                if shared and level == folder != root:
                    _empty(folder)


def check_usable(folder: Path, *, for_code: bool = True) -> None:
    """Raise OSError if this process cannot create files in a folder, or not load them as code.

    If the folder is missing, its nearest existing parent is checked.
    """
    there = _nearest(folder)
    effective = os.access in os.supports_effective_ids
    if not os.access(there, os.W_OK | os.X_OK, effective_ids=effective):
        raise PermissionError(f"{there} cannot be written")
    if for_code and not runs(there):
        raise PermissionError(f"{there}: nothing is run from this file system (noexec)")


def runs(folder: Path) -> bool:
    """Return True if the folder's file system allows execution. Raises OSError."""
    return not os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0)


def _nearest(path: Path) -> Path:
    """Return the path or its nearest existing parent."""
    return next(level for level in (path, *path.parents) if os.path.lexists(level))


@contextlib.contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock on a folder, where the file system has locks.

    Every user who can read the folder can lock it forever, so the wait is bounded: after it the
    block runs without the lock.
    """
    descriptor = -1
    with contextlib.suppress(OSError):  # Folders may be accessible but not readable.
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    if descriptor < 0:
        yield
        return
    try:
        deadline = time.monotonic() + _LOCK_SECONDS
        while not _try_lock(descriptor) and time.monotonic() < deadline:
            time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # The file system has no locks.
        pass
    return True


def _restrict(folder: Path) -> bool:
    """Make this user's folder private; return True if others could write into it.

    The target of a link may be no cache folder, so it keeps its mode.
    """
    if folder.is_symlink():
        return False
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        status = os.fstat(descriptor)
        if not is_own(status) or not stat.S_IMODE(status.st_mode) & ~_PRIVATE_FOLDER:
            return False
        with contextlib.suppress(OSError):  # A read-only file system.
            os.fchmod(descriptor, _PRIVATE_FOLDER)
        return bool(status.st_mode & OTHERS_WRITE)
    finally:
        os.close(descriptor)


def _empty(folder: Path) -> None:
    if folder.is_symlink():
        raise UnsafePathError(f"others could have made the link {folder}")
    for entry in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # Another process was faster.
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()


def open_private(path: Path) -> int:
    """Open a file for reading that only this user and root can have written.

    The check applies to the returned descriptor. It does not cover the path: see `check_path`.

    Raises:
        UnsafePathError: another user owns or may write the file, or it is not a regular file.
        OSError: it cannot be opened.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UnsafePathError(f"{path} is not a file")
        _check_owner(path, status)
        if status.st_mode & OTHERS_WRITE:
            raise UnsafePathError(f"others may write {path}")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


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
        for parent in {root, tempfile.gettempdir()}:
            remove_leftovers(prefix, parent)
        self.path, self._lock = _make_locked(prefix, root)

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


def _make_locked(prefix: str, root: str) -> tuple[str, int]:
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
