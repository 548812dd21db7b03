"""Where torch comes from: indexes on loopback that answer, refuse, hang, fail, drip."""

from __future__ import annotations

import os
import platform
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NoReturn

import pytest
import torch_index
from ports import free_port
from torch_index import DRIVER_FILES, choose, find_driver, find_problem, pinned_version

SCRIPT = Path(torch_index.__file__)
TAG = f"cp{sys.version_info[0]}{sys.version_info[1]}"
MACHINE = platform.machine()
linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is one build of torch")


def wheel(version: str, local: str = "%2Bcpu", tag: str = TAG, machine: str = MACHINE) -> str:
    return f"torch-{version}{local}-{tag}-{tag}-manylinux_2_28_{machine}.whl"


def page(*names: str) -> bytes:
    links = (f'<a href="/whl/cpu/{name}#sha256=00">{name}</a><br>' for name in names)
    return f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>".encode()


@contextmanager
def index(body: bytes, status: int = 200) -> Iterator[str]:
    """Its address; it knows torch alone."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.path == "/whl/torch/"
            self.send_response(status if known else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,)).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/whl"
        finally:
            server.shutdown()


@contextmanager
def listener(talk: Callable[[socket.socket, threading.Event], None]) -> Iterator[str]:
    """The address of a server that accepts and then does as it is told, until the event."""
    end = threading.Event()

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            talk(self.request, end)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,)).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/whl"
        finally:
            end.set()
            server.shutdown()


def say_nothing(connection: socket.socket, end: threading.Event) -> None:
    end.wait()


def drip(connection: socket.socket, end: threading.Event) -> None:
    """A byte now and then, each of them within a socket's own time limit."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n")
    while not end.wait(0.05):
        try:
            connection.sendall(b" ")
        except OSError:
            return


def speak_otherwise(connection: socket.socket, end: threading.Event) -> None:
    connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")


@pytest.mark.parametrize("local", ["+cpu", "%2Bcpu", ""])
def test_an_index_that_has_the_pinned_wheel(local: str) -> None:
    version = pinned_version()
    with index(page(wheel("1.0.0"), wheel(version, local))) as url:
        assert find_problem(url, version) is None
        assert find_problem(url + "/", version) is None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        page(),
        b"<html><body>Please log in to this network.</body></html>",
        page(wheel("2.9.0")),
        page(wheel("1.12.13.0")),
        page(wheel("2.13.0", tag="cp36")),
        page(wheel("2.13.0", machine="s390x")),
        page(wheel("2.13.0", local="%2Bcu130")),
        page(wheel("2.13.0") + ".metadata.gone").replace(b".whl", b".tar"),
    ],
)
def test_an_index_without_it(body: bytes) -> None:
    with index(body) as url:
        python = ".".join(map(str, sys.version_info[:2]))
        expected = f"has no torch 2.13.0 for Python {python} on {MACHINE}"
        assert find_problem(url, "2.13.0") == expected


@pytest.mark.parametrize("status", [403, 404, 500, 503])
def test_an_index_that_fails(status: int) -> None:
    with index(page(wheel("2.13.0")), status) as url:
        assert find_problem(url, "2.13.0") == f"answers with status {status}"


def test_an_index_that_refuses() -> None:
    problem = find_problem(f"http://127.0.0.1:{free_port()}/whl", "2.13.0")
    assert problem is not None and "refused" in problem


