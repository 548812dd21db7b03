"""Finds the library in the user's cache, where it is kept if nobody else can change it.

A library is code: what another user owns or could have written is never loaded, and what is damaged
is built anew (`native_seal`).
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
from vlm_serve.kernels.native_build import APART, BuildError, Recipe, apart
from vlm_serve.kernels.native_seal import is_sealed
from vlm_serve.private_files import SharedPlaceError, check_way, open_private, secure_cache
from vlm_serve.temporary_folder import TemporaryFolder

KEPT_FOR_S = 7 * 24 * 3600.0

_log = logging.getLogger(__name__)


def kept(how: Recipe) -> Path:
    """The library where it is kept, built if it has not been on this machine.

    Raises:
        BuildError, OSError: as from `opened`.
    """
    path, descriptor = opened(how)
    os.close(descriptor)
    return path


def opened(how: Recipe) -> tuple[Path, int]:
    """Open the library, built if it has not been on this machine or if what is kept is damaged.

    Nothing that another user owns or could have written is taken. Where such a place is all there
    is, the library is built in a temporary folder of this process and of those that it starts.

    Returns its path, and a descriptor of what was checked.

    Raises:
        BuildError, OSError: as from `Recipe.path` and `build`.
    """
    path = how.path()
    try:
        found = _found(path)
    except (SharedPlaceError, PermissionError) as error:
        return _opened_apart(how, error)
    if found is None:
        if os.path.lexists(path):
            _log.warning("%s is damaged or another user's: it is built anew", path)
        try:
            native_build.build(how, path)
        except OSError as error:
            if os.path.lexists(path):
                return _opened_apart(how, error)
            raise
        found = _found(path)
    return path, _there(path, found)


def is_kept(how: Recipe) -> bool:
    """Return whether `opened` would find the library instead of building it.

    Raises:
        BuildError: there is no home directory.
        OSError: it would be built in a temporary folder, for the reason that the message says.
    """
    found = _found(how.path())
    if found is not None:
        os.close(found)
    return found is not None


def _found(path: Path) -> int | None:
    """A descriptor of the library if there is one, and it is whole and nobody else's.

    Raises:
        SharedPlaceError: another user could change what is in its folder.
        OSError: it cannot be looked at.
    """
    if apart() is None:
        secure_cache(path.parent)
    else:
        check_way(path.parent)
    try:
        descriptor = open_private(path)
    except (FileNotFoundError, SharedPlaceError):
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:  # It is a link.
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
    """The library, built in a temporary folder."""
    _log.warning("compiled kernels are built at every start, in a temporary folder: %s", reason)
    try:
        folder = TemporaryFolder("vlm-serve-kernels-")
    except OSError as error:
        raise BuildError(f"{reason}; {error}") from error
    atexit.register(folder.remove)
    os.environ[APART] = folder.path
    path = how.path()
    native_build.build(how, path)
    return path, _there(path, _found(path))


def keep_only(current: Path) -> None:
    """Marks a library as in use, and removes what is left of others from its folder.

    What has been used within `KEPT_FOR_S` stays: a process of another version may be about to load
    it. (One that has loaded it keeps it, removed or not.)
    """
    # A cache that may not be written to is used as it is.
    with contextlib.suppress(OSError):
        os.utime(current)
        for other in current.parent.iterdir():
            if other == current or time.time() - other.stat().st_mtime < KEPT_FOR_S:
                continue
            if other.is_dir():
                shutil.rmtree(other, ignore_errors=True)
            else:
                other.unlink(missing_ok=True)
