"""The temporary folder of Ray's sockets and logs; removes those of killed deployments."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from vlm_serve.errors import EngineError
from vlm_serve.system import child, temporary_folder
from vlm_serve.system.private_files import check_path, is_own
from vlm_serve.system.temporary_folder import TemporaryFolder

PREFIX = "vlm-serve-ray-"
_SOCKET_BYTES = 107
"""Longest path of a UNIX socket."""
_BELOW = "/r/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store"
"""Ray's longest socket path: its session is named after the time and the process."""
LONGEST = _SOCKET_BYTES - len(_BELOW)


class RayFolder(TemporaryFolder):
    """A new temporary folder. No other deployment removes it while this process lives.

    Ray makes its own folder accessible to all users. Therefore it lies inside a private folder.

    Args:
        longest: most characters of the path; None: unlimited.

    Attributes:
        path: of the private folder.
    """

    def __init__(self, longest: int | None = None) -> None:
        super().__init__(PREFIX, longest)

    @property
    def ray(self) -> str:
        """The folder for Ray to create."""
        return os.path.join(self.path, "r")

    def check(self) -> None:
        """Raise EngineError if, now that Ray runs, others can enter the folder or exchange it."""
        path = Path(self.path)
        try:
            check_path(path)
            status = path.lstat()
        except OSError as error:
            raise EngineError(f"the folder of Ray's sockets is not safe: {error}") from None
        if not is_own(status) or stat.S_IMODE(status.st_mode) != 0o700:
            raise EngineError(f"other users can enter {path}, the folder of Ray's sockets")

    def start(self) -> str:
        """Make a folder with nothing but this package, and return its path.

        Ray's processes import from their working directory.
        """
        path = Path(self.path, "start")
        path.mkdir(0o700)
        (path / child.PACKAGE).symlink_to(child.PACKAGE_FOLDER)
        return str(path)


def remove_leftovers() -> None:
    """Remove the folders of this user's processes that ended without doing so."""
    temporary_folder.remove_leftovers(PREFIX)
