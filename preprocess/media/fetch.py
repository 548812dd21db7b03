"""Fetches the bytes of a medium from a data:, http(s):// or file:// URL.

A server fetches URLs named by strangers. So every hop is checked before the connection, every read
is bounded in bytes and time, and files come only from below one folder. Error messages never reveal
addresses or paths of the server.

A hop's URL is parsed once, and both the check and the request use the parsed parts. The host is
resolved once, all of its addresses must be allowed, and the connection goes to one of them.

A table of our own tells which addresses belong to the public internet. `ipaddress.is_global`
follows the table of the Python that runs. Releases before 3.11.10 and 3.12.4 call most of
192.0.0.0/24 global, and a cloud serves credentials there. So media are only fetched from what
IANA's registries of special-purpose addresses leave.
Sources: https://www.iana.org/assignments/iana-ipv4-special-registry and
https://www.iana.org/assignments/iana-ipv6-special-registry.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import os
import queue
import re
import socket
import ssl
import stat
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from vlm_serve.errors import InvalidRequestError, MediaError, MediaFetchError, OverloadedError
from vlm_serve.preprocess.media.limits import MediaLimits
from vlm_serve.preprocess.reading.data_url import read_data_url
from vlm_serve.system.stopping import Stop

VIDEO_SUFFIXES = (
    *(".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".ts", ".m2ts", ".mpg", ".mpeg", ".3gp"),
    *(".flv", ".wmv"),
)
"""Ends of the names of video files."""
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_CHUNK = 1 << 16
_FIRST_BYTES = 1 << 18
_MAX_URL = 1 << 13

Hold = Callable[[int], None]
"""Reserves memory for this many more bytes; waits or raises if there is not enough."""
Holding = Callable[[Stop], AbstractContextManager[Hold]]
"""Opens the accounting of one medium's bytes, until the block's end."""


_PRINTABLE = re.compile(r"[!-~]+")
_CONNECT_SECONDS = 5.0
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_SPECIAL_4 = tuple(
    map(
        ipaddress.IPv4Network,
        (
            "0.0.0.0/8",
            "10.0.0.0/8",
            "100.64.0.0/10",
            "127.0.0.0/8",
            "169.254.0.0/16",
            "172.16.0.0/12",
            "192.0.0.0/24",
            "192.0.2.0/24",
            "192.88.99.0/24",
            "192.168.0.0/16",
            "198.18.0.0/15",
            "198.51.100.0/24",
            "203.0.113.0/24",
            "224.0.0.0/4",  # multicast
            "240.0.0.0/4",  # reserved, and broadcast
        ),
    )
)
"""No medium lies at the few global addresses among them, such as 192.0.0.9."""
_UNICAST_6 = ipaddress.IPv6Network("2000::/3")
"""All IPv6 addresses that were ever assigned to hosts of the internet."""
_SPECIAL_6 = tuple(
    map(
        ipaddress.IPv6Network,
        (
            "2001::/23",  # protocol assignments, such as Teredo
            "2001:db8::/32",
            "3fff::/20",
        ),
    )
)
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
"""IPv4 hosts as seen from an IPv6-only network."""


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
            with _request(target, limits, deadline, stop) as response:
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
        raise InvalidRequestError(
            "file:// URLs are not enabled on this server (--allowed-local-media-path)"
        )
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


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point in time of `time.monotonic`."""

    at: float

    @property
    def left(self) -> float:
        """Seconds left, always above 0: sockets would take 0 for "do not wait"."""
        return max(self.at - time.monotonic(), 1e-3)

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self.at


@dataclass(frozen=True, slots=True)
class FetchTarget:
    """Host, port and path of one hop."""

    host: str
    port: int
    path: str
    secure: bool

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.secure else 80) else f"{host}:{self.port}"


def parse_target(url: str, limits: MediaLimits) -> FetchTarget:
    """Parse an http(s) URL.

    Raises InvalidRequestError if it is malformed, carries credentials or names a host that is not
    allowed.
    """
    malformed = InvalidRequestError("the URL is malformed")
    try:
        # The URL is sent unchanged, except that the fragment is dropped and non-ASCII is quoted.
        url = urllib.parse.quote(url.partition("#")[0], safe="!$%&'()*+,-./:;=?@[]_~")
        parts = urllib.parse.urlsplit(url)
        host, port = urllib.parse.unquote(parts.hostname or ""), parts.port
        host = host.encode("idna").decode("ascii") if not host.isascii() else host
    except (ValueError, UnicodeError):
        raise malformed from None
    if parts.scheme not in ("http", "https"):
        raise InvalidRequestError("only http and https are fetched")
    if not _PRINTABLE.fullmatch(host) or any(character in host for character in "%/\\@?#"):
        raise malformed
    if "@" in parts.netloc:
        raise InvalidRequestError("the URL must not carry credentials")
    if limits.allowed_media_domains and host.rstrip(".") not in {
        domain.lower() for domain in limits.allowed_media_domains
    }:
        raise InvalidRequestError("the URL's host is not on the list of allowed hosts")
    secure = parts.scheme == "https"
    path = (parts.path or "/") + ("?" + parts.query if parts.query else "")
    return FetchTarget(host, port or (443 if secure else 80), path, secure)


