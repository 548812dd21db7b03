"""Overload, keys, health, draining and the end."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from serving import WAIT_SECONDS, RunningServer, chat_body, running, wait_for

from vlm_serve.errors import ConfigError
from vlm_serve.options.config import EngineConfig
from vlm_serve.preprocess.text.tokenizer import Tokenizer
from vlm_serve.server.config import ServerConfig
from vlm_serve.server.http.serving import listen
from vlm_serve.server.main import make_server
from vlm_serve.server.upkeep import IDLE_CHECK_DELAY_SECONDS


class Background:
    """A chat request in a thread of its own."""

    def __init__(self, server: RunningServer, **fields: Any) -> None:
        self.response: httpx.Response | None = None

        def ask() -> None:
            self.response = server.chat(**fields)

        self.thread = threading.Thread(target=ask)
        self.thread.start()

    def result(self) -> httpx.Response:
        self.thread.join(WAIT_SECONDS)
        assert self.response is not None
        return self.response


@pytest.fixture
def engine(tokenizer: Tokenizer) -> Iterator[FakeEngine]:
    engine = FakeEngine(
        tokenizer, EngineConfig(block_size=16, max_num_seqs=1, max_num_batched_tokens=64)
    )
    yield engine
    engine.close()


def test_the_url_is_announced_once_it_answers(engine: Any) -> None:
    config = ServerConfig(port=0)
    answers: list[socket.socket] = []
    with listen(config) as bound:
        address = bound.getsockname()

        def announce() -> None:
            answers.append(socket.create_connection(address, timeout=10))
            server.should_exit = True

        server = make_server(engine, config, ("test-model",), announce)
        server.run(sockets=[bound])
    assert len(answers) == 1
    answers[0].close()


def test_a_full_queue_answers_at_once(engine: FakeEngine) -> None:
    with running(engine, ServerConfig(port=0, max_queued_requests=1)) as server:
        engine.gate.clear()
        waiting = [Background(server) for _ in range(2)]
        wait_for(lambda: server.service.requests.num_open == 2)
        response = server.chat()
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert response.json()["error"]["type"] == "overloaded_error"
        assert response.json()["error"]["code"] == "queue_full"
        assert server.client.get("/load").json()["server_load"] == 2
        engine.gate.set()
        assert [each.result().status_code for each in waiting] == [200, 200]
        assert server.chat().status_code == 200


def test_too_many_open_prompt_tokens_answer_at_once(engine: FakeEngine) -> None:
    with running(engine, ServerConfig(port=0, max_queued_tokens=5)) as server:
        engine.gate.clear()
        waiting = Background(server, text="a long enough prompt")
        wait_for(lambda: server.service.admission.open_tokens >= 5)
        assert server.chat().status_code == 503
        engine.gate.set()
        assert waiting.result().status_code == 200
        assert server.chat().status_code == 200


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (None, 401),
        ("Bearer", 401),
        ("Bearer wrong", 401),
        ("Bearer secret-on", 401),
        ("Basic secret-one", 401),
        ("secret-one", 401),
        ("Bearer secret-one", 200),
        ("bearer secret-two", 200),
    ],
)
def test_a_key_is_needed_if_there_are_keys(
    engine: FakeEngine, header: str | None, status: int
) -> None:
    config = ServerConfig(port=0, api_key=("secret-one", "secret-two"))
    with running(engine, config) as server:
        headers = {} if header is None else {"Authorization": header}
        for path in ("/v1/models", "/version", "/openapi.json", "/load"):
            assert server.client.get(path, headers=headers).status_code == status
        response = server.post("/v1/chat/completions", chat_body(), headers=headers)
        assert response.status_code == status
        if status == 401:
            assert response.json()["error"]["type"] == "authentication_error"
            assert response.headers["www-authenticate"] == "Bearer"


def test_probes_need_no_key_and_nothing_else_looks_like_one(engine: FakeEngine) -> None:
    with running(engine, ServerConfig(port=0, api_key=("k",))) as server:
        for path in ("/health", "/ready", "/metrics"):
            assert server.client.get(path).status_code == 200
        for path in ("/health/../v1/models", "/%68ealth", "//health", "/health/", "/health%2f"):
            raw = httpx.Request("GET", server.url + "/")
            raw.url = raw.url.copy_with(raw_path=path.encode())
            assert server.client.send(raw).status_code == 401, path


def test_two_authorization_headers_are_one_too_many(engine: FakeEngine) -> None:
    with running(engine, ServerConfig(port=0, api_key=("k",))) as server:
        headers = [("Authorization", "Bearer k"), ("Authorization", "Bearer k")]
        assert server.client.get("/v1/models", headers=headers).status_code == 401


def test_health_says_what_an_engine_lacks(engine: FakeEngine) -> None:
    engine.degraded = "steps run without CUDA graphs: a step could not be captured"
    with running(engine, ServerConfig(port=0)) as server:
        for path in ("/health", "/ping"):
            response = server.client.get(path)
            assert response.status_code == 200
            assert response.json() == {"status": "degraded", "reason": engine.degraded}
        assert server.client.get("/ready").json() == {"status": "ready"}


def test_health_follows_the_engine(engine: FakeEngine) -> None:
    engine.config = replace(engine.config, stall_timeout=0.05)
    with running(engine, ServerConfig(port=0, idle_check=False)) as server:
        assert server.client.get("/health").json() == {"status": "ok"}
        engine.gate.clear()
        waiting = Background(server)
        wait_for(lambda: server.client.get("/health").status_code == 503)
        assert "no step" in server.client.get("/health").json()["reason"]
        assert server.client.get("/ready").status_code == 503
        engine.gate.set()
        assert waiting.result().status_code == 200
        assert server.client.get("/health").status_code == 200
        engine.alive = False
        assert server.client.get("/health").status_code == 503
        response = server.chat()
        assert response.status_code == 503
        assert response.json()["error"]["type"] == "engine_closed_error"
        engine.alive = True


def test_an_idle_engine_is_checked(engine: FakeEngine) -> None:
    with running(engine) as server:
        assert server.chat().status_code == 200
        wait_for(lambda: engine.num_checks == 1)
        assert server.client.get("/health").status_code == 200
        engine.check_error = AssertionError("a block is lost")
        assert server.chat().status_code == 200
        wait_for(lambda: engine.num_checks == 2)
        wait_for(lambda: server.client.get("/health").status_code == 503)
        assert "idle_check_failures_total" in server.client.get("/metrics").text


def test_an_idle_check_ends_when_somebody_comes(engine: FakeEngine) -> None:
    """Who comes does not wait for it, and when the engine is idle again, it begins again."""
    with running(engine) as server:
        engine.check_gate.clear()
        assert server.chat().status_code == 200
        wait_for(lambda: engine.num_checks == 1)
        engine.gate.clear()
        waiting = Background(server)
        wait_for(lambda: server.service.requests.num_open == 1)
        wait_for(lambda: not server.service.idle_check.running)
        engine.gate.set()
        assert waiting.result().status_code == 200
        wait_for(lambda: engine.num_checks == 2)
        engine.check_gate.set()
        wait_for(lambda: not server.service.idle_check.running)
        assert engine.num_checks == 2


def test_an_engine_is_idle_once_nobody_has_come_for_a_while(engine: FakeEngine) -> None:
    with running(engine) as server:
        before = begin = time.monotonic()
        while before < begin + 3 * IDLE_CHECK_DELAY_SECONDS:
            asked = time.monotonic()
            assert server.chat().status_code == 200
            if time.monotonic() - before >= IDLE_CHECK_DELAY_SECONDS:
                break  # the machine is busy: the engine may well have been idle
            assert engine.num_checks == 0
            before = asked
        wait_for(lambda: engine.num_checks == 1)


def test_the_idle_check_can_be_turned_off(engine: FakeEngine) -> None:
    with running(engine, ServerConfig(port=0, idle_check=False)) as server:
        assert server.chat().status_code == 200
    assert engine.num_checks == 0


def test_a_signal_drains_and_a_second_one_ends(engine: FakeEngine) -> None:
    with running(engine) as server:
        engine.gate.clear()
        waiting = Background(server)
        wait_for(lambda: server.service.requests.num_open == 1)
        server.server.handle_exit(signal.SIGTERM, None)
        assert server.client.get("/ready").status_code == 503
        assert server.client.get("/health").status_code == 200
        refused = server.chat()
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "shutting_down"
        assert not server.server.should_exit
        engine.gate.set()
        assert waiting.result().status_code == 200
        wait_for(lambda: server.server.should_exit)
        assert not server.server.force_exit
        server.server.handle_exit(signal.SIGTERM, None)
        assert server.server.force_exit


def test_what_does_not_end_in_time_is_ended(engine: FakeEngine) -> None:
    with running(engine, ServerConfig(port=0, shutdown_timeout=0.1)) as server:
        engine.gate.clear()
        waiting = Background(server)
        wait_for(lambda: server.service.requests.num_open == 1)
        server.server.handle_exit(signal.SIGTERM, None)
        wait_for(lambda: server.server.should_exit)
        waiting.result()
    assert not engine.alive


@pytest.mark.parametrize("why", ["paused", "asleep"])
def test_what_cannot_end_is_not_waited_for(engine: FakeEngine, why: str) -> None:
    with running(engine) as server:
        engine.gate.clear()
        waiting = Background(server)
        wait_for(lambda: server.service.requests.num_open == 1)
        engine.rests = frozenset({why})
        begun = time.monotonic()
        server.server.handle_exit(signal.SIGTERM, None)
        wait_for(lambda: server.server.should_exit)
        waiting.result()
        assert time.monotonic() - begun < server.service.config.shutdown_timeout / 3
    assert not engine.alive


def test_the_engine_is_closed_with_the_server(engine: FakeEngine) -> None:
    with running(engine):
        assert engine.alive
    assert not engine.alive


def test_a_taken_port_is_said_so() -> None:
    bound = listen(ServerConfig(port=0))
    try:
        bound.listen()
        port = bound.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            listen(ServerConfig(port=port))
    finally:
        bound.close()


def test_draining_an_idle_service_is_immediate(engine: FakeEngine) -> None:
    with running(engine) as server:
        assert asyncio.run(server.service.requests.drain(10.0))
