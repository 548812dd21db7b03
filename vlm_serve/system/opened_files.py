"""Open the files of a folder that others may write to, without a way out."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from vlm_serve.errors import CheckpointError
from vlm_serve.system.private_files import TemporaryFolder


@contextlib.contextmanager
def files_below(root: Path, folder: Path, names: Iterable[str]) -> Iterator[Path]:
    """Yield a private folder of the same name, with links to open files of a folder.

    Links in the folder may lead elsewhere below `root`. What they lead to later has no effect.

    Args:
        root: its real path, without links.
        folder: somewhere below `root`.
        names: of files; those that are missing are left out.

    Raises:
        CheckpointError: one is no file, cannot be opened, or lies outside of `root`.
        OSError: there is no private folder.
    """
    with contextlib.ExitStack() as stack:
        private = TemporaryFolder("vlm-serve-files-")
        stack.callback(private.remove)
        inside = Path(private.path) / folder.name
        inside.mkdir()
        for name in names:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                descriptor = _open_below(root, folder / name)
                stack.callback(os.close, descriptor)
                (inside / name).symlink_to(f"/dev/fd/{descriptor}")
        yield inside


def _open_below(root: Path, path: Path) -> int:
    """Open a file and follow its links, but none that is put there meanwhile.

    Raises FileNotFoundError, NotADirectoryError, CheckpointError.
    """
    with contextlib.ExitStack() as stack:
        try:
            *folders, name = path.resolve().relative_to(root).parts
            parent: int | None = None
            for part in (str(root), *folders):
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
                parent = os.open(part, flags, dir_fd=parent)
                stack.callback(os.close, parent)
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # Of a pipe, that does not wait.
            descriptor = os.open(name, flags, dir_fd=parent)
        except (FileNotFoundError, NotADirectoryError):
            raise
        except ValueError:
            raise CheckpointError(f"{path.name} leads out of the folder that is allowed") from None
        except (OSError, RuntimeError):  # A circle of links is either.
            raise CheckpointError(f"{path.name} cannot be opened") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path.name} is no file")
    return descriptor
