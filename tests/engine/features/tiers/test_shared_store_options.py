"""What cannot be used as a shared store is refused at the start, in one sentence."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis_server import StoreServer, running

from vlm_serve.commands.plan import make, render
from vlm_serve.engine.features.tiers.shared_store import find_store, read_address
from vlm_serve.engine.start.build import build
from vlm_serve.errors import ConfigError
from vlm_serve.options.config import EngineConfig


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
    with running(tmp_path_factory.mktemp("store"), "--requirepass", "secret") as server:
        yield server


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_bytes(os.urandom(32).hex().encode() + b"\n")
    path.chmod(0o600)
    return path


def refused(**options: object) -> str:
    """What the engine says; the model is not loaded for it."""
    with pytest.raises(ConfigError) as raised:
        build("/no/such/model", EngineConfig(**options))  # type: ignore[arg-type]
    message, param = raised.value.message, raised.value.param
    assert "\n" not in message and param is not None and param in message
    assert "secret" not in message and "wrong-word" not in message
    return message


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:6379",
        "http://127.0.0.1",
        "redis://",
        "redis://127.0.0.1:port",
        "redis://127.0.0.1/0/1",
        "redis://127.0.0.1/-1",
        "redis://127.0.0.1#0",
        "redis://[::1",
        "redis://a..b",
        "redis://" + "x" * 64 + ".internal",
    ],
)
def test_a_wrong_url(url: str) -> None:
    assert refused(shared_store=url).startswith("shared_store must be redis://, rediss://, ")


def test_unknown_parameters() -> None:
    said = refused(shared_store="rediss://127.0.0.1?ssl_cert_reqs=none")
    assert said.startswith("shared_store has a parameter 'ssl_cert_reqs'")
    assert "requires TLS" in refused(shared_store="redis://127.0.0.1?ssl_ca_certs=file")


def test_another_machine_needs_tls_and_the_key(key: Path) -> None:
    far = "redis://user:secret@192.0.2.1"
    assert "use rediss:// or valkeys:// (TLS)" in refused(shared_store=far)
    for name in ("db.localhost", "localhost."):  # what a resolver may find elsewhere
        assert "(TLS)" in refused(shared_store=f"redis://{name}")
    insecure = {"shared_store": far, "shared_store_insecure": True}
    assert "shared_store_key_file is needed" in refused(**insecure)
    assert "is needed" in refused(shared_store="valkeys://cache.internal")
    config = EngineConfig(
        shared_store=far, shared_store_insecure=True, shared_store_key_file=str(key)
    )
    address = read_address(config)
    assert address is not None and address.text == "redis://192.0.2.1:6379/0"
    assert address.connection["password"] == "secret" and "secret" not in repr(address)


@pytest.mark.parametrize(
    ("mode", "content", "message"),
    [
        (0o604, bytes(32), "can be read or written by every user"),
        (0o602, bytes(32), "can be read or written by every user"),
        (0o600, bytes(31), "must hold at least 32 bytes, got 31"),
        (0o600, b"x" * 31 + b"\n", "must hold at least 32 bytes, got 31"),
    ],
)
def test_a_key_file_that_is_no_secret(key: Path, mode: int, content: bytes, message: str) -> None:
    key.write_bytes(content)
    key.chmod(mode)
    said = refused(shared_store="redis://127.0.0.1", shared_store_key_file=str(key))
    assert said.startswith("shared_store_key_file ") and message in said


def test_a_missing_key_file(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        said = refused(shared_store="redis://127.0.0.1", shared_store_key_file=str(path))
        assert said.startswith("shared_store_key_file cannot be read: ")


def test_the_end_of_a_line_is_no_part_of_the_key(key: Path) -> None:
    def secret() -> bytes:
        config = EngineConfig(shared_store="redis://[::1]", shared_store_key_file=str(key))
        address = read_address(config)
        assert address is not None
        return address.secret

    first = secret()
    key.write_bytes(first)
    assert secret() == first


def test_certificates_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    (tmp_path / "text").write_text("this is no certificate")
    for name in ("ssl_ca_certs", "ssl_certfile"):
        for file in ("none", "", "empty", "text"):
            said = refused(shared_store=f"rediss://127.0.0.1?{name}={tmp_path / file}")
            assert said.startswith(f"shared_store has a parameter {name!r} that cannot be used: ")
    said = refused(shared_store=f"rediss://127.0.0.1?ssl_keyfile={tmp_path / 'text'}")
    assert said == "shared_store has a parameter 'ssl_keyfile' without 'ssl_certfile'"


@pytest.mark.parametrize("module", ["redis", "redis.asyncio"])
def test_the_client_must_be_installed(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    said = refused(shared_store="redis://127.0.0.1")
    assert said.startswith("shared_store needs the package redis: pip install 'redis>=")


def test_nobody_is_asked_at_the_start() -> None:
    """What only the store can say may be another thing a minute later."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.settimeout(0)
        address = find_store(
            EngineConfig(shared_store=f"redis://127.0.0.1:{other.getsockname()[1]}")
        )
        assert address is not None
        with pytest.raises(BlockingIOError):
            other.accept()


def test_what_is_right_is_found_and_shown_without_the_password(
    store: StoreServer, key: Path
) -> None:
    url = f"valkey://:secret@127.0.0.1:{store.port}/1"
    config = EngineConfig(shared_store=url, shared_store_key_file=str(key))
    assert find_store(config) is not None
    text = render(make("demo", config))
    assert f"valkey://127.0.0.1:{store.port}/1, with a key; stable written" in text
    assert "secret" not in text
    assert find_store(EngineConfig()) is None
    assert find_store(EngineConfig(shared_store="x", enable_prefix_caching=False)) is None
