"""Files of clients, kept in a private temporary folder until the server ends.

Awaiting blocking work on them must not leave it going on behind its caller's back (`settled`).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

from vlm_serve.errors import ConfigError, InvalidRequestError, VlmServeError
from vlm_serve.options.declared import format_size
from vlm_serve.server.http.auth import Owner
from vlm_serve.server.http.errors import NotFoundError
from vlm_serve.system.private_files import TemporaryFolder

MAX_FILES = 10_000
"""Most files of one key."""
T = TypeVar("T")


class StoreFullError(InvalidRequestError):
    """A file does not fit into what is left of its key's share: HTTP 413."""

    status = 413


class StorageError(VlmServeError):
    """The file system refuses to store a file: HTTP 507."""

    status = 507
    type = "storage_error"


@dataclass(slots=True, eq=False)
class StoredFile:
    """A complete file.

    Attributes:
        path: its place on disk, which no client chooses.
        filename: its name for clients.
        created_at, expires_at: Unix times in seconds.
        users: batches that still need it.
        expired: it is deleted with its last user.
    """

    id: str
    owner: Owner
    path: Path
    filename: str
    purpose: str
    num_bytes: int
    created_at: int
    expires_at: int | None = None
    users: int = 0
    expired: bool = False
    timer: asyncio.TimerHandle | None = None


@dataclass(slots=True)
class _Account:
    """Files of one owner.

    Attributes:
        files: by id, the oldest first.
        drafts: number of files that are being written.
        num_bytes: of files and drafts.
    """

    files: dict[str, StoredFile] = field(default_factory=dict)
    drafts: int = 0
    num_bytes: int = 0


class FileStore:
    """Store of files, bounded for each owner. It is used on the event loop only.

    A full store refuses; it deletes nothing on its own except files past their `expires_at`.

    Args:
        max_bytes: limit for all files of one owner.
        option: the flag that sets the limit.

    Raises:
        ConfigError: there is no usable folder for temporary files.
    """

    def __init__(self, max_bytes: int, option: str = "--batch-store") -> None:
        self.max_bytes = max_bytes
        self._option = option
        name = option[2:].replace("-", "_")
        self._full = f"{name}_full"
        self._accounts: dict[Owner, _Account] = {}
        try:
            self._folder = TemporaryFolder("vlm-serve-files-")
        except OSError as error:
            raise ConfigError(f"{name}: {error}", param=name) from None

    def num_bytes(self, owner: Owner) -> int:
        """Return the bytes of an owner's files and drafts."""
        account = self._accounts.get(owner)
        return 0 if account is None else account.num_bytes

    def get(self, owner: Owner, file_id: str) -> StoredFile | None:
        """Return a file of an owner; None: the owner has none of that id. Any thread may call."""
        account = self._accounts.get(owner)
        return None if account is None else account.files.get(file_id)

    def find(self, owner: Owner, file_id: str, param: str | None = None) -> StoredFile:
        """Return a file of an owner.

        Args:
            param: the request's field with the id.

        Raises:
            NotFoundError: the owner has none of that id.
        """
        file = self.get(owner, file_id)
        if file is None:
            raise NotFoundError(
                f"there is no file {file_id[:128]!r}", param=param, code="file_not_found"
            )
        return file

    def files(self, owner: Owner) -> list[StoredFile]:
        """Return the files of an owner, the oldest first."""
        account = self._accounts.get(owner)
        return [] if account is None else list(account.files.values())

    def draft(self, owner: Owner, prefix: str = "file-") -> Draft:
        """Begin a file, whose id begins with the prefix.

        Raises:
            StoreFullError: the owner has as many files as are allowed.
            StorageError: it cannot be made.
        """
        account = self._accounts.setdefault(owner, _Account())
        if len(account.files) + account.drafts >= MAX_FILES:
            raise StoreFullError(
                f"this key has {MAX_FILES} files already; delete some of them",
                code=self._full,
            )
        path = Path(self._folder.path) / f"{prefix}{secrets.token_hex(16)}"
        return Draft(self, account, owner, path)

    def check_fits(self, owner: Owner, size: int) -> None:
        """Raise StoreFullError if so many further bytes do not fit into the owner's share."""
        held = self.num_bytes(owner)
        if held + size <= self.max_bytes:
            return
        most = format_size(self.max_bytes)
        raise StoreFullError(
            f"the file does not fit: this key's files have {held} bytes of the {most} that "
            f"{self._option} allows; delete some with DELETE /v1/files/{{id}}"
            if held
            else f"the file is larger than the {most} that {self._option} allows",
            code=self._full,
        )

    def delete(self, file: StoredFile) -> None:
        """Delete a file.

        Raises:
            InvalidRequestError: a batch that has not ended needs it.
        """
        if file.users:
            raise InvalidRequestError(
                f"the file {file.id} is the input of a batch that has not ended; cancel that first",
                code="file_in_use",
            )
        if file.timer is not None:
            file.timer.cancel()
        account = self._accounts[file.owner]
        del account.files[file.id]
        account.num_bytes -= file.num_bytes
        _unlink(file.path)

    def hold(self, file: StoredFile) -> None:
        """Count a user of a file."""
        file.users += 1

    def release(self, file: StoredFile) -> None:
        """Count a user of a file out."""
        file.users -= 1
        if file.expired and not file.users:
            self.delete(file)

    def expire(self, file: StoredFile) -> None:
        """Delete a file whose time is over, once nothing needs it."""
        file.expired = True
        if not file.users:
            self.delete(file)

    def close(self) -> None:
        """Delete everything. It may block."""
        for account in self._accounts.values():
            for file in account.files.values():
                if file.timer is not None:
                    file.timer.cancel()
        self._accounts.clear()
        self._folder.remove()


