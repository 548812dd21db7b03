"""Connections that want to be kept for nothing: silent, slow, unread, and too many."""

from __future__ import annotations

import re
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from fake_engine import FakeEngine
from server_process import server_process
from serving import WAIT_SECONDS, RunningServer, connect, parse_events, running, wait_for

from vlm_serve.preprocess.text.tokenizer import Tokenizer
from vlm_serve.server.config import ServerConfig

CHAT = b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": %d, "stream": true}'
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: [::1]\r\nContent-Type: application/json\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: [::1]\r\n\r\n"
SMALL = ["--device", "cpu", "--cache-memory", "32MiB", "--max-model-len", "2048", "--threads", "1"]


SECOND = b"0\r\n\r\nGET /v1/models HTTP/1.1\r\nHost: [::1]\r\n\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(SECOND)
CHUNKED = b"Transfer-Encoding: chunked\r\n"


@contextmanager
def serving(tokenizer: Tokenizer, **options: float) -> Iterator[RunningServer]:
    with running(FakeEngine(tokenizer), ServerConfig(port=0, **options)) as server:  # type: ignore[arg-type]
        yield server


def raw(server: RunningServer, *pieces: bytes, pause: float = 0.0) -> socket.socket:
    """A connection that has sent something."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=30)
    try:
        for piece in pieces:
            connection.sendall(piece)
            time.sleep(pause)
    except OSError:
        connection.close()
        raise
    return connection


def until_closed(connection: socket.socket) -> bytes:
    """What the server still said before it closed the connection."""
    said = b""
    try:
        while data := connection.recv(65536):
            said += data
    except ConnectionResetError:
        pass
    finally:
        connection.close()
    return said


@pytest.mark.parametrize(
    "said",
    [[b"GET"], [b"GET /health HTTP/1.1\r\nHost: [::1]\r\n"], [HEALTH, b"GET /heal"]],
    ids=["a word", "no end", "after an answer"],
)
def test_a_head_that_does_not_end_is_not_waited_for(
    tokenizer: Tokenizer, said: list[bytes]
) -> None:
    with serving(tokenizer, header_timeout=0.3) as server:
        answer = until_closed(raw(server, *said, pause=0.1))
        assert answer.endswith(b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\n"
                               b"Content-Length: 0\r\n\r\n")  # fmt: skip


def test_a_head_that_trickles_in_is_not_waited_for_either(tokenizer: Tokenizer) -> None:
    with serving(tokenizer, header_timeout=0.3) as server:
        with pytest.raises(OSError):
            raw(server, *[b"GET /health HTTP/1.1\r\n", *[b"X: y\r\n"] * 400], pause=0.02)
        # On a busy machine a whole head, too, may take longer than that.
        wait_for(lambda: server.client.get("/health").status_code == 200)


@pytest.mark.parametrize("said", [b"", HEALTH])
def test_an_idle_connection_is_closed(tokenizer: Tokenizer, said: bytes) -> None:
    with serving(tokenizer, keep_alive_timeout=1) as server:
        answer = until_closed(raw(server, said))
        assert (b"200 OK" in answer) == bool(said)


def test_what_is_written_is_sent_at_once(tokenizer: Tokenizer) -> None:
    """Else the first words of a stream wait until the client has acknowledged the head: 40 ms."""
    with serving(tokenizer) as server, raw(server, HEALTH) as client:
        assert client.recv(100).startswith(b"HTTP/1.1 200")
        (connection,) = server.server.connections._open
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_body_that_does_not_come_is_not_waited_for(tokenizer: Tokenizer) -> None:
    with serving(tokenizer, header_timeout=0.3) as server:
        answer = until_closed(connect(server, b'{"messages"', length=1000))
        assert answer.startswith(b"HTTP/1.1 408")
        wait_for(lambda: len(server.server.connections) == 0)


def test_a_slow_body_is_waited_for_while_it_keeps_its_rate(tokenizer: Tokenizer) -> None:
    """Longer than the first deadline, at more than the rate; then below it."""
    body = CHAT % 1 + b" " * 400
    length = b"Content-Length: %d\r\n\r\n" % len(body)
    with serving(tokenizer, header_timeout=1.0, min_body_rate=20) as server:
        pieces = [body[start : start + 40] for start in range(0, len(body), 40)]
        fast = raw(server, HEAD + length, *pieces, pause=0.15)
        assert fast.recv(100).startswith(b"HTTP/1.1 200")
        fast.close()
    with serving(tokenizer, header_timeout=0.3, min_body_rate=100_000) as server:
        slow = raw(server, HEAD + length, *pieces[:2], pause=0.05)
        assert until_closed(slow).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("started", [False, True])
def test_nonsense_behind_a_request_ends_it(
    tokenizer: Tokenizer, started: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(tokenizer) as server:
        server.engine.pause_after = 1 if started else 0
        body = CHAT % 5
        head = HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
        with raw(server, head, body) as connection:
            wait_for(lambda: len(server.engine.requests) == 1)
            (request,) = server.engine.requests.values()
            if started:
                assert connection.recv(100).startswith(b"HTTP/1.1 200")
            connection.sendall(b"nonsense" * 100)
            assert request.aborted.wait(WAIT_SECONDS)
        wait_for(lambda: server.service.requests.num_open == 0)
        server.engine.gate.set()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_an_early_refusal_is_read_by_a_client_that_sends_on(tokenizer: Tokenizer) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: [::1]\r\nContent-Type: text/plain\r\n"
    head += b"Connection: close\r\nContent-Length: 8000000\r\n\r\n"
    with serving(tokenizer) as server:
        for _ in range(5):
            connection = raw(server, head, bytes(8_000_000))
            answer = until_closed(connection)
            assert answer.startswith(b"HTTP/1.1 415"), answer[:100]
        wait_for(lambda: len(server.server.connections) == 0)


def test_the_rest_of_a_refused_body_is_not_read_for_ever(tokenizer: Tokenizer) -> None:
    head = b"POST /nowhere HTTP/1.1\r\nHost: [::1]\r\nTransfer-Encoding: chunked\r\n\r\n"
    with serving(tokenizer, header_timeout=0.3, min_body_rate=1) as server:
        connection = raw(server, head)
        with pytest.raises(OSError):
            for _ in range(2000):
                connection.sendall(b"4\r\naaaa\r\n")
                time.sleep(0.01)
        connection.close()


def deaf(server: RunningServer, *pieces: bytes) -> socket.socket:
    """A client that sends as much as it can and never reads."""
    host, port = server.url.removeprefix("http://").split(":")
    client = socket.socket()
    client.settimeout(30)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((host, int(port)))
    try:
        for piece in pieces:
            client.sendall(piece)
    except OSError:
        pass  # it has been closed
    return client


def test_a_client_that_does_not_read_its_stream_loses_its_seat(tokenizer: Tokenizer) -> None:
    with serving(tokenizer, send_timeout=0.5) as server:
        server.engine.answer = "word " * 60_000
        body = CHAT % 60_000
        head = HEAD
        with deaf(server, head + b"Content-Length: %d\r\n\r\n" % len(body) + body):
            wait_for(lambda: server.service.requests.num_open == 1)
            wait_for(lambda: server.service.requests.num_open == 0)
            wait_for(lambda: len(server.server.connections) == 0)


def test_a_client_that_does_not_read_its_answers_is_closed(tokenizer: Tokenizer) -> None:
    """No request is open then; what waits to be sent must not wait for ever."""
    with (
        serving(tokenizer, send_timeout=0.5) as server,
        deaf(server, *[b"GET /openapi.json HTTP/1.1\r\nHost: [::1]\r\n\r\n"] * 1000),
    ):
        wait_for(lambda: len(server.server.connections) == 0)


def test_the_longest_idle_connection_makes_room(tokenizer: Tokenizer) -> None:
    with serving(tokenizer, max_connections=3) as server, ExitStack() as stack:
        server.engine.gate.clear()
        busy = stack.enter_context(connect(server, CHAT % 2))
        wait_for(lambda: server.service.requests.num_open == 1)
        first = stack.enter_context(raw(server, b"GET"))
        stack.enter_context(raw(server, b"GET"))
        wait_for(lambda: len(server.server.connections) == 3)
        for _ in range(4):
            assert httpx.get(server.url + "/health", timeout=60, trust_env=False).status_code == 200
        assert until_closed(first) == b""
        server.engine.gate.set()
        answer = b""
        while b"[DONE]" not in answer:
            answer += busy.recv(65536)


def test_silent_connections_up_to_the_limit_of_files_do_not_shut_others_out(
    checkpoint: Path, tmp_path: Path
) -> None:
    """Even where the limit is lowered under the running server, which then cannot accept any."""
    log = tmp_path / "log"
    with (
        log.open("w") as file,
        server_process(str(checkpoint), *SMALL, "--block-size", "16", log=file) as server,
        ExitStack() as stack,
    ):
        host, port = server.url.removeprefix("http://").split(":")
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (120, 120))
        for _ in range(200):
            stack.enter_context(socket.create_connection((host, int(port)), timeout=30))
        for _ in range(5):
            answer = httpx.get(server.url + "/health", timeout=30, trust_env=False)
            assert answer.status_code == 200
        wait_for(lambda: "no connection can be accepted" in log.read_text())
        time.sleep(2)
        assert len(log.read_text()) < 20_000


def test_few_descriptors_leave_room_for_few_connections(checkpoint: Path, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    log = tmp_path / "log"
    with log.open("w") as file, ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, before[1]))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        arguments = [str(checkpoint), *SMALL, "--block-size", "16"]
        server = stack.enter_context(server_process(*arguments, log=file))
        soft, _ = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
        assert soft >= min(1024, before[1]), "the server raises the limit as far as it needs"


@pytest.mark.parametrize("lengths", [LENGTH + CHUNKED, CHUNKED + LENGTH])
@pytest.mark.parametrize(
    ("line", "host", "status"),
    [
        (b"GET /health", b"[::1]", 200),
        (b"POST /tokenize", b"[::1]", 415),
        (b"POST /v1/chat/completions", b"[::1]", 401),
        (b"POST /health", b"evil.test", 403),
        (b"GET /nowhere", b"[::1]", 404),
    ],
)
@pytest.mark.parametrize("before", [b"", HEALTH])
def test_nothing_behind_a_body_of_two_lengths_is_a_request(
    tokenizer: Tokenizer, line: bytes, host: bytes, status: int, lengths: bytes, before: bytes
) -> None:
    """A proxy may go by the other length and take it for the rest of the body."""
    config = ServerConfig(port=0, api_key=("key",) if status == 401 else ())
    with running(FakeEngine(tokenizer), config) as server:
        head = line + b" HTTP/1.1\r\nHost: " + host + b"\r\n" + lengths + b"\r\n"
        said = until_closed(raw(server, before + head + SECOND))
    answers = [int(each[:3]) for each in said.split(b"HTTP/1.1 ")[1:]]
    assert answers == [200] * bool(before) + [status]
    assert said.lower().count(b"connection: close") == 1


def test_one_length_keeps_the_connection(tokenizer: Tokenizer) -> None:
    chunked = b"GET /health HTTP/1.1\r\nHost: [::1]\r\n" + CHUNKED + b"\r\n0\r\n\r\n"
    with serving(tokenizer) as server:
        connection = raw(server, chunked + HEALTH)
        said = b""
        while said.count(b"HTTP/1.1 200") < 2:
            said += connection.recv(65536)
        connection.close()
    assert b"connection: close" not in said.lower()


def asked(version: bytes, path: bytes = b"/v1/chat/completions", close: bool = True) -> bytes:
    body = CHAT % 9
    head = b"POST %b HTTP/%b\r\nHost: [::1]\r\nContent-Type: application/json\r\n" % (path, version)
    head += b"X-Request-Id: one\r\n" + b"Connection: close\r\n" * close
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


def unframed(said: bytes) -> tuple[bytes, bytes]:
    """The body of an answer in chunks, and what follows it."""
    body = b""
    while True:
        size, _, rest = said.partition(b"\r\n")
        length = int(size, 16)
        chunk, said = rest[:length], rest[length:]
        assert len(chunk) == length and said.startswith(b"\r\n")
        body, said = body + chunk, said[2:]
        if not length:
            return body, said


def test_a_stream_is_framed_as_its_client_knows(tokenizer: Tokenizer) -> None:
    """In chunks for HTTP/1.1, also if another request is waiting; up to the end for HTTP/1.0."""
    masked = re.compile(rb'"created":\d+')
    with serving(tokenizer) as server:
        old = until_closed(raw(server, asked(b"1.0")))
        head, _, plain = old.partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head.lower() and plain.startswith(b"data: {")
        assert plain.endswith(b"data: [DONE]\n\n") and plain.count(b"data: {") > 5
        new = until_closed(raw(server, asked(b"1.1", close=False) + asked(b"1.1")))
        for _ in range(2):
            head, _, new = new.partition(b"\r\n\r\n")
            assert b"\r\ntransfer-encoding: chunked" in head.lower()
            body, new = unframed(new)
            assert masked.sub(b"", body) == masked.sub(b"", plain)
        assert new == b""


def test_head_has_no_body_and_keeps_the_connection(tokenizer: Tokenizer) -> None:
    head = b"HEAD /v1/models HTTP/1.1\r\nHost: [::1]\r\n\r\n"
    last = b"GET /health HTTP/1.1\r\nHost: [::1]\r\nConnection: close\r\n\r\n"
    with serving(tokenizer) as server:
        said = until_closed(raw(server, head, head, last))
    assert said.count(b"HTTP/1.1 200") == 3
    assert said.count(b"\r\n\r\nHTTP/1.1 200") == 2


def test_a_stream_whose_events_do_not_leave_tells_more_in_each(tokenizer: Tokenizer) -> None:
    """Nothing of it is lost, and others go on meanwhile."""
    with serving(tokenizer, send_timeout=60.0) as server:
        server.engine.answer, server.engine.paced = "one word and " * 20_000, False
        body = CHAT % 4000
        head = HEAD + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(body)
        host, port = server.url.removeprefix("http://").split(":")
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((host, int(port)))
            client.sendall(head + body)
            wait_for(lambda: not server.engine.requests)
            assert server.client.get("/health").status_code == 200
            client.settimeout(WAIT_SECONDS)
            said = b"".join(iter(lambda: client.recv(1 << 16), b""))
    told, rest = unframed(said.partition(b"\r\n\r\n")[2])
    events = parse_events(told.decode())
    deltas = [event["choices"][0]["delta"] for event in events]
    tokens = tokenizer.encode_plain("one word and " * 20_000)[:4000]
    expected = "".join(tokenizer.token_bytes(token).decode() for token in tokens)
    assert rest == b"" and "".join(each.get("content", "") for each in deltas) == expected
    assert len(events) < 3000
    assert events[-1]["choices"][0]["finish_reason"] == "length"
