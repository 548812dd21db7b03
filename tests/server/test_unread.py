"""Streams whose clients are slow to read, over HTTP."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from serving import WAIT_SECONDS, RunningServer, running, wait_for

from vlm_serve.engine.engine import Engine
from vlm_serve.engine.requests.outputs import Delta, FinishReason, PromptProgress
from vlm_serve.options.config import EngineConfig
from vlm_serve.server.config import ServerConfig
from vlm_serve.server.unread import UnreadDeltas


def delta(text: str = "", reason: FinishReason | None = None) -> Delta:
    return Delta(0, text, finish_reason=reason)


def texts(deltas: Sequence[Delta]) -> str:
    return "".join(each.text for each in deltas)


def test_a_queue_tells_of_the_limit_once_and_of_its_end() -> None:
    told: list[bool] = []

    async def run() -> None:
        queue = UnreadDeltas(4)
        queue.on_change = told.append
        for text in "abcdef":
            queue.put(delta(text))
        assert told == [True]
        assert texts(await queue.take()) == "abcdef"
        assert told == [True, False]

    asyncio.run(run())


def test_of_a_prompts_progress_the_latest_waits_for_its_reader() -> None:
    async def run() -> None:
        queue, full = UnreadDeltas(4), list[bool]()
        queue.on_change = full.append
        for tokens in range(9):
            queue.put(Delta(0, progress=PromptProgress(tokens, 0.0)))
        for text in "ab":
            queue.put(delta(text))
        told = await queue.take()
        assert told[0].progress == PromptProgress(8, 0.0)
        assert len(told) == 3 and texts(told) == "ab"
        assert not full, "no answer is suspended for it"

    asyncio.run(run())


def test_what_comes_within_the_interval_is_taken_together_and_the_end_at_once() -> None:
    async def run() -> None:
        loop, hour = asyncio.get_running_loop(), UnreadDeltas(99, 3600.0)
        hour.put(delta("first"))
        assert texts(await hour.take()) == "first"
        taking = asyncio.ensure_future(hour.take())
        for text in "abc":
            hour.put(delta(text))
            await asyncio.sleep(0)
        assert not taking.done()
        hour.put(delta("d", "stop"))
        assert texts(await taking) == "abcd"

        moment = UnreadDeltas(99, 0.01)
        taken = [(loop.time(), "")]
        for number in range(40):
            moment.put(delta(chr(97 + number % 26)))
            if number % 10 == 9:
                taken.append((loop.time(), texts(await moment.take())))
        assert [len(text) for _, text in taken] == [0, 10, 10, 10, 10]

    asyncio.run(run())


def test_a_waiting_readers_deltas_may_be_taken_directly() -> None:
    """Not while it does not wait, not where that refuses; an error of it is the reader's."""
    direct: list[str] = []

    def take(deltas: list[Delta]) -> bool:
        if deltas[-1].text == "bad":
            raise RuntimeError("no such text")
        if deltas[-1].finish_reason is not None:
            return False
        direct.append(texts(deltas))
        return True

    async def run() -> None:
        queue = UnreadDeltas(99)
        queue.direct = take
        queue.put(delta("a"))
        assert texts(await queue.take()) == "a" and not direct
        taking = asyncio.ensure_future(queue.take())
        await asyncio.sleep(0)
        queue.add(delta("b"))
        queue.add(delta("c"))
        queue.settle()
        queue.put(delta("d"))
        assert direct == ["bc", "d"] and not taking.done()
        queue.put(delta("e", "stop"))
        queue.put(delta("f"))
        assert texts(await taking) == "ef" and direct == ["bc", "d"]
        taking = asyncio.ensure_future(queue.take())
        await asyncio.sleep(0)
        queue.put(delta("bad"))
        with pytest.raises(RuntimeError, match="no such text"):
            await taking

    asyncio.run(run())


@contextmanager
def serving(checkpoint: Path, seats: int) -> Iterator[RunningServer]:
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        block_size=16,
        cache_memory="32MiB",
        max_model_len=2048,
        max_num_seqs=seats,
        threads=1,
        speculative="off",
    )
    engine = Engine.from_checkpoint(str(checkpoint), config)
    with running(engine, ServerConfig(port=0, idle_check=False, send_timeout=600.0)) as server:
        yield server
    engine.close()


FIELDS: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 1000,
    "ignore_eos": True,
    "seed": 1,
    "logprobs": True,
}


def ask(server: RunningServer, client: socket.socket) -> None:
    """Ask for a stream of `FIELDS` with many alternatives, of which little fits on the way."""
    body = json.dumps(FIELDS | {"stream": True, "top_logprobs": 20}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((host, int(port)))
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: [::1]\r\nConnection: close\r\n"
    head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    client.sendall(head + body)


def rest_of(client: socket.socket) -> dict[str, str]:
    """Read the rest of a stream, which must be whole, and return its text and thought."""
    client.settimeout(WAIT_SECONDS)
    read = b"".join(iter(lambda: client.recv(1 << 16), b""))
    assert b"data: [DONE]" in read
    assert read.count(b'"logprob":') == 1000 * 21
    lines = [line for line in read.split(b"\n") if line.startswith(b"data: {")]
    events = [json.loads(line.removeprefix(b"data: ")) for line in lines]
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    return {
        name: "".join(delta.get(name) or "" for delta in deltas)
        for name in ("content", "reasoning_content")
    }


def whole(server: RunningServer) -> dict[str, str]:
    """Return the text and the thought of the same answer without a stream."""
    message = server.post("/v1/chat/completions", FIELDS).json()["choices"][0]["message"]
    return {name: message.get(name) or "" for name in ("content", "reasoning_content")}


@pytest.mark.sweep
def test_a_stream_that_nobody_reads_gives_up_its_seat(checkpoint: Path) -> None:
    """There is one seat; the other request has the same tenant."""
    with serving(checkpoint, 1) as server:
        with socket.socket() as client:
            ask(server, client)
            wait_for(lambda: server.engine.stats()["num_unread"] == 1)
            wait_for(lambda: server.engine.num_running == 0)
            assert server.chat(max_tokens=4).status_code == 200
            assert server.engine.stats()["num_unread"] == 1
            told = rest_of(client)
        assert told == whole(server)
        assert server.engine.stats()["num_unread"] == 0


@pytest.mark.sweep
def test_hundreds_of_slow_readers_stop_nobody_and_lose_nothing(checkpoint: Path) -> None:
    """Every tenth reads in the end, the others leave."""
    with serving(checkpoint, 16) as server, ExitStack() as stack:
        clients = [stack.enter_context(socket.socket()) for _ in range(200)]
        for number, client in enumerate(clients):
            ask(server, client)
            if number % 40 == 39:
                assert server.chat(max_tokens=4).status_code == 200
        wait_for(lambda: server.engine.stats()["num_unread"] == len(clients))
        assert server.chat(max_tokens=4).status_code == 200
        for number, client in enumerate(clients):
            if number % 10:
                client.close()
        expected = whole(server)
        with ThreadPoolExecutor(8) as readers:
            for told in readers.map(rest_of, clients[::10]):
                assert told == expected
        wait_for(lambda: server.service.requests.num_open == 0)
        wait_for(lambda: server.service.admission.memory.held == 0)
        assert server.service.admission.open_tokens == 0
        assert server.engine.stats()["num_unread"] == 0