class Draft:
    """A file that is being written. Its bytes count from the first one on.

    Args:
        store, account, owner: of the file.
        path: where it is made; its name is the file's id.
    """

    def __init__(self, store: FileStore, account: _Account, owner: Owner, path: Path) -> None:
        self._store = store
        self._account = account
        self._owner = owner
        self._id, self._path = path.name, path
        self.num_bytes = 0
        self._writing = asyncio.Lock()
        try:
            self._file = FileIO(self._path, "xb")
        except OSError as error:
            raise _refusal(error) from None
        account.drafts += 1

    async def write(self, data: bytes) -> None:
        """Append all of the data or nothing.

        Raises:
            StoreFullError: it does not fit into the owner's share.
            StorageError: the file system refuses it.
        """
        self._store.check_fits(self._owner, len(data))
        self._account.num_bytes += len(data)
        self.num_bytes += len(data)
        try:
            async with self._writing:
                await in_thread(lambda: self._append(data))
        except OSError as error:
            self._account.num_bytes -= len(data)
            self.num_bytes -= len(data)
            raise _refusal(error) from None

    def _append(self, data: bytes) -> None:
        start, left = self._file.tell(), memoryview(data)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            self._file.truncate(start)
            self._file.seek(start)
            raise

    def finish(self, filename: str, purpose: str, seconds: int | None = None) -> StoredFile:
        """Make it a file of its owner.

        Args:
            seconds: time until it is deleted.
        """
        self._file.close()
        now = int(time.time())
        file = StoredFile(self._id, self._owner, self._path, filename, purpose, self.num_bytes, now)
        if seconds is not None:
            file.expires_at = now + seconds
            loop = asyncio.get_running_loop()
            file.timer = loop.call_later(seconds, self._store.expire, file)
        self._account.drafts -= 1
        self._account.files[file.id] = file
        return file

    def discard(self) -> None:
        """Drop it, unless it is finished."""
        if not self._file.closed:
            self._file.close()
            self._account.drafts -= 1
            self._account.num_bytes -= self.num_bytes
            _unlink(self._path)


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _refusal(error: OSError) -> StorageError:
    return StorageError(
        f"the server cannot store the file: {error.strerror or 'input/output error'}",
        code="storage_error",
    )


async def settled(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of work on other threads; if cancelled, wait for its end first.

    A thread cannot be cancelled. It may still use files that its cancelled caller would close.
    """
    running = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():  # it may be cancelled more than once
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({running})
        if not running.cancelled():
            running.exception()  # retrieved, so that asyncio does not report it
        raise


async def in_thread(work: Callable[[], T]) -> T:
    """Run blocking work on a thread; see `settled`."""
    return await settled(asyncio.to_thread(work))
