"""Fetching: what is read, from where, and all that is refused."""

from __future__ import annotations

import contextlib
import http.server
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from http_files import serving
from ports import free_port

from vlm_serve.errors import InvalidRequestError, MediaError, MediaFetchError
from vlm_serve.preprocess.media import fetch as fetching
from vlm_serve.preprocess.media.fetch import fetch, naming
from vlm_serve.preprocess.media.limits import MediaLimits

LIMITS = MediaLimits(max_fetch_seconds=10.0)
LOCAL = replace(LIMITS, allow_private_networks=True)
BODY = bytes(range(256)) * 20


def get(url: str, limits: MediaLimits = LIMITS, max_bytes: int = 10_000) -> bytes:
    with naming("where"):
        return fetch(url, max_bytes=max_bytes, limits=limits)


def answer(
    request: http.server.BaseHTTPRequestHandler,
    status: int = 200,
    body: bytes = BODY,
    **headers: str,
) -> None:
    request.send_response(status)
    headers = {"Content-Length": str(len(body))} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    for name, value in headers.items():
        request.send_header(name, value)
    request.end_headers()
    request.wfile.write(body)


def test_a_body_is_read() -> None:
    seen: list[tuple[str, Any]] = []

    def handle(request: http.server.BaseHTTPRequestHandler) -> None:
        seen.append((request.path, request.headers["Host"]))
        answer(request)

    with serving(handle) as root:
        assert get(root + "/a/b?c=d#e", LOCAL) == BODY
    assert seen == [("/a/b?c=d", root.removeprefix("http://"))]


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "2130706433", "0x7f.1", "[::1]", "[::ffff:127.0.0.1]", "0"]
)
def test_private_hosts_are_not_dialled(host: str) -> None:
    hits = []
    with serving(lambda request: hits.append(1)) as root:
        port = root.rpartition(":")[2]
        with pytest.raises(MediaFetchError) as caught:
            get(f"http://{host}:{port}/")
    assert not hits
    assert caught.value.status == 422
    assert "127" not in caught.value.message


def test_one_private_address_among_public_ones_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(*args: Any, **kwargs: Any) -> Any:
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80))
            for address in ("8.8.8.8", "10.0.0.7")
        ]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(socket, "create_connection", _must_not_dial)
    with pytest.raises(MediaFetchError, match="public network"):
        get("http://rebinding.example/")


def _must_not_dial(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("dialled")


def test_the_checked_address_is_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that resolves to something else a moment later gains nothing by it."""
    answers = iter(["8.8.8.8", "127.0.0.1", "127.0.0.1"])
    dialled = []

    def resolve(host: str, port: int, **kwargs: Any) -> Any:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (next(answers), port))]

    def dial_it(address: Any, timeout: float) -> Any:
        dialled.append(address)
        raise OSError("no network here")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(socket, "create_connection", dial_it)
    with pytest.raises(MediaFetchError):
        get("http://rebinding.example/")
    assert dialled == [("8.8.8.8", 80)]


def test_redirects_are_followed_and_counted() -> None:
    def handle(request: http.server.BaseHTTPRequestHandler) -> None:
        left = int(request.path[1:])
        if left:
            answer(request, 302, b"moved", Location=f"/{left - 1}")
        else:
            answer(request)

    with serving(handle) as root:
        assert get(root + "/5", LOCAL) == BODY
        with pytest.raises(MediaFetchError, match="more than 5 redirects"):
            get(root + "/6", LOCAL)


@pytest.mark.parametrize(
    "location",
    ["file:///etc/passwd", "ftp://127.0.0.1/", "http://u:p@127.0.0.1/", "data:,x", "http://["],
)
def test_redirects_are_checked(location: str) -> None:
    with (
        serving(lambda request: answer(request, 301, b"", Location=location)) as root,
        pytest.raises(InvalidRequestError),
    ):
        get(root, LOCAL)


def test_a_redirect_to_a_private_host_is_not_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    hits: list[str] = []

    def handle(request: http.server.BaseHTTPRequestHandler) -> None:
        hits.append(request.path)
        answer(request, 302, b"", Location="http://10.0.0.1/inside")

    monkeypatch.setattr(fetching, "is_public", lambda address: str(address) == "127.0.0.1")
    with serving(handle) as root, pytest.raises(MediaFetchError, match="public network"):
        get(root + "/outside")
    assert hits == ["/outside"]


@pytest.mark.parametrize("status", [204, 206, 304, 403, 404, 500])
def test_other_answers(status: int) -> None:
    with (
        serving(lambda request: answer(request, status, b"")) as root,
        pytest.raises(MediaFetchError, match=str(status)),
    ):
        get(root, LOCAL)


def test_broken_answers() -> None:
    def short(request: http.server.BaseHTTPRequestHandler) -> None:
        answer(request, Content_Length=str(len(BODY) + 1))

    def zipped(request: http.server.BaseHTTPRequestHandler) -> None:
        answer(request, Content_Encoding="gzip")

    def nonsense(request: http.server.BaseHTTPRequestHandler) -> None:
        request.wfile.write(b"hello\r\n\r\n")

    def nowhere(request: http.server.BaseHTTPRequestHandler) -> None:
        answer(request, 302, b"")

    def nothing(request: http.server.BaseHTTPRequestHandler) -> None:
        request.connection.close()

    for handle in (short, zipped, nonsense, nowhere, nothing):
        with serving(handle) as root, pytest.raises(MediaFetchError):
            get(root, LOCAL)


def test_a_body_is_bounded_with_and_without_its_length() -> None:
    def unknown(request: http.server.BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.end_headers()
        request.wfile.write(BODY)

    for handle in (answer, unknown):
        with serving(handle) as root:
            assert get(root, LOCAL, max_bytes=len(BODY)) == BODY
            with pytest.raises(MediaError, match="over"):
                get(root, LOCAL, max_bytes=len(BODY) - 1)


def test_nobody_listens() -> None:
    with pytest.raises(MediaFetchError, match="failed"):
        get(f"http://127.0.0.1:{free_port()}/", LOCAL)
    with pytest.raises(MediaFetchError, match="cannot be resolved"):
        get("http://no-such-host.invalid/", LOCAL)


@contextlib.contextmanager
def dripping(first: bytes) -> Iterator[str]:
    """A server that sends `first` and then a byte now and then, for ever."""
    ended = threading.Event()

    class Drip(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError):
                self.request.recv(1000)
                self.request.sendall(first)
                while not ended.wait(0.05):
                    self.request.sendall(b"a")

    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Drip)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        ended.set()
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    "first",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nX: ",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
    ],
)
def test_a_server_that_drips_is_cut_off(first: bytes) -> None:
    limits = replace(LOCAL, max_fetch_seconds=0.3)
    with dripping(first) as url, pytest.raises(MediaFetchError, match="too long"):
        get(url, limits)


def test_a_resolver_that_hangs_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    def hang(*args: Any, **kwargs: Any) -> Any:
        ended.wait(20)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    with pytest.raises(MediaFetchError, match="too long"):
        get("http://slow.example/", replace(LIMITS, max_fetch_seconds=0.1))
    ended.set()


def test_time_is_bounded_as_a_whole() -> None:
    """Slow hops add up to one budget."""

    def handle(request: http.server.BaseHTTPRequestHandler) -> None:
        time.sleep(0.2)
        answer(request, 302, b"", Location="/again")

    with serving(handle) as url, pytest.raises(MediaFetchError, match="too long"):
        get(url, replace(LOCAL, max_fetch_seconds=0.5, max_redirects=50))
