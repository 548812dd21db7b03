"""POST /v1/responses, driven by openai-python with its strictest parsing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from fake_engine import FakeEngine
from serving import RunningServer, running
from tool_texts import CALL, CITY_TOOL

from vlm_serve.errors import ContextLengthError, OverloadedError
from vlm_serve.preprocess.text.tokenizer import Tokenizer
from vlm_serve.server.config import ServerConfig

if TYPE_CHECKING:
    import openai
    from openai.types.responses import Response, ResponseCompletedEvent, ResponseFunctionToolCall


@pytest.fixture(autouse=True, scope="module")
def _client_library() -> None:
    """Import it when tests run: that takes a second, for which no collection waits."""
    global openai, Response, ResponseCompletedEvent, ResponseFunctionToolCall
    import openai
    from openai.types.responses import Response, ResponseCompletedEvent, ResponseFunctionToolCall


IMAGE = "data:image/png;base64,aGk="


@pytest.fixture
def client(fake: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{fake.url}/v1",
        api_key="none",
        max_retries=0,
        _strict_response_validation=True,
    ) as client:
        yield client


def sent(fake: RunningServer) -> list[dict[str, Any]]:
    """The messages that the last request came to."""
    messages: list[dict[str, Any]] = fake.engine.preprocessor.calls[-1]["messages"]
    return messages


def test_a_whole_response(fake: RunningServer, client: openai.OpenAI) -> None:
    response = client.responses.create(
        model="test-model", input="hi", instructions="Be brief", metadata={"run": "1"}
    )
    assert response.output_text == "Hello, world!"
    assert (response.status, response.object) == ("completed", "response")
    assert response.metadata == {"run": "1"}
    assert sent(fake) == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "hi"},
    ]
    usage = response.usage
    assert usage is not None
    assert usage.input_tokens_details.cached_tokens == 3
    assert usage.input_tokens_details.cache_write_tokens == 2
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


def test_a_prewarmed_prompt_has_no_output(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "test-model", "input": "hi", "max_output_tokens": 8}
    asked["prompt_cache_options"] = {"prewarm": True}
    made = client.responses.create(**asked)
    with client.responses.create(**asked, stream=True) as stream:
        events = list(stream)
    assert (made.output, made.status, made.max_output_tokens) == ([], "completed", 8)
    assert made.usage is not None and made.usage.output_tokens == 0
    assert made.usage.total_tokens == made.usage.input_tokens > 0
    kinds = ["response.created", "response.in_progress", "response.completed"]
    assert [event.type for event in events] == kinds
    plain = client.responses.create(**asked | {"prompt_cache_options": {"prewarm": False}})
    assert plain.output_text


def test_the_order_of_events(client: openai.OpenAI) -> None:
    with client.responses.create(model="test-model", input="hi", stream=True) as stream:
        events = list(stream)
    names = [event.type.removeprefix("response.") for event in events]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert names[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(names[4:-4]) == {"output_text.delta"}
    assert names[-4:] == [
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    last = events[-1]
    assert isinstance(last, ResponseCompletedEvent)
    assert last.response.output_text == text == "Hello, world!"
    assert last.response.usage is not None


def test_earlier_turns_come_as_items(fake: RunningServer, client: openai.OpenAI) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": 1}'}
    items: Any = [
        {"role": "user", "content": [
            {"type": "input_image", "image_url": IMAGE, "detail": "auto"},
            {"type": "input_text", "text": "What is it?"},
        ]},
        {"type": "reasoning", "id": "r", "summary": [],
         "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"type": "message", "role": "assistant", "id": "m", "status": "completed",
         "content": [{"type": "output_text", "text": "A cat.", "annotations": []}]},
        call,
        {"type": "function_call_output", "call_id": "c1", "output": "a dog"},
        {"role": "developer", "content": "Be brief"},
    ]  # fmt: skip
    client.responses.create(model="test-model", input=items)
    user, assistant, tool, developer = sent(fake)
    assert [part["type"] for part in user["content"]] == ["image", "text"]
    (image,) = fake.engine.preprocessor.calls[-1]["media"]
    assert (image.source, image.options) == (IMAGE, {"detail": "auto"})
    assert image.param == "input[0].content[0].image_url"
    assert (assistant["content"], assistant["reasoning_content"]) == ("A cat.", "Hm")
    function = {"name": "look", "arguments": {"at": 1}}
    assert assistant["tool_calls"] == [{"id": "c1", "type": "function", "function": function}]
    assert tool == {"role": "tool", "tool_call_id": "c1", "content": "a dog"}
    assert developer == {"role": "user", "content": "Be brief"}


def test_an_answer_can_be_sent_back(fake: RunningServer, client: openai.OpenAI) -> None:
    fake.engine.answer = CALL
    first = client.responses.create(model="test-model", input="hi", tools=[tool()])
    items: Any = [item.model_dump(exclude_none=True) for item in first.output]
    client.responses.create(model="test-model", input=items)
    (message,) = sent(fake)
    assert message["content"] == "Let me look."
    assert message["tool_calls"][0]["function"]["name"] == "get_weather"


def tool() -> Any:
    return {"type": "function", **CITY_TOOL["function"]}


def test_a_function_call_whole_and_streamed(fake: RunningServer, client: openai.OpenAI) -> None:
    fake.engine.answer = CALL
    whole = client.responses.create(model="test-model", input="hi", tools=[tool()])
    with client.responses.create(
        model="test-model", input="hi", tools=[tool()], stream=True
    ) as stream:
        events = list(stream)
    streamed = events[-1].response  # type: ignore[union-attr]
    for response in (whole, streamed):
        message, call = response.output
        assert message.type == "message"
        assert isinstance(call, ResponseFunctionToolCall)
        assert json.loads(call.arguments) == {"city": "Paris", "days": 3}
        assert call.status == "completed"
    deltas = [e for e in events if e.type == "response.function_call_arguments.delta"]
    done = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert "".join(event.delta for event in deltas) == done[0].arguments
    assert {event.output_index for event in deltas} == {1}
    assert fake.engine.preprocessor.calls[-1]["tools"][0]["function"]["name"] == "get_weather"


def test_a_cut_answer_is_incomplete(client: openai.OpenAI) -> None:
    response = client.responses.create(model="test-model", input="hi", max_output_tokens=2)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"  # type: ignore[union-attr]


def test_a_call_that_the_limit_cuts_is_sent_unfinished(
    fake: RunningServer, client: openai.OpenAI
) -> None:
    fake.engine.answer = CALL
    tokens = fake.engine.preprocessor.tokenizer.encode_plain(CALL[: CALL.index("ris")])
    options: Any = {"model": "test-model", "input": "hi", "tools": [tool()]}
    whole = client.responses.create(max_output_tokens=len(tokens), **options)
    with client.responses.create(max_output_tokens=len(tokens), stream=True, **options) as stream:
        last = list(stream)[-1]
    assert last.type == "response.incomplete"
    for response in (whole, last.response):
        message, call = response.output
        assert isinstance(call, ResponseFunctionToolCall)
        assert (response.status, call.status) == ("incomplete", "incomplete")
        assert call.arguments.startswith('{"city": "')
        with pytest.raises(json.JSONDecodeError):
            json.loads(call.arguments)
        assert message.type == "message"
        assert response.output_text == "Let me look."


def test_reasoning_is_an_item(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(tokenizer)
    engine.answer = "<think>\nHm.\n</think>\n\nYes."
    with running(engine, ServerConfig(port=0, reasoning_parser="qwen3")) as server:
        body = server.post("/v1/responses", {"input": "hi"}).json()
    response = Response.model_validate(body, strict=True)
    thought, answer = response.output
    assert thought.type == "reasoning"
    assert thought.content is not None
    assert thought.content[0].text == "Hm."
    assert answer.type == "message"
    assert response.usage is not None
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens


def test_a_failure_in_the_middle(fake: RunningServer, client: openai.OpenAI) -> None:
    fake.engine.fail_after = 1
    with client.responses.create(model="test-model", input="hi", stream=True) as stream:
        last = list(stream)[-1]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert last.response.error.message == "the step failed"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"store": "yes"}, "store"),
        ({"conversation": "c"}, "conversation"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"n": 2}, "n"),
        ({"messages": []}, "messages"),
        ({"background": True}, "background"),
        ({"truncation": "some"}, "truncation"),
        ({"include": ["everything"]}, "include"),
        ({"include": [[]]}, "include"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
         "input[0].content[0].file_data"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": ""}]}]},
         "input[0].content[0].file_id"),
        ({"input": [{"type": "function_call", "name": "x"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call", "name": "x", "call_id": "c", "arguments": "["}]},
         "input[0].arguments"),
        ({"input": [{"role": "user", "content": [
            {"type": "input_image", "image_url": "/etc/passwd"}]}]},
         "input[0].content[0].image_url"),
        ({"input": [{"role": "friend", "content": "x"}]}, "input[0].role"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
        ({"input": [{"role": 5, "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "assistant", "content": [5]}]}, "input[0].content[0]"),
        ({"tools": [{"type": "robot", "name": "r"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"text": {"format": 5}}, "text"),
        ({"input": 5}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"reasoning": {"effort": 5}}, "reasoning"),
        ({"text": {"format": {"type": "json_schema", "schema": 5}}}, "text"),
        ({"temperature": -1}, "temperature"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused(
    fake: RunningServer, fields: dict[str, Any], param: str
) -> None:
    answer = fake.post("/v1/responses", {"input": "hi"} | fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert "response_format" not in error["message"]


def test_logprobs_of_the_text(fake: RunningServer, client: openai.OpenAI) -> None:
    fake.engine.answer = CALL
    options: Any = {"model": "test-model", "input": "hi", "tools": [tool()], "top_logprobs": 2,
                    "include": ["message.output_text.logprobs"]}  # fmt: skip
    whole = client.responses.create(**options)
    with client.responses.create(stream=True, **options) as stream:
        events = list(stream)
    deltas = [e for e in events if e.type == "response.output_text.delta"]
    (done,) = [e for e in events if e.type == "response.output_text.done"]
    entries = [entry.model_dump() for event in deltas for entry in event.logprobs]
    assert entries == [entry.model_dump() for entry in done.logprobs]
    for response in (whole, events[-1].response):
        assert response.top_logprobs == 2
        message = response.output[0]
        assert message.type == "message"
        (part,) = message.content
        assert part.type == "output_text"
        assert part.logprobs is not None
        assert [entry.token for entry in part.logprobs] == [entry["token"] for entry in entries]
        assert "".join(entry.token for entry in part.logprobs).strip() == "Let me look."
        assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)
    plain = fake.post("/v1/responses", {"input": "hi", "include": []}).json()["output"][-1]
    assert plain["content"][0]["logprobs"] == []


def test_logprobs_begin_behind_the_reasoning(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(tokenizer)
    engine.answer = "<think>\nHm.\n</think>\n\nYes."
    asked = {"input": "hi", "include": ["message.output_text.logprobs"]}
    with running(engine, ServerConfig(port=0, reasoning_parser="qwen3")) as server:
        body = server.post("/v1/responses", asked).json()
    (part,) = body["output"][1]["content"]
    said = "".join(entry["token"] for entry in part["logprobs"])
    assert said.strip() == "Yes."


def test_a_full_queue_and_an_unknown_model(fake: RunningServer, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="other", input="hi")
    fake.engine.submit_error = OverloadedError("full", code="queue_full")
    with pytest.raises(openai.InternalServerError) as raised:
        client.responses.create(model="test-model", input="hi", stream=True)
    assert raised.value.status_code == 503
    assert "retry-after" in raised.value.response.headers


def test_errors_of_later_stages_name_the_fields_of_this_api(
    fake: RunningServer,
) -> None:
    too_long = ContextLengthError("too long", param="messages", code="context_length_exceeded")
    fake.engine.submit_error = too_long
    error = fake.post("/v1/responses", {"input": "hi"}).json()["error"]
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
    error = fake.post("/v1/responses", {"input": "hi", "max_output_tokens": 0}).json()["error"]
    assert error["message"] == "max_output_tokens must be at least 1, got 0"


def test_the_tokens_of_a_prompt_are_counted(fake: RunningServer, client: openai.OpenAI) -> None:
    asked: Any = {"model": "test-model", "input": "How long is this?", "instructions": "Be brief"}
    before = fake.engine.num_submitted
    counted = client.responses.input_tokens.count(**asked)
    assert fake.engine.num_submitted == before
    usage = client.responses.create(**asked).usage
    assert usage is not None
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", usage.input_tokens)
    answer = fake.post("/v1/responses/input_tokens", {"input": [{"role": "x", "content": "y"}]})
    assert answer.json()["error"]["param"] == "input[0].role"
    with pytest.raises(openai.NotFoundError):
        client.responses.input_tokens.count(**asked | {"model": "other"})
