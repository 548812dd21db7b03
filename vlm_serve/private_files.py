"""Files and folders that nobody but this user and root can have written, and nobody else can read.

What is executed (compiled kernels) or believed (entries of a cache) must not come from another
user. A place is trusted if it and every folder on the way to it, links resolved, belongs to this
user or to root and nobody else may write there. A sticky folder such as /tmp may be written by all:
in there only the owner of a file can put another in its place. Where the system shows root's files
as nobody's (`_shown_for_root`), what lies in the topmost folder is root's.
"""

from __future__ import annotations

import contextlib
import fcntl
import grp
import os
import pwd
import shutil
import stat
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_PRIVATE_FOLDER, _PRIVATE_FILE = 0o700, 0o600
_MOST_LINKS = 40
_LOCK_SECONDS = 0.5


class SharedPlaceError(OSError):
    """Another user could have put something there, or could change it; the message says where."""


def check_way(path: Path) -> None:
    """Raise SharedPlaceError if another user could put another file or folder in place of this one,
    or write into this folder; OSError if it cannot be looked at."""
    todo, place, links = list(reversed(path.absolute().parts)), Path("/"), 0
    while todo:
        part = todo.pop()
        if part == os.sep:
            place = Path("/")
        elif part == os.pardir:
            place = place.parent  # No link is on the way to `place`.
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
    """Return whether it belongs to the user as whom this process acts."""
    return status.st_uid == os.geteuid()


def _check_owner(path: Path, status: os.stat_result) -> None:
    if status.st_uid in (0, os.geteuid()):
        return
    # Only root has put anything there. Further down it could be any other user who is shown so.
    if path.parent == path.parent.parent and status.st_uid == _shown_for_root():
        return
    raise SharedPlaceError(f"{path} belongs to another user")


@cache
def _shown_for_root() -> int | None:
    """The user that files of root are shown to belong to, as of everybody else who has no number in
    this process's user namespace (of a container that a user has started); None if root has one."""
    try:
        ranges = [
            [int(number) for number in line.split()]
            for line in Path("/proc/self/uid_map").read_text().splitlines()
        ]
        if any(outside == 0 for _, outside, _ in ranges):
            return None
        return int(Path("/proc/sys/kernel/overflowuid").read_text()) if ranges else None
    except (OSError, ValueError):  # A system without namespaces.
        return None


def _check_folder(path: Path, status: os.stat_result) -> None:
    _check_owner(path, status)
    shared = status.st_mode & OTHERS_WRITE and not status.st_mode & stat.S_ISVTX
    if shared and not _group_of_one(status):
        raise SharedPlaceError(f"others may write in {path}")


def _group_of_one(status: os.stat_result) -> bool:
    """Return whether only the group may write, and it is a user's own one: several distributions
    give everybody a group of the same name, and a umask that lets it write."""
    if status.st_mode & stat.S_IWOTH or os.geteuid() == 0:
        return False
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(status.st_gid)
    except KeyError:
        return False
    own = user.pw_gid == group.gr_gid and user.pw_name == group.gr_name
    return own and set(group.gr_mem) <= {user.pw_name}


def make_private(folder: Path) -> None:
    """Make a folder that nobody else can enter, whatever the umask, and so what is missing on the
    way. One that exists stays as it is. Raises OSError."""
    if folder.is_dir():
        return
    make_private(folder.parent)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(_PRIVATE_FOLDER)
        folder.chmod(_PRIVATE_FOLDER)
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is not a folder")


def cache_path() -> Path | None:
    """Return where this package keeps what it can make again; None if there is no home folder.

    A relative path would lead into whichever folder is the current one: as its specification says,
    such an XDG_CACHE_HOME is as good as none.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        with contextlib.suppress(RuntimeError):
            base = Path.home() / ".cache"
    return base / "vlm-serve" if base.is_absolute() else None


def secure_cache(folder: Path) -> None:
    """Make what exists of a folder of the cache private, as an older version has not.

    If others could write in one of ours, what is in there may be theirs: it is emptied.

    Args:
        folder: in what `cache_path` returns, or that itself, which is never emptied.

    Raises:
        SharedPlaceError: another user could change what is there.
        OSError: it cannot be looked at.
    """
    root = cache_path()
    assert root is not None
    check_way(_nearest(root.parent))
    if not os.path.lexists(root):
        return
    shared = False
    with alone(root):
        for each in reversed((folder, *folder.parents)):
            if root in (each, *each.parents) and os.path.lexists(each):
                shared = _close(each) or shared
                check_way(each)
                if shared and each == folder != root:
                    _empty(folder)


def check_usable(folder: Path, *, for_code: bool = True) -> None:
    """Raise OSError if this process cannot make files in a folder, or could not load them as code.
    If the folder is missing, that goes for the one that it would be made in."""
    there = _nearest(folder)
    effective = os.access in os.supports_effective_ids
    if not os.access(there, os.W_OK | os.X_OK, effective_ids=effective):
        raise PermissionError(f"{there} cannot be written")
    if for_code and not runs(there):
        raise PermissionError(f"{there}: nothing is run from this file system (noexec)")


def runs(folder: Path) -> bool:
    """Return whether the system runs what lies on the folder's file system. Raises OSError."""
    return not os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0)


def _nearest(path: Path) -> Path:
    """Return the path, or the first folder on the way up that is there."""
    return next(each for each in (path, *path.parents) if os.path.lexists(each))


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Inside the block no other process of ours is in such a block, where folders can be locked.

    Whoever can read the folder can lock it as well, and keep it so: nobody waits for long.
    """
    descriptor = -1
    with contextlib.suppress(OSError):  # It can perhaps be entered, but not read.
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    if descriptor < 0:
        yield
        return
    try:
        deadline = time.monotonic() + _LOCK_SECONDS
        while not _locked(descriptor) and time.monotonic() < deadline:
            time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # A file system without locks.
        pass
    return True


def _close(folder: Path) -> bool:
    """Keep others out of a folder if it is ours; returns whether they could write in it. What a
    link leads to is not known to be a folder of the cache: it stays as it is."""
    if folder.is_symlink():
        return False
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        status = os.fstat(descriptor)
        if not is_own(status) or not stat.S_IMODE(status.st_mode) & ~_PRIVATE_FOLDER:
            return False
        with contextlib.suppress(OSError):  # A file system that cannot be written.
            os.fchmod(descriptor, _PRIVATE_FOLDER)
        return bool(status.st_mode & OTHERS_WRITE)
    finally:
        os.close(descriptor)


def _empty(folder: Path) -> None:
    if folder.is_symlink():
        raise SharedPlaceError(f"others could have made the link {folder}")
    for each in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # Somebody is faster, where nothing is locked.
            if each.is_dir() and not each.is_symlink():
                shutil.rmtree(each)
            else:
                each.unlink()


def open_private(path: Path) -> int:
    """Open a file for reading that nobody but this user and root can have written.

    Returns the descriptor, which is what was checked. The way there is not: see `check_way`.

    Raises:
        SharedPlaceError: another user owns the file or may write it, or it is no regular file.
        OSError: it cannot be opened.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise SharedPlaceError(f"{path} is not a file")
        _check_owner(path, status)
        if status.st_mode & OTHERS_WRITE:
            raise SharedPlaceError(f"others may write {path}")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
