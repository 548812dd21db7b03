"""TLS: handshakes, certificates, and files that cannot be used."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from serving import RunningServer, check_chat, running, wait_for

from vlm_serve.errors import ConfigError
from vlm_serve.preprocess.text.tokenizer import Tokenizer
from vlm_serve.server.config import ServerConfig
from vlm_serve.server.http.serving import tls_context


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    made, key = tmp_path / "made.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
        + ["-nodes", "-keyout", str(key), "-out", str(made), "-days", "2", "-subj", "/CN=localhost"]
        + ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    return made, key


def test_https(tokenizer: Tokenizer, certificate: tuple[Path, Path]) -> None:
    made, key = map(str, certificate)
    config = ServerConfig(port=0, ssl_certfile=made, ssl_keyfile=key, max_body_size=50_000)
    with running(FakeEngine(tokenizer), config) as server:
        url = server.url.replace("http:", "https:")
        with httpx.Client(base_url=url, verify=ssl.create_default_context(cafile=made)) as client:
            check_chat(client)
            # A body that is refused before it has been read.
            for _ in range(2):
                refused = client.post("/v1/chat/completions", content=b"x" * 3_000_000)
                assert refused.status_code == 415 or refused.status_code == 413
            assert client.get("/health").status_code == 200
        with pytest.raises(httpx.HTTPError):
            httpx.get(server.url + "/health", trust_env=False)


def test_a_client_that_does_not_shake_hands_is_dropped(
    tokenizer: Tokenizer, certificate: tuple[Path, Path]
) -> None:
    made, key = map(str, certificate)
    config = ServerConfig(port=0, ssl_certfile=made, ssl_keyfile=key, header_timeout=0.5)
    with running(FakeEngine(tokenizer), config) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as silent:
            assert silent.recv(1) == b""


def silent_client(server: RunningServer, said: bytes = b"") -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=30)
    connection.sendall(said)
    return connection


def is_closed(connection: socket.socket) -> bool:
    """True once the server has closed a connection."""
    try:
        connection.setblocking(False)
        return connection.recv(100) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01\x02\x00\x01"], ids=["silent", "half a hello"])
def test_handshakes_count_as_connections(
    tokenizer: Tokenizer, certificate: tuple[Path, Path], said: bytes
) -> None:
    """The longest silent client makes room: clients that speak TLS are never shut out."""
    made, key = map(str, certificate)
    config = ServerConfig(
        port=0, ssl_certfile=made, ssl_keyfile=key, header_timeout=60, max_connections=5
    )
    with running(FakeEngine(tokenizer), config) as server, ExitStack() as stack:
        connections = server.server.connections
        silent = [stack.enter_context(silent_client(server, said)) for _ in range(20)]
        wait_for(lambda: sum(map(is_closed, silent)) >= 15)
        assert len(connections) == 5 and not any(map(is_closed, silent[15:]))
        url = server.url.replace("http:", "https:")
        context = ssl.create_default_context(cafile=made)
        for _ in range(3):
            with httpx.Client(base_url=url, verify=context) as client:
                check_chat(client)
            assert len(connections) <= 5
        assert is_closed(silent[15]) and not is_closed(silent[-1])
    assert all(map(is_closed, silent))


def test_what_is_being_answered_is_not_closed_for_a_handshake(
    tokenizer: Tokenizer, certificate: tuple[Path, Path]
) -> None:
    made, key = map(str, certificate)
    config = ServerConfig(port=0, ssl_certfile=made, ssl_keyfile=key, max_connections=1)
    with running(FakeEngine(tokenizer), config) as server:
        context = ssl.create_default_context(cafile=made)
        server.engine.gate.clear()
        plain = silent_client(server)
        with plain, context.wrap_socket(plain, server_hostname="localhost") as busy:
            busy.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: [::1]\r\nConnection: close\r\n"
                b"Content-Type: application/json\r\nContent-Length: 16\r\n\r\n"
                b'{"prompt": "hi"}'
            )
            wait_for(lambda: server.service.requests.num_open == 1)
            with silent_client(server) as silent:
                wait_for(lambda: is_closed(silent))
            server.engine.gate.set()
            answer = b""
            while b"Hello" not in answer and (data := busy.recv(65536)):
                answer += data
            assert answer.startswith(b"HTTP/1.1 200 OK") and b"Hello" in answer


def test_a_failed_handshake_leaves_nothing(
    tokenizer: Tokenizer, certificate: tuple[Path, Path]
) -> None:
    made, key = map(str, certificate)
    config = ServerConfig(port=0, ssl_certfile=made, ssl_keyfile=key)
    with running(FakeEngine(tokenizer), config) as server:
        with silent_client(server, b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n") as plain:
            wait_for(lambda: is_closed(plain))
        with silent_client(server):
            wait_for(lambda: len(server.server.connections) == 1)
        wait_for(lambda: len(server.server.connections) == 0)


def test_a_request_that_comes_with_the_end_of_the_handshake(
    tokenizer: Tokenizer, certificate: tuple[Path, Path]
) -> None:
    """As of TLS 1.3, it may arrive in one packet with the client's last word of the handshake."""
    made, key = map(str, certificate)
    config = ServerConfig(port=0, ssl_certfile=made, ssl_keyfile=key)
    with running(FakeEngine(tokenizer), config) as server:
        host, port = server.url.removeprefix("http://").split(":")
        for _ in range(5):
            incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            context = ssl.create_default_context(cafile=made)
            tls = context.wrap_bio(incoming, outgoing, server_hostname="localhost")
            with socket.create_connection((host, int(port)), timeout=30) as connection:
                while True:
                    try:
                        tls.do_handshake()
                        break
                    except ssl.SSLWantReadError:
                        connection.sendall(outgoing.read())
                        incoming.write(connection.recv(65536))
                tls.write(b"GET /health HTTP/1.1\r\nHost: [::1]\r\n\r\n")
                connection.sendall(outgoing.read())
                answer = b""
                while b"ok" not in answer:
                    incoming.write(connection.recv(65536))
                    with suppress(ssl.SSLWantReadError):
                        while data := tls.read(65536):
                            answer += data
                assert answer.startswith(b"HTTP/1.1 200 OK")


