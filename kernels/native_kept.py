"""Cache of the compiled library, in the user's cache directory.

A library is code: if another user owns it or could have written it, it is never loaded. A damaged
one is rebuilt (`native_build.is_sealed`).
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import os
import shutil
import time
from pathlib import Path

from vlm_serve.kernels import native_build
from vlm_serve.kernels.native_build import APART, BuildError, Recipe, apart, is_sealed
from vlm_serve.system.private_files import (
    TemporaryFolder,
    UnsafePathError,
    cache_path,
    check_path,
    check_usable,
    open_private,
    runs,
    secure_cache,
)

KEPT_FOR_S = 7 * 24 * 3600.0

_log = logging.getLogger(__name__)


def kept(how: Recipe) -> Path:
    """Return the path of the cached library, and build it if needed.

    Raises:
        BuildError, OSError: as from `opened`.
    """
    path, descriptor = opened(how)
    os.close(descriptor)
    return path


def opened(how: Recipe) -> tuple[Path, int]:
    """Open the cached library, and build it first if it is missing or damaged.

    A file is never used if another user owns it or could have written it. If the cache is such a
    place, or cannot be written, the library is built in a temporary folder for this process and its
    children.

    Returns its path, and a descriptor of the checked file.

    Raises:
        BuildError, OSError: as from `build`.
    """
    try:
        path = _place(how)
        handle = _open_kept(path)
    except OSError as error:
        return _opened_apart(how, error)
    if handle is None:
        if os.path.lexists(path):
            _log.warning("%s is damaged or another user's: it is rebuilt", path)
        try:
            native_build.build(how, path)
            handle = _open_kept(path)
        except OSError as error:
            return _opened_apart(how, error)
    return path, _there(path, handle)


def is_kept(how: Recipe) -> bool:
    """Return True if `opened` would find the library instead of building it.

    Raises:
        OSError: it would be built in a temporary folder, for the reason in the message.
    """
    handle = _open_kept(_place(how))
    if handle is not None:
        os.close(handle)
    return handle is not None


def _place(how: Recipe) -> Path:
    if apart() is None and cache_path() is None:
        raise FileNotFoundError("there is no home directory to keep them in")
    return how.path()


def _open_kept(path: Path) -> int | None:
    """Return a descriptor of the library, or None if it is missing, damaged or another user's.

    Raises:
        UnsafePathError: another user could change what is in its folder.
        OSError: it cannot be looked at, or there is none and nothing can be kept there.
    """
    if apart() is None:
        secure_cache(path.parent)
    else:
        check_path(path.parent)
    descriptor = _whole(path)
    if descriptor is not None and not runs(path.parent):
        os.close(descriptor)
        descriptor = None
    if descriptor is None:
        check_usable(path.parent)
    return descriptor


def _whole(path: Path) -> int | None:
    try:
        descriptor = open_private(path)
    except (FileNotFoundError, UnsafePathError):
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:  # It is a symbolic link.
            return None
        raise
    if is_sealed(descriptor):
        return descriptor
    os.close(descriptor)
    return None


def _there(path: Path, descriptor: int | None) -> int:
    if descriptor is None:
        raise BuildError(f"{path} is damaged as soon as it is built")
    return descriptor


def _opened_apart(how: Recipe, reason: OSError) -> tuple[Path, int]:
    """Build the library in a temporary folder and open it."""
    _log.warning("compiled kernels are built at every start, in a temporary folder: %s", reason)
    try:
        folder = TemporaryFolder("vlm-serve-kernels-", for_code=True)
    except OSError as error:
        raise BuildError(f"{reason}; {error}") from error
    atexit.register(folder.remove)
    os.environ[APART] = folder.path
    try:
        path = how.path()
        native_build.build(how, path)
        return path, _there(path, _open_kept(path))
    except BaseException:
        os.environ[APART] = ""
        folder.remove()
        raise


def keep_only(current: Path) -> None:
    """Mark a library as in use, and delete stale ones from its folder.

    Libraries used within `KEPT_FOR_S` stay, since a process of another version may be
    about to load them. (Deleting a loaded library is harmless.)
    """
    # A read-only cache is used as it is.
    with contextlib.suppress(OSError):
        os.utime(current)
        for other in current.parent.iterdir():
            if other == current or time.time() - other.stat().st_mtime < KEPT_FOR_S:
                continue
            if other.is_dir():
                shutil.rmtree(other, ignore_errors=True)
            else:
                other.unlink(missing_ok=True)