@pytest.mark.parametrize("talk", [say_nothing, drip])
def test_an_index_that_does_not_come_to_its_end(
    talk: Callable[[socket.socket, threading.Event], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_index, "PATIENCE", 0.4)
    with listener(talk) as url:
        assert find_problem(url, "2.13.0") == "has not answered within 0.4 s"


def test_a_name_that_nobody_looks_up(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()

    def look_up(*_: object, **__: object) -> NoReturn:
        asked.wait()
        raise OSError("no such name")

    monkeypatch.setattr(torch_index, "PATIENCE", 0.2)
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    try:
        assert find_problem("http://index.test/whl", "2.13.0") == "has not answered within 0.2 s"
    finally:
        asked.set()


@pytest.mark.parametrize("url", ["", "nonsense", "ftp:/", "http://[::1", "http://127.0.0.1:x/"])
def test_what_is_no_address(url: str) -> None:
    problem = find_problem(url, "2.13.0")
    assert problem is not None and problem.startswith("cannot be read")


def test_who_does_not_speak_http() -> None:
    with listener(speak_otherwise) as url:
        problem = find_problem(url, "2.13.0")
    assert problem is not None and problem.startswith("cannot be read")


@contextmanager
def recorder(answer: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """The address of a server with one answer for everything, and the requests that it has got."""
    got = list[bytes]()

    def talk(connection: socket.socket, end: threading.Event) -> None:
        got.append(connection.recv(1 << 16))
        connection.sendall(answer)

    with listener(talk) as url:
        yield url, got


def whole(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + body


@linux
def test_a_password_is_told_to_the_index_and_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with recorder(whole(page(wheel(pinned_version())))) as (url, got):
        chosen, reason = choose(url.replace("//", "//me:pass%20word@"), tmp_path)
        assert chosen and reason.endswith(f"from {url}")
        assert b"Authorization: Basic bWU6cGFzcyB3b3Jk\r\n" in got[0]
        move = f"HTTP/1.1 302 Found\r\nLocation: {url}/torch/\r\nConnection: close\r\n\r\n"
        with recorder(move.encode()) as (moved, asked):
            assert choose(moved.replace("//", "//me:secret@"), tmp_path)[0]
        assert b"Authorization" in asked[0] and b"Authorization" not in got[1]
    chosen, reason = choose(f"http://me:secret@127.0.0.1:{free_port()}/whl", tmp_path)
    assert not chosen and "refused" in reason and "secret" not in reason


@pytest.mark.parametrize("scheme", ["http://", ""])
def test_pips_own_proxy_is_asked(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with recorder(whole(page(wheel("2.13.0")))) as (url, got):
        monkeypatch.setenv("PIP_PROXY", url.removesuffix("/whl").replace("http://", scheme))
        assert find_problem("http://index.test/whl", "2.13.0") is None
        assert got[0].startswith(b"GET http://index.test/whl/torch/ ")


@pytest.mark.parametrize("name", DRIVER_FILES)
def test_a_driver_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_driver(tmp_path) is None
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.touch()
    assert find_driver(tmp_path) == f"/{name}"


def test_a_drivers_program_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_driver(tmp_path / "root") == str(program)


@linux
def test_with_a_driver_nobody_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    monkeypatch.setattr(torch_index, "find_problem", None)
    chosen, reason = choose("http://127.0.0.1:9/whl", tmp_path)
    assert not chosen and "an NVIDIA driver is here (/dev/nvidiactl)" in reason


@pytest.mark.parametrize("system", ["darwin", "win32", "freebsd14"])
def test_other_systems_have_one_build(
    system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(torch_index, "find_problem", None)
    chosen, reason = choose("http://127.0.0.1:9/whl", tmp_path)
    assert not chosen and "one build for this system" in reason


def run(url: str, root: Path) -> tuple[str, str]:
    """What the script prints, and what it says beside that; no package is within its reach."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(SCRIPT), url, "--root", str(root)],
        env={"PATH": str(root), "HOME": os.devnull},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stdout, done.stderr


@linux
def test_the_script_prints_the_index_and_says_why(tmp_path: Path) -> None:
    with index(page(wheel(pinned_version()))) as url:
        out, said = run(url, tmp_path)
    assert out == f"{url}\n"
    assert said == (f"vlm-serve: no NVIDIA driver is here, so torch is a CPU build, from {url}.\n")


@linux
def test_the_script_prints_nothing_and_says_why(tmp_path: Path) -> None:
    with index(b"", 502) as url:
        out, said = run(url, tmp_path)
    assert out == ""
    assert f"but {url} answers with status 502, so torch comes from pip's default" in said
    assert "2.8 GB to download" in said


@linux
def test_the_script_ends_although_the_index_hangs(tmp_path: Path) -> None:
    with listener(say_nothing) as url:
        out, said = run(url, tmp_path)
    assert out == "" and "has not answered within 5 s" in said
