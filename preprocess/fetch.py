"""Fetches the bytes of a medium from a data:, http(s):// or file:// URL.

A server fetches URLs named by strangers. So every hop is checked before the connection
(`http_get.py`), every read is bounded in bytes and time, and files come only from below one folder.
Error messages never reveal addresses or paths of the server.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import stat
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from vlm_serve.errors import InvalidRequestError, MediaError, MediaFetchError, OverloadedError
from vlm_serve.preprocess.data_url import read_data_url
from vlm_serve.preprocess.http_get import Deadline, parse_target, request
from vlm_serve.preprocess.limits import MediaLimits
from vlm_serve.preprocess.stopping import Stop

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_CHUNK = 1 << 16
_FIRST_BYTES = 1 << 18
_MAX_URL = 1 << 13

Hold = Callable[[int], None]
"""Reserves memory for this many more bytes; waits or raises if there is not enough."""
Holding = Callable[[Stop], AbstractContextManager[Hold]]
"""Opens the accounting of one medium's bytes, until the block's end."""


class FetchBudget:
    """A limit on the bytes being fetched by all requests together. Thread-safe.

    Args:
        max_bytes: limit on the bytes held at once.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held = 0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def holding(self) -> Iterator[Hold]:
        """Yield a function that reserves bytes; free them all at the end of the block.

        The function raises OverloadedError if the budget is exceeded.
        """
        mine = 0

        def hold(size: int) -> None:
            nonlocal mine
            with self._lock:
                if self._held + size > self._max_bytes:
                    raise OverloadedError(
                        f"the media being fetched at once are limited to {self._max_bytes} bytes",
                        code="fetch_budget",
                    )
                self._held += size
                mine += size

        try:
            yield hold
        finally:
            with self._lock:
                self._held -= mine


@contextlib.contextmanager
def naming(param: str) -> Iterator[None]:
    """Name a request's field in the block's errors that name none."""
    try:
        yield
    except InvalidRequestError as error:
        error.param = error.param or param
        raise


def fetch(
    url: str,
    *,
    max_bytes: int,
    limits: MediaLimits,
    stop: Stop | None = None,
    hold: Hold | None = None,
) -> bytes:
    """Return the bytes of a URL.

    Args:
        stop: closes the connection once the bytes are no longer wanted.
        hold: reserves the bytes of a network transfer before they are read; where the size is
            unknown, it reserves more than arrive. An error raised by it ends the fetch.

    Raises InvalidRequestError for a malformed or unsupported URL, MediaFetchError if it cannot be
    fetched, MediaError if there are more than `max_bytes`, StoppedError.
    """
    stop = stop or Stop()
    scheme = url[:8].partition(":")[0].lower()
    if scheme == "data":
        return read_data_url(url, max_bytes, stop=stop)
    if len(url) > _MAX_URL:
        raise InvalidRequestError(f"the URL is over {_MAX_URL} characters")
    if scheme in ("http", "https"):
        return _fetch_http(url, max_bytes, limits, stop, hold)
    if scheme == "file":
        return _read_file_url(url, max_bytes, limits.allowed_local_media_path)
    raise InvalidRequestError("media must be a data:, http(s):// or file:// URL")


def _too_large(max_bytes: int) -> MediaError:
    return MediaError(f"the medium is over {max_bytes} bytes")


def _fetch_http(
    url: str,
    max_bytes: int,
    limits: MediaLimits,
    stop: Stop,
    hold: Hold | None,
) -> bytes:
    deadline = Deadline(time.monotonic() + limits.max_fetch_seconds)
    for _ in range(limits.max_redirects + 1):
        target = parse_target(url, limits)
        try:
            with request(target, limits, deadline, stop) as response:
                if response.status not in _REDIRECTS:
                    body = _read_response(response, max_bytes, deadline, hold)
                    stop.check()
                    return body
                location = response.getheader("Location") or ""
        except (http.client.HTTPException, OSError):
            stop.check()
            reason = "took too long" if deadline.passed else "failed"
            raise MediaFetchError(f"fetching the URL {reason}") from None
        url = _next_url(url, location)
    raise MediaFetchError(f"more than {limits.max_redirects} redirects")


def _next_url(url: str, location: str) -> str:
    try:
        joined = urllib.parse.urljoin(url, location)
    except ValueError:
        joined = ""
    if not location or len(joined) > _MAX_URL:
        raise MediaFetchError("the server redirected to an invalid URL")
    return joined


def _read_response(
    response: http.client.HTTPResponse,
    max_bytes: int,
    deadline: Deadline,
    hold: Hold | None,
) -> bytes:
    if response.status != 200:
        raise MediaFetchError(f"the server answered with status {response.status}")
    if response.getheader("Content-Encoding", "identity").lower() not in ("identity", ""):
        raise MediaFetchError("the server answered in a compressed encoding")
    response_bytes = response.length
    if response_bytes is not None and response_bytes > max_bytes:
        raise _too_large(max_bytes)
    pieces, size, held = [], 0, 0
    while True:
        if hold is not None and size + _CHUNK > held and held != response_bytes:
            wanted = response_bytes or min(max_bytes + _CHUNK, max(_FIRST_BYTES, 2 * held))
            hold(wanted - held)
            held = wanted
        piece = response.read1(_CHUNK)
        if not piece:
            break
        pieces.append(piece)
        size += len(piece)
        if size > max_bytes:
            raise _too_large(max_bytes)
        if deadline.passed:
            break
    if deadline.passed:
        raise MediaFetchError("fetching the URL took too long")
    if response.length:
        raise MediaFetchError("the server's answer was cut short")
    return b"".join(pieces)


def _read_file_url(url: str, max_bytes: int, root: Path | None) -> bytes:
    if root is None:
        raise InvalidRequestError("file:// URLs are not enabled on this server")
    try:
        parts = urllib.parse.urlsplit(url)
        path = Path(urllib.parse.unquote(parts.path, errors="strict"))
    except ValueError:
        raise InvalidRequestError("the file:// URL is malformed") from None
    if parts.netloc not in ("", "localhost") or not path.is_absolute():
        raise InvalidRequestError("a file:// URL must name an absolute path")
    # One message for all cases: clients must not learn which files exist outside of the folder.
    refused = MediaFetchError("there is no such file below the allowed folder")
    try:
        allowed = root.resolve(strict=True)
        real = path.resolve(strict=True)
        if not real.is_relative_to(allowed):
            raise refused
        return read_file(real, max_bytes, below=allowed)
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, MediaError):
            raise
        raise refused from None


def read_file(path: Path, max_bytes: int, *, below: Path | None = None) -> bytes:
    """Return the bytes of a regular file.

    Args:
        path: the file; links are followed unless `below` is given.
        below: a folder that must contain the opened file, with all links resolved.

    Raises OSError if there is no such regular file, MediaError if it is over `max_bytes`.
    """
    # O_NONBLOCK: opening a FIFO would otherwise wait for its writer.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (os.O_NOFOLLOW if below else 0)
    descriptor = os.open(path, flags)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError("not a regular file")
        if below is not None and not _opened_path(descriptor, path).is_relative_to(below):
            raise OSError("moved away")
        if status.st_size > max_bytes:
            raise _too_large(max_bytes)
        data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise _too_large(max_bytes)
        return data


def _opened_path(descriptor: int, path: Path) -> Path:
    """Return the real path of an opened file.

    A parent folder may have become a link since the check.
    """
    try:
        return Path(os.readlink(f"/proc/self/fd/{descriptor}"))
    except OSError:  # no /proc on this system
        return path.resolve(strict=True)
