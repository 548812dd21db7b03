"""Files and folders that nobody but this user and root can have written, and nobody else can read.

What is executed (compiled kernels) or believed (entries of a cache) must not come from another
user. A place is trusted if it and every folder on the way to it, links resolved, belongs to this
user or to root and nobody else may write there. A sticky folder such as /tmp may be written by all:
in there only the owner of a file can put another in its place.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import shutil
import stat
from pathlib import Path

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_PRIVATE_FOLDER, _PRIVATE_FILE = 0o700, 0o600
_MOST_LINKS = 40


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
    if status.st_uid not in (0, os.geteuid()):
        raise SharedPlaceError(f"{path} belongs to another user")


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
    check_way(next(each for each in root.parents if each.exists()))
    shared = False
    for each in reversed((folder, *folder.parents)):
        if root in (each, *each.parents) and os.path.lexists(each):
            shared = _close(each) or shared
            check_way(each)
            if shared and each == folder != root:
                _empty(folder)


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
