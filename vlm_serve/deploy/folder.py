"""The folder that Ray keeps its sockets and logs in, and those of deployments that were killed."""

from __future__ import annotations

import os
from pathlib import Path

from vlm_serve import child, temporary_folder
from vlm_serve.temporary_folder import TemporaryFolder

PREFIX = "vlm-serve-ray-"
_SOCKET_BYTES = 107
"""The path of a UNIX socket is no longer."""
_BELOW = "/r/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store"
"""Ray's longest: its session is named after the time and the process."""
LONGEST = _SOCKET_BYTES - len(_BELOW)


class Folder(TemporaryFolder):
    """A new folder for temporary files; whoever makes another one leaves it alone as long as this
    process lives, however it ends.

    Ray lets everybody into the folder that it is given and all below, so that one lies in a folder
    that nobody else can enter.

    Args:
        longest: characters that its path may have; None: as many as it wants.

    Attributes:
        path: of the folder.
    """

    def __init__(self, longest: int | None = None) -> None:
        super().__init__(PREFIX, longest)

    @property
    def ray(self) -> str:
        """The folder for Ray, which makes it."""
        return os.path.join(self.path, "r")

    def start(self) -> str:
        """Make a folder in which nothing lies but this package, for Ray's processes to start in:
        they import from the folder that they are started in. Returns its path."""
        path = Path(self.path, "start")
        path.mkdir(0o700)
        (path / child.PACKAGE).symlink_to(child.PACKAGE_FOLDER)
        return str(path)


def remove_leftovers() -> None:
    """Remove the folders of this user's processes that have ended without doing so."""
    temporary_folder.remove_leftovers(PREFIX)