def test_clients_need_a_certificate_if_authorities_are_named(
    tokenizer: Tokenizer, certificate: tuple[Path, Path]
) -> None:
    made, key = map(str, certificate)
    config = ServerConfig(port=0, ssl_certfile=made, ssl_keyfile=key, ssl_ca_certs=made)
    with running(FakeEngine(tokenizer), config) as server:
        url = server.url.replace("http:", "https:") + "/health"
        context = ssl.create_default_context(cafile=made)
        with httpx.Client(verify=context) as client, pytest.raises(httpx.HTTPError):
            client.get(url)
        context = ssl.create_default_context(cafile=made)
        context.load_cert_chain(made, key)
        with httpx.Client(verify=context) as client:
            assert client.get(url).status_code == 200


def test_an_encrypted_key(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    made, key = certificate
    locked = tmp_path / "locked.pem"
    subprocess.run(
        ["openssl", "pkey", "-in", key, "-out", locked, "-aes256", "-passout", "pass:word"],
        check=True, capture_output=True,
    )  # fmt: skip
    files: dict[str, Any] = {"ssl_certfile": str(made), "ssl_keyfile": str(locked)}
    assert tls_context(ServerConfig(**files, ssl_keyfile_password="word"))
    passwords: list[dict[str, Any]] = [{}, {"ssl_keyfile_password": "wrong"}]
    for wrong in passwords:
        with pytest.raises(ConfigError, match="with the right ssl_keyfile_password") as caught:
            tls_context(ServerConfig(**files, **wrong))
        assert "wrong" not in caught.value.message


def test_bad_files_for_tls_are_named(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    made, key = map(str, certificate)
    text = tmp_path / "text"
    text.write_text("no certificate")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"ssl_certfile": "/none"}, "ssl_certfile: there is no file /none"),
        ({"ssl_certfile": made, "ssl_keyfile": "/none"}, "ssl_keyfile: there is no file"),
        ({"ssl_certfile": made}, "must be a certificate and its private key"),
        ({"ssl_certfile": str(text), "ssl_keyfile": key}, "must be a certificate"),
        ({"ssl_certfile": made, "ssl_keyfile": key, "ssl_ca_certs": str(text)}, "ssl_ca_certs"),
    ]
    for options, named in cases:
        with pytest.raises(ConfigError, match=named):
            tls_context(ServerConfig(**options))
    for name in ("ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs"):
        lonely: dict[str, Any] = {name: key}
        with pytest.raises(ConfigError, match=f"{name} needs ssl_certfile"):
            ServerConfig(**lonely)
