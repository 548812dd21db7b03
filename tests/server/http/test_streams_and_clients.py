"""Clients that vanish, requests that fail halfway, and deadlines."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
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


MESSAGES = [{"role": "user", "content": "hi"}]
STREAMS: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/chat/completions": ({"messages": MESSAGES}, ": waiting\n\n"),
    "/v1/completions": ({"prompt": "hi"}, ": waiting\n\n"),
    "/v1/responses": ({"input": "hi"}, ": waiting\n\n"),
    "/v1/messages": (
        {"messages": MESSAGES, "max_tokens": 9},
        'event: ping\ndata: {"type":"ping"}\n\n',
    ),
    "/inference/v1/generate": ({"token_ids": [5], "sampling_params": {}}, ": waiting\n\n"),
}


@pytest.fixture
def soon(tokenizer: Tokenizer) -> Iterator[RunningServer]:
    """A server that breaks every silence after a moment."""
    with running(FakeEngine(tokenizer), ServerConfig(port=0, stream_silence=0.02)) as server:
        yield server


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("fails", [False, True])
def test_a_silent_stream_has_its_status_and_is_told_to_wait(
    soon: RunningServer, path: str, fails: bool
) -> None:
    """An error after that is an event of the API; the answer is as without a silence."""
    fields, ping = STREAMS[path]
    body = fields | {"stream": True, "unheard_of": 1}
    soon.engine.gate.clear()
    if fails:
        soon.engine.fail_after, soon.engine.failure = 0, EngineError("the step failed")
    text = ""
    with soon.client.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        assert response.headers["x-vlm-serve-ignored-fields"] == "unheard_of"
        for piece in response.iter_text():
            text += piece
            if text.count(ping) >= 3:
                soon.engine.gate.set()
    rest = text.replace(ping, "")
    assert text.startswith(3 * ping) and rest.startswith(("data: {", "event: "))
    if not fails:
        assert "step failed" not in rest and len(rest.split("\n\n")) >= 3
    elif path in ("/v1/messages", "/v1/responses"):
        head, data = rest.removesuffix("\n\n").split("\n")
        told = json.loads(data.removeprefix("data: "))
        assert head == "event: error" and told["type"] == "error"
        assert told.get("error", told)["message"] == "the step failed"
    else:
        error, done = rest.removesuffix("\n\n").split("\n\n")
        assert json.loads(error.removeprefix("data: "))["error"]["message"] == "the step failed"
        assert done == "data: [DONE]"


def test_a_silence_in_the_middle_of_a_stream_is_broken_too(soon: RunningServer) -> None:
    soon.engine.pause_after = 2
    text, chunks = "", 0
    body = chat_body("hi", stream=True)
    with soon.client.stream("POST", "/v1/chat/completions", json=body) as response:
        for piece in response.iter_text():
            text += piece
            if text.count(": waiting") >= 2:
                soon.engine.gate.set()
    chunks = text.count("data: ")
    assert chunks > 3 and "data: {" in text.rpartition(": waiting\n\n")[2]


def test_clients_that_leave_in_a_silence_are_forgotten(soon: RunningServer) -> None:
    for gate in (soon.engine.gate, soon.engine.preprocessor.gate):
        gate.clear()
        body = chat_body("hi", stream=True)
        with soon.client.stream("POST", "/v1/chat/completions", json=body) as response:
            assert next(response.iter_text()).startswith(": waiting")
        gate.set()
        wait_for(lambda: soon.service.requests.num_open == 0 and not soon.engine.requests)


@pytest.mark.sweep
def test_a_silence_may_be_unlimited_and_whole_answers_have_none(tokenizer: Tokenizer) -> None:
    for seconds, stream in ((0.0, True), (0.01, False)):
        engine = FakeEngine(tokenizer)
        with running(engine, ServerConfig(port=0, stream_silence=seconds)) as server:
            engine.gate.clear()
            threading.Timer(0.2, engine.gate.set).start()
            assert ": waiting" not in server.chat(stream=stream).text


@pytest.mark.sweep
def test_openais_and_anthropics_clients_wait(soon: RunningServer) -> None:
    openai, anthropic = pytest.importorskip("openai"), pytest.importorskip("anthropic")
    client = openai.OpenAI(base_url=f"{soon.url}/v1", api_key="none")
    other = anthropic.Anthropic(base_url=soon.url, api_key="none")
    for _ in range(2):
        soon.engine.gate.clear()
        threading.Timer(0.2, soon.engine.gate.set).start()
        made = client.chat.completions.create(model="test-model", messages=MESSAGES, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in made) == "Hello, world!"
    soon.engine.gate.clear()
    threading.Timer(0.2, soon.engine.gate.set).start()
    with client.responses.stream(model="test-model", input="hi") as events:
        assert events.get_final_response().output_text == "Hello, world!"
    soon.engine.gate.clear()
    threading.Timer(0.2, soon.engine.gate.set).start()
    with other.messages.stream(model="test-model", messages=MESSAGES, max_tokens=9) as events:
        assert events.get_final_text()
    client.close()
    other.close()


@pytest.mark.parametrize("path", STREAMS)
def test_a_stream_may_have_an_interval(tokenizer: Tokenizer, path: str) -> None:
    """The first token and the end do not wait for it, and nothing between them is lost."""
    fields = STREAMS[path][0] | {"stream": True}
    engines = [FakeEngine(tokenizer) for _ in range(2)]
    told: list[str] = []
    for engine, interval in zip(engines, (0.0, 60_000.0), strict=True):
        with running(engine, ServerConfig(port=0, stream_interval=interval)) as server:
            told.append("")
            with server.client.stream("POST", path, json=fields) as response:
                for piece in response.iter_text():
                    told[-1] += piece
    each, few = (text.count("data: {") for text in told)
    assert each > few + 5
    ends = [text.strip().rpartition("\n\n")[2] for text in told]
    assert ends[0].partition(":")[0] == ends[1].partition(":")[0]


def test_the_first_token_does_not_wait_for_an_interval(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(tokenizer)
    engine.pause_after = 1
    with running(engine, ServerConfig(port=0, stream_interval=60_000.0)) as server:
        body = chat_body("hi", stream=True)
        with server.client.stream("POST", "/v1/chat/completions", json=body) as response:
            pieces = response.iter_text()
            first = next(pieces)
            assert "assistant" in first and '"content":"H"' in first
            wait_for(lambda: not engine.gate.is_set())
            engine.gate.set()
            rest = parse_events("".join(pieces))
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in rest)
    assert text == "ello, world!" and len(rest) == 2
