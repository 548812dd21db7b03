"""No cache keeps an engine from starting: it works without one, and uses it when it is there."""

from __future__ import annotations

import logging
import os
import socket
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engines_on_a_store import settings, settle
from make_checkpoint import make_checkpoint
from parity import greedy
from parity_cases import random_ids
from redis_server import StoreServer, running
from serving import wait_for

from vlm_serve.cache.tiers.disk import FILE_NAME
from vlm_serve.cache.tiers.stack import TierStack
from vlm_serve.engine.engine import Engine
from vlm_serve.engine.start.build import build
from vlm_serve.pipeline.pipeline import Pipeline

PROMPT = random_ids(100, seed=5)
PASSWORD = "secret-word"
HTTP = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"
ECHO = b"-ERR unknown command, with args beginning with: '3' 'AUTH' '%b'\r\n" % PASSWORD.encode()
NO_STORES: dict[str, bytes | None] = {
    "hangs": None,
    "closes": b"",
    "web server": HTTP,
    "other things": b"\x16\x03\x01" + bytes(range(256)) * 400,
    "repeats the password": ECHO,
    "a number": b":1\r\n",
    "a bad length": b"$abc\r\n",
    "never ends": b"*100000000\r\n",
}

Case = tuple[dict[str, Any], Callable[[], object] | None]
"""Options of an engine, and what makes the store usable, if anything does."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[int]:
    with opened(checkpoint) as pipe:
        return list(pipe.generate(PROMPT, greedy(4)).token_ids)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What hangs is given up soon, and what has failed tried again soon."""
    defaults = TierStack.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "open_seconds", 0.5)
    monkeypatch.setitem(defaults, "rest_seconds", 0.1)
    monkeypatch.setattr("vlm_serve.cache.tiers.store_calls.OPEN_SECONDS", 1.0)


def opened(checkpoint: Path, **options: Any) -> Pipeline:
    config = settings(None, shared_store_timeout=2.0, **options)
    return Pipeline.from_engine(Engine(build(str(checkpoint), config, poison=True)))


def check(
    checkpoint: Path, expected: list[int], caplog: pytest.LogCaptureFixture, case: Case, tier: str
) -> None:
    """An engine starts without its tier, warns in one line, answers as ever, and uses it later."""
    options, heal = case
    with caplog.at_level(logging.INFO), opened(checkpoint, **options) as pipe:

        def is_up() -> bool:
            return bool(pipe.engine.stats()["tiers"][f"{tier}_up"])

        wait_for(lambda: bool(caplog.records))
        assert not is_up()
        assert list(pipe.generate(PROMPT, greedy(4)).token_ids) == expected
        pipe.engine.check()
        messages = [each for each in caplog.messages if f"the cache tier '{tier}' (" in each]
        assert "the server works without it and tries again" in messages[0]
        assert len(messages) == len(set(messages)) and PASSWORD not in caplog.text
        assert not any(record.exc_info for record in caplog.records)
        pipe.engine.flush()
        if heal is not None:
            heal()
            wait_for(is_up)
            wait_for(lambda: "is used from now on" in caplog.text)
            assert list(pipe.generate(PROMPT, greedy(4)).token_ids) == expected
            if tier == "shared":
                settle(pipe)
                assert pipe.engine.stats()["tiers"]["shared_written"] > 0
        pipe.engine.check()


