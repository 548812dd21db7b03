"""What requests hold is counted before it is read, and given back as soon as nobody needs it."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import tracemalloc
from collections.abc import Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from hostile_files import data_url, image_of
from serving import RunningServer, chat_body, connect, running, wait_for

from vlm_serve.engine.engine import Engine
from vlm_serve.options.config import EngineConfig
from vlm_serve.preprocess.text.tokenizer import Tokenizer
from vlm_serve.server.config import ServerConfig
from vlm_serve.server.http.body import count_json, parse_json
from vlm_serve.server.http.request_memory import (
    BodyCost,
    RequestMemory,
    Share,
)
from vlm_serve.server.workers import LARGE_REQUEST_BYTES

MIB = 1 << 20
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: [::1]\r\nContent-Type: application/json\r\n"


def large_body(size: int = 4 * MIB) -> bytes:
    return json.dumps(chat_body("hi", metadata={"x": "y" * size})).encode()


class Upload:
    """A client that sends a request in a thread of its own, as fast as it is read."""

    def __init__(self, server: RunningServer, body: bytes, *, chunked: bool = False) -> None:
        self.connection = connect(server, b"", length=len(body)) if not chunked else None
        if self.connection is None:
            host, port = server.url.removeprefix("http://").split(":")
            self.connection = socket.create_connection((host, int(port)), timeout=30)
            body = HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(body) + body
            body += b"\r\n0\r\n\r\n"
        self.sent = False
        self._body = body
        self._thread = threading.Thread(target=self._send)
        self._thread.start()

    def _send(self) -> None:
        assert self.connection is not None
        self.connection.settimeout(30)
        try:
            self.connection.sendall(self._body)
            self.sent = True
        except OSError:
            pass

    def leave(self) -> None:
        assert self.connection is not None
        self.connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self.connection.close()

    def answer(self) -> bytes:
        assert self.connection is not None
        return self.connection.recv(12)


async def _soon(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    task = asyncio.ensure_future(work)
    await asyncio.sleep(0)
    return task


def test_who_finds_no_room_waits_and_one_of_them_is_favoured() -> None:
    async def scene() -> None:
        memory = RequestMemory(1000)
        first, second, third, small = (Share(memory) for _ in range(4))
        await first.grow(700)
        favoured = await _soon(second.grow(700))
        waiting = await _soon(third.grow(700))
        assert (favoured.done(), waiting.done()) == (True, False)
        assert memory.held == 1400
        also_waiting = await _soon(small.grow(10))
        assert not also_waiting.done(), "there is no room for a small one either"
        second.shrink(100)
        await asyncio.sleep(0)
        assert waiting.done(), "the next one is favoured"
        first.leave()
        await asyncio.sleep(0)
        assert also_waiting.done()
        for share in (second, third, small):
            share.leave()
        assert memory.held == 0

    asyncio.run(scene())


def test_large_ones_leave_room_for_small_ones() -> None:
    async def scene() -> None:
        memory = RequestMemory(1000)
        large, small = Share(memory), Share(memory)
        await large.grow(740)
        assert not Share(memory).fits(100)
        assert small.fits(15)
        await small.grow(15)
        assert memory.held == 755

    asyncio.run(scene())


def test_who_stops_waiting_is_forgotten() -> None:
    async def scene() -> None:
        memory = RequestMemory(100)
        shares = [Share(memory) for _ in range(3)]
        await shares[0].grow(70)
        await shares[1].grow(100)
        waiting = await _soon(shares[2].grow(100))
        waiting.cancel()
        await asyncio.wait({waiting})
        shares[2].leave()
        assert memory.held == 170
        for share in shares[:2]:
            share.leave()
        assert memory.held == 0

    asyncio.run(scene())


def test_one_request_at_a_time_is_beyond_the_budget() -> None:
    """Also when those before it hold less than they did, but have not ended."""

    async def scene() -> None:
        memory = RequestMemory(100)
        first, second, third = (Share(memory) for _ in range(3))
        await first.grow(250)
        first.shrink(80)
        await second.grow(250)
        second.shrink(80)
        waiting = await _soon(third.grow(250))
        assert not waiting.done()
        await second.grow(90)
        first.leave()
        await waiting
        assert memory.held == 340

    asyncio.run(scene())


@pytest.mark.parametrize("before", [(1 << 18) - 1, 1 << 18, 5])
def test_a_wide_character_is_found_wherever_pieces_begin(before: int) -> None:
    text = b"a" * before + b"\\u00e9" + b"," * 7
    assert count_json(text) == BodyCost(len(text), wide=True, values=8)
    assert not count_json(text.replace(b"\\", b"/")).wide


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_has_no_room_is_not_read(tokenizer: Tokenizer, chunked: bool) -> None:
    config = ServerConfig(port=0, max_request_memory="16MiB", max_body_size="16MiB")
    with running(FakeEngine(tokenizer), config) as server:
        server.engine.gate.clear()
        body = large_body(12 * MIB)
        uploads = [Upload(server, body, chunked=chunked) for _ in range(4)]
        wait_for(lambda: server.service.requests.num_open > 0)
        assert server.client.get("/load").json()["request_memory_bytes"] < (16 + 3 * 14) * MIB
        assert sum(upload.sent for upload in uploads) < 3
        server.engine.gate.set()
        assert [upload.answer() for upload in uploads] == [b"HTTP/1.1 200"] * 4
        for upload in uploads:
            upload.leave()
        wait_for(lambda: server.service.admission.memory.held == 0)


def test_large_bodies_hold_up_no_question(tokenizer: Tokenizer) -> None:
    config = ServerConfig(port=0, max_request_memory="16MiB", max_body_size="64MiB")
    with running(FakeEngine(tokenizer), config) as server, ExitStack() as stack:
        for _ in range(8):  # they have said how much will come, and sent a part of it
            stack.enter_context(connect(server, b" " * 100_000, length=60 * MIB))
        wait_for(lambda: server.service.admission.memory.held > 0)
        assert server.chat().status_code == 200
        assert server.service.admission.memory.held <= 16 * MIB, (
            "who has sent little is promised little"
        )


@pytest.mark.parametrize("body", [b"", b'{"x": "', b"not json"])
def test_nothing_is_held_after_a_refusal(tokenizer: Tokenizer, body: bytes) -> None:
    with running(FakeEngine(tokenizer)) as server:
        with connect(server, body, length=len(body) + 5) as connection:
            connection.sendall(b"x" * 5)
            assert connection.recv(12) == b"HTTP/1.1 400"
        wait_for(lambda: server.service.admission.memory.held == 0)


def test_the_body_of_a_client_that_has_left_is_freed(tokenizer: Tokenizer) -> None:
    """While every thread that prepares large requests is busy with other work."""
    with running(FakeEngine(tokenizer), ServerConfig(port=0, preprocess_threads=1)) as server:
        gate, calls = server.engine.preprocessor.gate, server.engine.preprocessor.calls
        gate.clear()
        stuck = connect(server, json.dumps(chat_body("hi" * LARGE_REQUEST_BYTES)).encode())
        wait_for(lambda: len(calls) == 1)
        held = server.service.admission.memory.held
        tracemalloc.start()
        try:
            text = json.dumps(chat_body("x" * (2 * MIB))).encode()
            uploads = [Upload(server, text) for _ in range(6)]
            wait_for(lambda: server.service.requests.num_open == 7)
            assert server.service.admission.memory.held >= 6 * 2 * MIB
            assert tracemalloc.get_traced_memory()[0] > 6 * 2 * MIB
            for upload in uploads:
                upload.leave()
            del uploads, upload
            wait_for(lambda: server.service.admission.memory.held == held)
            wait_for(lambda: server.service.requests.num_open == 1)
            wait_for(lambda: tracemalloc.get_traced_memory()[0] < 6 * MIB)
        finally:
            tracemalloc.stop()
        stuck.close()
        wait_for(lambda: server.service.requests.num_open == 0)
        assert server.service.admission.memory.held == held, "its work still runs"
        gate.set()
        wait_for(lambda: server.service.admission.memory.held == 0)


def test_a_short_question_waits_for_no_long_one(tokenizer: Tokenizer) -> None:
    with running(FakeEngine(tokenizer), ServerConfig(port=0, preprocess_threads=1)) as server:
        gate, calls = server.engine.preprocessor.gate, server.engine.preprocessor.calls
        gate.clear()
        long = json.dumps(chat_body("hi" * LARGE_REQUEST_BYTES)).encode()
        with connect(server, long), connect(server, long):
            wait_for(lambda: server.service.requests.num_open == 2)
            with connect(server, json.dumps(chat_body("hi")).encode()):
                wait_for(lambda: len(calls) == 2)
        gate.set()
        wait_for(lambda: server.service.admission.memory.held == 0)


BODIES = {
    "text": b'{"x": "' + b"y" * MIB + b'"}',
    "wide text": b'{"x": "' + b"y" * MIB + "\U0001f600".encode() + b'"}',
    "escaped": b'{"x": "' + b"y" * MIB + b'\\ud83d\\ude00"}',
    "numbers": b'{"x": [' + b"1000," * 100_000 + b"1]}",
    "floats": b'{"x": [' + b".5,".join([b"1"] * 100_000) + b"]}",
    "lists": b'{"x": [' + b"[]," * 100_000 + b"[]]}",
    "objects": b'{"x": [' + b'{"a":1},' * 100_000 + b"{}]}",
    "keys": b'{"x": {' + b",".join(b'"%d":0' % number for number in range(100_000)) + b"}}",
    "short texts": b'{"x": [' + b",".join(b'"%d"' % number for number in range(100_000)) + b"]}",
}


@pytest.mark.parametrize("name", BODIES)
def test_what_is_counted_is_what_json_becomes(name: str) -> None:
    body = BODIES[name]
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        value = parse_json(body)
        after, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    cost = count_json(body)
    assert most - before + len(body) <= cost.to_parse() * 1.05
    assert after - before <= cost.when_parsed(value) * 1.05


def test_a_prompt_is_counted_with_its_pixels(checkpoint: Path) -> None:
    options = EngineConfig(
        device="cpu", block_size=16, cache_memory="32MiB", max_model_len=2048, threads=1
    )
    engine = Engine.from_checkpoint(str(checkpoint), options)
    seen: list[int] = []
    submit = engine.submit
    with running(engine) as server, pytest.MonkeyPatch.context() as patch:

        def spying(*arguments: Any, **named: Any) -> str:
            seen.append(server.service.admission.memory.held)
            return submit(*arguments, **named)

        patch.setattr(engine, "submit", spying)
        url = data_url("image/png", image_of("PNG", 448, 448))
        content = [{"type": "image_url", "image_url": {"url": url}}]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
        assert server.post("/v1/chat/completions", body).status_code == 200
        assert seen[0] > 448 * 448 * 3
        wait_for(lambda: server.service.admission.memory.held == 0)


def test_what_was_held_goes_back_to_the_system(tokenizer: Tokenizer) -> None:
    with running(FakeEngine(tokenizer)) as server:
        text = json.dumps(chat_body("hi", metadata={"x": "y" * (20 * MIB)}))
        for _ in range(2):
            response = server.client.post(
                "/v1/chat/completions",
                content=text,
                headers={"Content-Type": "application/json"},
            )
            assert response.status_code == 200
        wait_for(lambda: server.service.trimmer.num_trims >= 1)
        assert server.service.trimmer.num_trims <= 2


def test_a_request_without_a_body_holds_nothing_of_the_one_before(tokenizer: Tokenizer) -> None:
    """On the same connection, whose context it has."""
    with running(FakeEngine(tokenizer)) as server:
        assert server.chat().status_code == 200
        headers = {"Content-Type": "application/json"}
        response = server.client.post("/v1/chat/completions", content=b"", headers=headers)
        assert response.status_code == 400
        wait_for(lambda: server.service.admission.memory.held == 0)