def _resolve(
    target: FetchTarget, deadline: Deadline, stop: Stop
) -> list[tuple[int, tuple[str, int]]]:
    """Return (family, socket address) for every address of the host, within the deadline."""
    answers: queue.SimpleQueue[list[tuple[int, tuple[str, int]]]] = queue.SimpleQueue()

    def look_up() -> None:
        # getaddrinfo takes no timeout; an abandoned thread ends at the resolver's own timeout.
        try:
            entries = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
            answers.put([(int(entry[0]), (str(entry[4][0]), target.port)) for entry in entries])
        except (OSError, UnicodeError):
            answers.put([])

    threading.Thread(target=look_up, daemon=True).start()
    try:
        with stop.calling(lambda: answers.put([])):
            return answers.get(timeout=deadline.left)
    except queue.Empty:
        raise TimeoutError from None


def _connect(
    target: FetchTarget, limits: MediaLimits, deadline: Deadline, stop: Stop
) -> socket.socket:
    addresses = _resolve(target, deadline, stop)
    stop.check()
    if not addresses:
        raise MediaFetchError("the URL's host cannot be resolved")
    if not limits.allow_private_networks:
        for _, (address, _) in addresses:
            if not is_public(ipaddress.ip_address(address.partition("%")[0])):
                raise MediaFetchError("the URL's host is not on the public network")
    failure: OSError = OSError("no address")
    for _, address_and_port in addresses:
        stop.check()
        try:
            return socket.create_connection(
                address_and_port, timeout=min(deadline.left, _CONNECT_SECONDS)
            )
        except OSError as error:
            failure = error
    raise failure


@contextlib.contextmanager
def _request(
    target: FetchTarget, limits: MediaLimits, deadline: Deadline, stop: Stop
) -> Iterator[http.client.HTTPResponse]:
    """Send a GET and yield the response, its body still unread.

    Raises MediaFetchError if the host is not allowed; OSError or HTTPException if the exchange
    fails, the deadline passes or the stop is set, at any point.
    """
    sock = _connect(target, limits, deadline, stop)

    def cut_off() -> None:
        with contextlib.suppress(OSError):
            # SSLSocket's own method would make the reading thread continue in plain text.
            socket.socket.shutdown(sock, socket.SHUT_RDWR)

    # A peer that trickles bytes never hits the socket timeout; this timer cuts it off.
    watch = threading.Timer(deadline.left, cut_off)
    watch.daemon = True
    watch.start()
    ending = contextlib.ExitStack()
    ending.enter_context(stop.calling(cut_off))
    try:
        sock.settimeout(deadline.left)
        if target.secure:
            context = ssl.create_default_context()
            # The handshake starts only once `sock` is the new socket, so that `cut_off` reaches it.
            sock = context.wrap_socket(
                sock, server_hostname=target.host, do_handshake_on_connect=False
            )
            stop.check()
            sock.do_handshake()
        connection = http.client.HTTPConnection(target.host, target.port)
        connection.sock = sock
        headers = {
            "Host": target.host_header,
            "User-Agent": "vlm-serve",
            "Accept": "*/*",
            "Accept-Encoding": "identity",
            "Connection": "close",
        }
        connection.request("GET", target.path, headers=headers)
        with contextlib.closing(connection):
            yield connection.getresponse()
    finally:
        ending.close()
        watch.cancel()
        sock.close()


def is_public(address: Address) -> bool:
    """Return True for a public internet address that embeds no other kind of address."""
    if isinstance(address, ipaddress.IPv4Address):
        return not any(address in network for network in _SPECIAL_4)
    if address in _NAT64:
        return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    if address.sixtofour is not None and not is_public(address.sixtofour):
        return False
    return address in _UNICAST_6 and not any(address in network for network in _SPECIAL_6)
