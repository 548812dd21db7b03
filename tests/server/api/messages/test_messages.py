"""POST /v1/messages, driven by Anthropic's client with its strictest parsing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from fake_engine import FakeEngine
from serving import RunningServer, running
from tool_texts import CALL, CITY_TOOL

from vlm_serve.engine.requests.outputs import Delta
from vlm_serve.errors import OverloadedError
from vlm_serve.preprocess.text.template import TemplateTraits, Thinking
from vlm_serve.preprocess.text.tokenizer import Tokenizer
from vlm_serve.server.config import ServerConfig

if TYPE_CHECKING:
    import anthropic
    from anthropic.types import Message, ToolUseBlock


@pytest.fixture(autouse=True, scope="module")
def _client_library() -> None:
    """Import it when tests run: that takes a second, for which no collection waits."""
    global anthropic, Message, ToolUseBlock
    import anthropic
    from anthropic.types import Message, ToolUseBlock


TOOL: Any = {
    "name": "get_weather",
    "description": "The weather",
    "input_schema": CITY_TOOL["function"]["parameters"],
}
HI: Any = [{"role": "user", "content": "hi"}]


def client_of(server: RunningServer, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(
        base_url=server.url, api_key=key, max_retries=0, _strict_response_validation=True
    )


@pytest.fixture
def client(fake: RunningServer) -> Iterator[anthropic.Anthropic]:
    with client_of(fake) as client:
        yield client


def ask(client: anthropic.Anthropic, **fields: Any) -> Message:
    options: dict[str, Any] = {"model": "test-model", "max_tokens": 256, "messages": HI} | fields
    message: Message = client.messages.create(**options)
    return message


def sent(fake: RunningServer) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = fake.engine.preprocessor.calls[-1]["messages"]
    return messages


def test_a_whole_message(fake: RunningServer, client: anthropic.Anthropic) -> None:
    message = ask(client, system=[{"type": "text", "text": "Be brief"}])
    (block,) = message.content
    assert block.type == "text"
    assert block.text == "Hello, world!"
    assert message.stop_reason == "end_turn"
    assert message.usage.cache_read_input_tokens == 3
    prompt = fake.engine.preprocessor.tokenizer
    assert message.usage.input_tokens > 0
    assert message.usage.output_tokens == len(prompt.encode_plain("Hello, world!"))
    assert sent(fake)[0] == {"role": "system", "content": [{"type": "text", "text": "Be brief"}]}


def test_the_order_of_events(client: anthropic.Anthropic) -> None:
    with client.messages.create(
        model="test-model", max_tokens=256, messages=HI, stream=True
    ) as stream:
        events = list(stream)
    names = [event.type for event in events]
    assert names[:2] == ["message_start", "content_block_start"]
    assert set(names[2:-3]) == {"content_block_delta"}
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    last = events[-2]
    assert last.type == "message_delta"
    assert last.delta.stop_reason == "end_turn"
    assert last.usage.cache_read_input_tokens == 3
    assert last.usage.cache_creation_input_tokens == 2
    assert events[0].type == "message_start"
    assert events[0].message.usage.cache_creation_input_tokens == 2


@pytest.mark.parametrize("lives", [["5m", "1h"], ["1h", "5m"], ["1h", None], []])
def test_written_tokens_count_by_the_last_marks_lifetime(
    client: anthropic.Anthropic, lives: list[str | None]
) -> None:
    marks: list[Any] = [
        {"cache_control": {"type": "ephemeral"} | ({"ttl": live} if live else {})} for live in lives
    ]
    system, said = [{"type": "text", "text": "S"} | (marks[0] if marks else {})], HI
    if marks:
        part = {"type": "text", "text": "hi"} | marks[1]
        said = [{"role": "user", "content": [part]}]
    usage = ask(client, system=system, messages=said).usage
    created = usage.cache_creation
    assert created is not None and usage.cache_creation_input_tokens == 2
    hour = 2 if lives[-1:] == ["1h"] else 0
    assert (created.ephemeral_1h_input_tokens, created.ephemeral_5m_input_tokens) == (
        hour,
        2 - hour,
    )


def test_the_client_puts_a_stream_with_a_call_together(
    fake: RunningServer, client: anthropic.Anthropic
) -> None:
    fake.engine.answer = CALL
    with client.messages.stream(
        model="test-model", max_tokens=256, messages=HI, tools=[TOOL]
    ) as stream:
        streamed = stream.get_final_message()
    for message in (streamed, ask(client, tools=[TOOL], tool_choice={"type": "auto"})):
        text, call = message.content
        assert text.type == "text"
        assert text.text == "Let me look."
        assert isinstance(call, ToolUseBlock)
        assert call.input == {"city": "Paris", "days": 3}
        assert message.stop_reason == "tool_use"
    (told,) = fake.engine.preprocessor.calls[-1]["tools"]
    assert told == CITY_TOOL


def test_a_call_that_the_limit_cuts_is_sent_unfinished(
    fake: RunningServer, client: anthropic.Anthropic
) -> None:
    fake.engine.answer = CALL
    tokenizer = fake.engine.preprocessor.tokenizer
    for end, told in (("<parameter=city>", {}), ("3\n</parameter>", {"city": "Paris"})):
        limit = len(tokenizer.encode_plain(CALL[: CALL.index(end)]))
        options: Any = {"model": "test-model", "max_tokens": limit, "messages": HI}
        with client.messages.stream(tools=[TOOL], **options) as stream:
            events = list(stream)
            streamed = stream.get_final_message()
        parts = [e.delta.partial_json for e in events if e.type == "content_block_delta"
                 and e.delta.type == "input_json_delta"]  # fmt: skip
        with pytest.raises(json.JSONDecodeError):
            json.loads("".join(parts))
        for message in (streamed, ask(client, tools=[TOOL], max_tokens=limit)):
            text, call = message.content
            assert text.type == "text"
            assert text.text == "Let me look."
            assert isinstance(call, ToolUseBlock)
            assert call.input == told
            assert message.stop_reason == "max_tokens"


def test_blocks_become_chat_messages(fake: RunningServer, client: anthropic.Anthropic) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "aGk="}
    ask(client, messages=[
        {"role": "user", "content": [
            {"type": "image", "source": source},
            {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}},
            {"type": "text", "text": "What?"},
        ]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm", "signature": ""},
            {"type": "text", "text": "Wait."},
            {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": 1}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": "a dog"},
            {"type": "text", "text": "And now?"},
        ]},
    ])  # fmt: skip
    user, assistant, tool, again = sent(fake)
    assert [part["type"] for part in user["content"]] == ["image", "image", "text"]
    uploaded, linked = fake.engine.preprocessor.calls[-1]["media"]
    assert uploaded.source == "data:image/png;base64,aGk="
    assert uploaded.param == "messages[0].content[0].source.data"
    assert linked.source == "https://example.org/a.png"
    assert (assistant["content"], assistant["reasoning_content"]) == ("Wait.", "Hm")
    function = {"name": "look", "arguments": {"at": 1}}
    assert assistant["tool_calls"] == [{"id": "t1", "type": "function", "function": function}]
    assert tool == {"role": "tool", "tool_call_id": "t1", "content": "a dog"}
    assert again == {"role": "user", "content": [{"type": "text", "text": "And now?"}]}


def test_a_last_word_of_the_assistant_is_continued(
    fake: RunningServer, client: anthropic.Anthropic
) -> None:
    ask(client, messages=[*HI, {"role": "assistant", "content": "Well,"}])
    assert fake.engine.preprocessor.calls[-1]["continue_final_message"] is True


def test_why_it_stopped(
    fake: RunningServer, client: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ask(client, max_tokens=2).stop_reason == "max_tokens"
    answer = fake.engine._answer

    def stopped(request: Any) -> Iterator[Delta]:
        assert request.params.stop == ("!",)
        *rest, last = answer(request)
        yield from rest
        yield Delta(0, finish_reason="stop", stop_reason="!", usage=last.usage)

    monkeypatch.setattr(fake.engine, "_answer", stopped)
    message = ask(client, stop_sequences=["!"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "!")


def test_thinking_is_a_block(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(tokenizer)
    engine.answer = "<think>\nHm.\n</think>\n\nYes."
    config = ServerConfig(port=0, reasoning_parser="qwen3", api_key=("secret",))
    with running(engine, config) as server, client_of(server, "secret") as client:
        thought, answer = ask(client, thinking={"type": "disabled"}).content
        assert thought.type == "thinking"
        assert thought.thinking == "Hm."
        assert answer.type == "text"
        call = engine.preprocessor.calls[-1]
        assert call["chat_template_kwargs"] == {"enable_thinking": False}
        with pytest.raises(anthropic.AuthenticationError) as raised:
            ask(client_of(server, "wrong"))
        assert raised.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
        both = {"x-api-key": "secret", "authorization": "Bearer secret"}
        assert server.post("/v1/messages", {}, headers=both).status_code == 401


def test_errors_have_anthropics_form(fake: RunningServer, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        ask(client, model="other")
    fake.engine.submit_error = OverloadedError("full", code="queue_full")
    answer = fake.post("/v1/messages", {"messages": HI, "max_tokens": 5})
    assert answer.status_code == 503
    assert answer.json() == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "full"},
        "request_id": answer.headers["x-request-id"],
    }


def test_a_failure_in_the_middle(fake: RunningServer, client: anthropic.Anthropic) -> None:
    fake.engine.fail_after = 1
    with (
        client.messages.create(
            model="test-model", max_tokens=256, messages=HI, stream=True
        ) as stream,
        pytest.raises(anthropic.APIStatusError, match="the step failed"),
    ):
        list(stream)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]},
         "messages[0].content[0].source"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {
            "type": "base64", "media_type": "application/zip", "data": "aGk="}}]}]},
         "messages[0].content[0].source.data"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "title": 5, "source": {
            "type": "text", "media_type": "text/plain", "data": "x"}}]}]},
         "messages[0].content[0].title"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {
            "type": "content", "content": [{"type": "image"}]}}]}]},
         "messages[0].content[0].source.content[0].source"),
        ({"output_config": {"effort": "some"}}, "output_config.effort"),
        ({"output_format": {"type": "json_schema", "schema": 5}}, "output_format.schema"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]},
         "messages[0].content[0].source"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {
            "type": "file", "file_id": "file-vid-1"}}]}]}, "messages[0].content[0].source.file_id"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]},
         "messages[0].content[0].text"),
        ({"messages": [{"role": "assistant", "content": [{"type": "image"}]}]},
         "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x",
         "content": 5}]}]}, "messages[0].content[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
         "messages[0].content[0].tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [
            {"type": "tool_use", "id": "t", "name": "x", "input": [1]}]}]},
         "messages[0].content[0].input"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {
            "type": "url", "url": "/etc/passwd"}}]}]}, "messages[0].content[0].source.url"),
        ({"messages": []}, "messages"),
        ({"stop_sequences": [""]}, "stop"),
        ({"system": [5]}, "system"),
        ({"tools": [{"type": "robot_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "perhaps"}}, "tool_choice.type"),
        ({"container": "c"}, "container"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused(
    fake: RunningServer, fields: dict[str, Any], named: str
) -> None:
    answer = fake.post("/v1/messages", {"messages": HI, "max_tokens": 5} | fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert named in error["message"]


def test_what_has_no_effect_is_named(fake: RunningServer) -> None:
    body = {"messages": HI, "max_tokens": 5, "metadata": {"user_id": "me"}}
    answer = fake.post("/v1/messages", body)
    assert answer.headers["x-vlm-serve-ignored-fields"] == "metadata"


def test_the_tokens_of_a_prompt_are_counted(
    fake: RunningServer, client: anthropic.Anthropic
) -> None:
    asked: Any = {"model": "test-model", "messages": HI, "system": "Be brief", "tools": [TOOL]}
    before = fake.engine.num_submitted
    counted = client.messages.count_tokens(**asked)
    assert fake.engine.num_submitted == before
    usage = ask(client, **asked).usage
    parts = usage.cache_read_input_tokens, usage.cache_creation_input_tokens
    assert counted.input_tokens == usage.input_tokens + sum(each or 0 for each in parts)
    with pytest.raises(anthropic.NotFoundError):
        client.messages.count_tokens(**asked | {"model": "other"})


def test_a_document_is_text_between_tags(fake: RunningServer, client: anthropic.Anthropic) -> None:
    text = {"type": "text", "media_type": "text/plain", "data": "Once upon a time"}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png",
                                         "data": "aGk="}}  # fmt: skip
    blocks = {"type": "content", "content": [{"type": "text", "text": "A page"}, image]}
    ask(client, messages=[{"role": "user", "content": [
        {"type": "document", "source": text, "title": "Tales", "context": "For children"},
        {"type": "document", "source": blocks},
        {"type": "text", "text": "What is it about?"},
    ]}])  # fmt: skip
    (user,) = sent(fake)
    said = "".join(part.get("text", "[image]") for part in user["content"])
    assert said == (
        "<document>\n<title>Tales</title>\n<context>For children</context>\nOnce upon a time\n"
        "</document>\n<document>\nA page[image]\n</document>\nWhat is it about?"
    )
    (medium,) = fake.engine.preprocessor.calls[-1]["media"]
    assert medium.param == "messages[0].content[1].source.content[1].source.data"


def test_the_form_of_the_answer_and_effort(
    fake: RunningServer, client: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "schema": schema}
    asked: list[Any] = []
    submit = fake.engine.submit

    def noting(prompt: Any, params: Any, *rest: Any, **options: Any) -> Any:
        asked.append(params.structured_outputs)
        return submit(prompt, params, *rest, **options)

    monkeypatch.setattr(fake.engine, "submit", noting)
    ask(client, output_config={"format": form})
    assert asked[0].json == schema
    body = {"messages": HI, "max_tokens": 5, "output_config": {"effort": "high"}}
    answer = fake.post("/v1/messages", body)
    assert answer.headers["x-vlm-serve-ignored-fields"] == "output_config.effort"
    thinking = Thinking(efforts=("low", "medium", "xhigh"))
    traits = TemplateTraits(frozenset({"reasoning_effort"}), thinking=thinking)
    fake.engine.preprocessor.template_traits = traits
    assert "x-vlm-serve-ignored-fields" not in fake.post("/v1/messages", body).headers
    kwargs = fake.engine.preprocessor.calls[-1]["chat_template_kwargs"]
    assert kwargs == {"reasoning_effort": "xhigh"}


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/v1/messages", 405, "invalid_request_error"),
        ("POST", "/v1/messages/batches", 404, "not_found_error"),
        ("POST", "/v1/messages/count_tokens", 415, "invalid_request_error"),
        ("GET", "/v1/models/other", 404, "not_found_error"),
    ],
)
def test_errors_have_anthropics_form_on_every_route(
    fake: RunningServer, method: str, path: str, status: int, kind: str
) -> None:
    answer = fake.client.request(method, path, headers={"anthropic-version": "2023-06-01"})
    assert answer.status_code == status
    body = answer.json()
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert body["request_id"] == answer.headers["x-request-id"]


def test_models_as_anthropics_client_knows_them(
    fake: RunningServer, client: anthropic.Anthropic
) -> None:
    (model,) = client.models.list()
    assert (model.id, model.type, model.lifecycle) == ("test-model", "model", "active")
    assert client.models.retrieve("test-model").created_at.timestamp() == fake.service.state.created
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("other")
    assert fake.client.get("/v1/models").json()["object"] == "list"