@contextmanager
def listening(answer: bytes | None) -> Iterator[int]:
    """A port where something is that is no store: it always says the same; None: nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def talk(connection: socket.socket) -> None:
            with connection:
                try:
                    while answer != b"" and connection.recv(1 << 16):
                        if answer is not None:
                            connection.sendall(answer)
                except OSError:
                    return

        def accept() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                threading.Thread(target=talk, args=(connection,), daemon=True).start()

        accepting = threading.Thread(target=accept, daemon=True)
        accepting.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        accepting.join(60)


@pytest.mark.parametrize("kind", NO_STORES)
def test_something_else_is_where_the_store_should_be(
    checkpoint: Path, expected: list[int], caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    with listening(NO_STORES[kind]) as port:
        url = f"redis://:{PASSWORD}@127.0.0.1:{port}/1"
        check(checkpoint, expected, caplog, ({"shared_store": url}, None), "shared")


def test_the_name_of_the_store_does_not_resolve(
    checkpoint: Path, expected: list[int], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_text(os.urandom(32).hex())
    key.chmod(0o600)
    options = {
        "shared_store": "redis://no-such-machine.invalid",
        "shared_store_insecure": True,
        "shared_store_key_file": str(key),
    }
    check(checkpoint, expected, caplog, (options, None), "shared")


def refusing(folder: Path) -> Iterator[Case]:
    server = StoreServer(folder)
    yield {"shared_store": server.url}, server.start
    server.stop()


def frozen(folder: Path) -> Iterator[Case]:
    with running(folder) as server:
        server.freeze()
        yield {"shared_store": server.url}, server.thaw
        server.thaw()


def wrong_password(folder: Path) -> Iterator[Case]:
    with running(folder, "--requirepass", "another") as server:
        server.client = type(server.client)(port=server.port, password="another")
        url = f"redis://:{PASSWORD}@127.0.0.1:{server.port}"
        yield {"shared_store": url}, lambda: server.client.config_set("requirepass", PASSWORD)


def no_password(folder: Path) -> Iterator[Case]:
    with running(folder, "--requirepass", "another") as server:
        server.client = type(server.client)(port=server.port, password="another")
        yield {"shared_store": server.url}, lambda: server.client.config_set("requirepass", "")


def no_tls(folder: Path) -> Iterator[Case]:
    with running(folder) as server:
        yield {"shared_store": f"rediss://127.0.0.1:{server.port}"}, None


def no_such_database(folder: Path) -> Iterator[Case]:
    with running(folder) as server:
        yield {"shared_store": f"{server.url}/99"}, None


@pytest.mark.parametrize(
    "state", [refusing, frozen, wrong_password, no_password, no_tls, no_such_database]
)
def test_the_store_cannot_be_used_yet(
    checkpoint: Path,
    expected: list[int],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    state: Callable[[Path], Iterator[Case]],
) -> None:
    for case in state(tmp_path):
        check(checkpoint, expected, caplog, case, "shared")


def unmounted(folder: Path) -> Iterator[Case]:
    link = folder / "link"
    link.symlink_to(folder / "mounted")
    yield {"disk_cache_path": str(link)}, (folder / "mounted").mkdir


def not_writable(folder: Path) -> Iterator[Case]:
    yield {"disk_cache_path": "/proc/vlm-serve"}, None


def no_file(folder: Path) -> Iterator[Case]:
    (folder / FILE_NAME).mkdir()
    yield {"disk_cache_path": str(folder)}, (folder / FILE_NAME).rmdir


def locked(folder: Path) -> Iterator[Case]:
    connect = sqlite3.connect
    with pytest.MonkeyPatch.context() as patch:
        options = {"timeout": 0.01}
        patch.setattr(sqlite3, "connect", lambda *given, **o: connect(*given, **{**o, **options}))
        other = connect(folder / FILE_NAME, isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
        yield {"disk_cache_path": str(folder)}, lambda: other.execute("ROLLBACK")
        other.close()


def link(folder: Path) -> Iterator[Case]:
    other, path = folder / "other", folder / "cache" / FILE_NAME
    other.write_text("")
    path.parent.mkdir()
    path.symlink_to(other)
    yield {"disk_cache_path": str(path.parent)}, path.unlink
    assert other.read_text() == ""


@pytest.mark.parametrize("state", [unmounted, not_writable, no_file, locked, link])
def test_the_disk_cannot_be_used_yet(
    checkpoint: Path,
    expected: list[int],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    state: Callable[[Path], Iterator[Case]],
) -> None:
    for case in state(tmp_path):
        check(checkpoint, expected, caplog, case, "disk")
