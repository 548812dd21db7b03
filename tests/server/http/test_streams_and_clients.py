"""Clients that vanish, requests that fail halfway, and deadlines."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from fake_engine import FakeEngine
from serving import WAIT_SECONDS, RunningServer, chat_body, connect, parse_events, running, wait_for

from vlm_serve.errors import EngineError
from vlm_serve.preprocess.text.tokenizer import Tokenizer
from vlm_serve.server.config import ServerConfig

BODY = b'{"messages": [{"role": "user", "content": "hi"}], "stream": %s}'


@pytest.mark.parametrize("stream", [b"true", b"false"])
def test_a_client_that_leaves_before_the_first_token_frees_its_request(
    fake: RunningServer, stream: bytes
) -> None:
    fake.engine.gate.clear()
    connection = connect(fake, BODY % stream)
    wait_for(lambda: len(fake.engine.requests) == 1)
    (request,) = fake.engine.requests.values()
    connection.close()
    assert request.aborted.wait(WAIT_SECONDS)
    wait_for(lambda: fake.service.requests.num_open == 0)
    fake.engine.gate.set()
    assert fake.chat().status_code == 200


def test_a_client_that_leaves_in_the_middle_of_a_stream_frees_its_request(
    fake: RunningServer,
) -> None:
    fake.engine.pause_after = 2
    with fake.client.stream(
        "POST", "/v1/chat/completions", json=chat_body(stream=True)
    ) as response:
        lines = response.iter_lines()  # kept: httpx closes the connection with it
        next(lines)
        (request,) = fake.engine.requests.values()
    assert request.aborted.wait(WAIT_SECONDS)
    wait_for(lambda: fake.service.requests.num_open == 0)


def test_a_client_that_leaves_during_preparation_never_reaches_the_engine(
    fake: RunningServer,
) -> None:
    submitted = fake.engine.num_submitted
    fake.engine.preprocessor.gate.clear()
    connection = connect(fake, BODY % b"false")
    wait_for(lambda: len(fake.engine.preprocessor.calls) == 1)
    connection.close()
    wait_for(lambda: fake.service.requests.num_open == 0)
    fake.engine.preprocessor.gate.set()
    assert fake.chat().status_code == 200
    assert fake.engine.num_submitted == submitted + 1


def test_a_client_that_leaves_before_its_body_is_complete_is_forgotten(
    fake: RunningServer,
) -> None:
    connect(fake, b'{"messages"', length=1000).close()
    assert fake.chat().status_code == 200


def test_an_error_before_the_first_token_has_a_status(fake: RunningServer) -> None:
    fake.engine.fail_after = 0
    fake.engine.failure = EngineError("the step failed")
    for stream in (False, True):
        response = fake.chat(stream=stream)
        assert response.status_code == 500
        assert response.json()["error"]["message"] == "the step failed"


def test_an_error_in_the_middle_of_a_stream_is_an_event(fake: RunningServer) -> None:
    fake.engine.fail_after = 2
    fake.engine.failure = EngineError("the step failed")
    chunks = fake.stream_chat()
    assert chunks[-1]["error"]["message"] == "the step failed"
    assert chunks[-1]["error"]["type"] == "internal_error"
    assert all("error" not in chunk for chunk in chunks[:-1])
    assert fake.chat().status_code == 500


def test_an_unexpected_error_in_the_middle_of_a_stream_is_hidden(
    fake: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    fake.engine.fail_after = 2
    fake.engine.failure = RuntimeError("secret")
    chunks = fake.stream_chat()
    assert "secret" not in str(chunks)
    assert chunks[-1]["error"]["code"] == "internal_error"
    assert "secret" in caplog.text


def test_many_clients_get_their_own_answers(fake: RunningServer) -> None:
    answers: dict[int, Any] = {}

    def ask(number: int) -> None:
        body = chat_body(f"{number}", stream=True, return_token_ids=True)
        with fake.client.stream("POST", "/v1/chat/completions", json=body) as response:
            answers[number] = parse_events("".join(response.iter_text()))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_SECONDS)
    tokenizer = fake.engine.preprocessor.tokenizer
    for number in range(16):
        prompt = tokenizer.decode(answers[number][0]["prompt_token_ids"])
        assert prompt == f"user: {number}\nassistant:"


@pytest.mark.parametrize("stage", ["prepare", "generate"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_ends_a_request(tokenizer: Tokenizer, stage: str, stream: bool) -> None:
    engine = FakeEngine(tokenizer)
    with running(engine, ServerConfig(port=0, request_timeout=0.2)) as server:
        gate = engine.preprocessor.gate if stage == "prepare" else engine.gate
        gate.clear()
        response = server.chat(stream=stream)
        assert response.status_code == 504
        assert response.json()["error"]["type"] == "timeout_error"
        wait_for(lambda: not engine.requests and server.service.requests.num_open == 0)
        gate.set()
        wait_for(lambda: server.chat().status_code == 200)  # a busy machine may need several
