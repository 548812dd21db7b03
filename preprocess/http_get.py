"""One HTTP GET to an address that has been checked.

The URL is parsed once, and both the check and the request use the parsed parts. The host is
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
import queue
import re
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass

from vlm_serve.errors import InvalidRequestError, MediaFetchError
from vlm_serve.preprocess.limits import MediaLimits
from vlm_serve.preprocess.stopping import Stop

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
class Target:
    """Host, port and path of one hop."""

    host: str
    port: int
    path: str
    secure: bool

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.secure else 80) else f"{host}:{self.port}"


def parse_target(url: str, limits: MediaLimits) -> Target:
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
    return Target(host, port or (443 if secure else 80), path, secure)


def _resolve(target: Target, deadline: Deadline, stop: Stop) -> list[tuple[int, tuple[str, int]]]:
    """Return (family, socket address) for every address of the host, within the deadline."""
    answers: queue.SimpleQueue[list[tuple[int, tuple[str, int]]]] = queue.SimpleQueue()

    def look_up() -> None:
        # getaddrinfo takes no timeout; an abandoned thread ends at the resolver's own timeout.
        try:
            found = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
            answers.put([(int(entry[0]), (str(entry[4][0]), target.port)) for entry in found])
        except (OSError, UnicodeError):
            answers.put([])

    threading.Thread(target=look_up, daemon=True).start()
    try:
        with stop.calling(lambda: answers.put([])):
            return answers.get(timeout=deadline.left)
    except queue.Empty:
        raise TimeoutError from None


def _connect(target: Target, limits: MediaLimits, deadline: Deadline, stop: Stop) -> socket.socket:
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
def request(
    target: Target,
    limits: MediaLimits,
    deadline: Deadline,
    stop: Stop | None = None,
) -> Iterator[http.client.HTTPResponse]:
    """Send a GET and yield the response, its body still unread.

    Raises MediaFetchError if the host is not allowed; OSError or HTTPException if the exchange
    fails, the deadline passes or the stop is set, at any point.
    """
    stop = stop or Stop()
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
