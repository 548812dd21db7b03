"""openai-python parses what the server says, in its strictest mode."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import pytest
from fake_engine import FakeEngine
from pydantic import ValidationError
from serving import RunningServer, running
from tool_texts import CALL, CITY_TOOL

from vlm_serve.errors import ContextLengthError, MediaFetchError, OverloadedError
from vlm_serve.preprocess.text.tokenizer import Tokenizer
from vlm_serve.server.config import ServerConfig

if TYPE_CHECKING:
    import openai


@pytest.fixture(autouse=True, scope="module")
def _client_library() -> None:
    """Import it when tests run: that takes a second, for which no collection waits."""
    global openai
    import openai


HI: Any = [{"role": "user", "content": "hi"}]
MODEL = "test-model"


def client_of(server: RunningServer, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{server.url}/v1",
        api_key=key,
        max_retries=0,
        _strict_response_validation=True,
    )


@pytest.fixture
def client(fake: RunningServer) -> Iterator[openai.OpenAI]:
    with client_of(fake) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    assert client.models.retrieve(model.id).id == MODEL


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HI, n=2, max_completion_tokens=64)
    assert [choice.message.content for choice in answer.choices] == ["Hello, world!"] * 2
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


def test_a_stream_with_usage(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=HI, stream=True, stream_options={"include_usage": True}
        )
    )
    *rest, last = chunks
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.total_tokens > 0
    assert all(chunk.usage is None for chunk in rest)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in rest) == "Hello, world!"
    assert rest[-1].choices[0].finish_reason == "stop"


def test_logprobs_whole_and_streamed(client: openai.OpenAI) -> None:
    options: Any = {"model": MODEL, "messages": HI, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**options).choices[0].logprobs
    assert whole is not None
    assert whole.content
    assert all(len(token.top_logprobs) == 2 for token in whole.content)
    streamed: list[Any] = []
    for chunk in client.chat.completions.create(stream=True, **options):
        logprobs = chunk.choices[0].logprobs
        streamed += (logprobs.content or []) if logprobs is not None else []
    assert [t.logprob for t in streamed] == [t.logprob for t in whole.content]


def test_the_clients_own_stream_helper_puts_calls_together(
    fake: RunningServer, client: openai.OpenAI
) -> None:
    fake.engine.answer = CALL
    tools: Any = [CITY_TOOL]
    with client.chat.completions.stream(model=MODEL, messages=HI, tools=tools) as stream:
        streamed = stream.get_final_completion()
    whole = client.chat.completions.create(model=MODEL, messages=HI, tools=tools)
    for answer in (streamed, whole):
        choice: Any = answer.choices[0]
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        assert call.function.name == "get_weather"
        assert json.loads(call.function.arguments) == {"city": "Paris", "days": 3}


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=["hi", "ho"], n=2, logprobs=2, max_tokens=64
    )
    assert [choice.text for choice in answer.choices] == ["Hello, world!"] * 4
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert "".join(logprobs.tokens) == "Hello, world!"


def test_a_strict_stream_of_completions_needs_a_type_with_the_null(client: openai.OpenAI) -> None:
    from openai.types import Completion, CompletionChoice

    class OpenChoice(CompletionChoice):
        """OpenAI's type lacks the null that its own server and vLLM's send until a choice ends.
        None of the values it has means that, and clients stop listening at any of them."""

        finish_reason: Literal["stop", "length", "content_filter"] | None  # type: ignore[assignment]

    class StreamedCompletion(Completion):
        choices: list[OpenChoice]  # type: ignore[assignment]

    body: Any = {
        "model": MODEL,
        "prompt": "hi",
        "logprobs": 1,
        "max_tokens": 64,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    *parts, last, usage = client.post(
        "/completions",
        cast_to=StreamedCompletion,
        body=body,
        stream=True,
        stream_cls=openai.Stream[StreamedCompletion],
    )
    assert {part.choices[0].finish_reason for part in parts} == {None}
    assert last.choices[0].finish_reason == "stop"
    assert "".join(chunk.choices[0].text for chunk in (*parts, last)) == "Hello, world!"
    assert usage.usage is not None
    with pytest.raises(openai.APIResponseValidationError) as raised:
        list(client.completions.create(**body))
    cause = raised.value.__cause__
    assert isinstance(cause, ValidationError)
    assert [error["loc"] for error in cause.errors()] == [("choices", 0, "finish_reason")]


def test_reasoning_is_there_under_both_names(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(tokenizer)
    engine.answer = "<think>\nHm.\n</think>\n\nYes."
    config = ServerConfig(port=0, reasoning_parser="qwen3")
    with running(engine, config) as server, client_of(server) as client:
        message: Any = client.chat.completions.create(model=MODEL, messages=HI).choices[0].message
    assert message.reasoning == message.reasoning_content == "Hm."
    assert message.content == "Yes."


@pytest.mark.parametrize(
    ("failure", "raised"),
    [
        (ContextLengthError("too long"), "BadRequestError"),
        (MediaFetchError("not found"), "UnprocessableEntityError"),
        (OverloadedError("full"), "InternalServerError"),
        (RuntimeError("secret"), "InternalServerError"),
    ],
)
def test_errors(
    fake: RunningServer,
    client: openai.OpenAI,
    failure: Exception,
    raised: str,
) -> None:
    fake.engine.preprocessor.error = failure
    for stream in (False, True):
        with pytest.raises(getattr(openai, raised)) as caught:
            client.chat.completions.create(model=MODEL, messages=HI, stream=stream)
        body = caught.value.body
        assert isinstance(body, dict)
        assert {"message", "type", "param", "code"} == body.keys()
        assert "secret" not in str(body)


def test_an_error_in_the_middle_of_a_stream(fake: RunningServer, client: openai.OpenAI) -> None:
    fake.engine.fail_after = 1
    with pytest.raises(openai.APIError, match="the step failed"):
        list(client.chat.completions.create(model=MODEL, messages=HI, stream=True))


def test_unknown_models_and_keys(tokenizer: Tokenizer) -> None:
    config = ServerConfig(port=0, api_key=("secret",))
    with running(FakeEngine(tokenizer), config) as server:
        with client_of(server, "secret") as client, pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="other", messages=HI)
        with client_of(server, "wrong") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
