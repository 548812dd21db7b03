"""Anthropic's API over a real engine: counts of tokens with media, and answers of a given form."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest
from fake_engine import FakeEngine
from hostile_files import image_of
from pydantic import BaseModel
from serving import RunningServer, running
from tool_texts import CITY_TOOL

from vlm_serve.engine.engine import Engine
from vlm_serve.options.config import EngineConfig
from vlm_serve.preprocess.text.tokenizer import Tokenizer
from vlm_serve.server.config import ServerConfig

if TYPE_CHECKING:
    import anthropic


@pytest.fixture(autouse=True, scope="module")
def _client_library() -> None:
    """Import it when tests run: that takes a second, for which no collection waits."""
    global anthropic
    import anthropic


TOOL: Any = {
    "name": "get_weather",
    "description": "The weather",
    "input_schema": CITY_TOOL["function"]["parameters"],
}
PICTURE = {
    "type": "image",
    "source": {
        "type": "base64",
        "media_type": "image/png",
        "data": base64.b64encode(image_of("PNG", 96, 64)).decode(),
    },
}
DOCUMENT = {
    "type": "document",
    "title": "Notes",
    "source": {"type": "text", "media_type": "text/plain", "data": "The sky is green."},
}
HI: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[RunningServer]:
    config = EngineConfig(
        device="cpu", block_size=16, cache_memory="48MiB", max_model_len=1024, threads=1
    )
    engine = Engine.from_checkpoint(str(checkpoint), config)
    with running(engine, ServerConfig(port=0)) as server:
        yield server


def client_of(server: RunningServer) -> anthropic.Anthropic:
    return anthropic.Anthropic(
        base_url=server.url, api_key="none", max_retries=0, _strict_response_validation=True
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": HI},
        {"messages": HI, "system": "Be brief", "tools": [TOOL], "tool_choice": {"type": "any"}},
        {"messages": [{"role": "user", "content": [PICTURE, {"type": "text", "text": "What?"}]}]},
        {"messages": [{"role": "user", "content": [DOCUMENT, PICTURE]}]},
        {"messages": [*HI, {"role": "assistant", "content": "Well,"}]},
        {"messages": HI, "thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"messages": HI, "thinking": {"type": "disabled"}, "output_config": {"effort": "low"}},
    ],
)
def test_it_counts_what_a_message_prefills(server: RunningServer, fields: dict[str, Any]) -> None:
    with client_of(server) as client:
        counted = client.messages.count_tokens(model="test-model", **fields)
        usage = client.messages.create(model="test-model", max_tokens=1, **fields).usage
    assert usage.cache_read_input_tokens is not None
    assert usage.cache_creation_input_tokens is not None
    assert counted.input_tokens == (
        usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    )


def test_no_tokens_are_asked_for_and_the_prompt_is_cached(server: RunningServer) -> None:
    messages: Any = [{"role": "user", "content": "warm this " * 40}]
    asked: dict[str, Any] = {"model": "test-model", "max_tokens": 0, "messages": messages}
    with client_of(server) as client:
        made = client.messages.create(**asked)
        events = list(client.messages.create(**asked, stream=True))
    assert (made.content, made.stop_reason, made.usage.output_tokens) == ([], "max_tokens", 0)
    written = made.usage.cache_creation_input_tokens
    assert made.usage.cache_read_input_tokens == 0 and written
    assert [each.type for each in events] == ["message_start", "message_delta", "message_stop"]
    last = events[1]
    assert last.type == "message_delta" and last.usage.output_tokens == 0
    assert last.delta.stop_reason == "max_tokens" and last.usage.cache_read_input_tokens == written


def test_a_prompt_over_the_context_is_counted_all_the_same(server: RunningServer) -> None:
    messages: Any = [{"role": "user", "content": "a b " * 550}]
    with client_of(server) as client:
        assert client.messages.count_tokens(model="test-model", messages=messages).input_tokens
        with pytest.raises(anthropic.BadRequestError):
            client.messages.create(model="test-model", max_tokens=1, messages=messages)


def test_a_whole_message_request_can_be_counted(fake: RunningServer) -> None:
    body = {"messages": HI, "max_tokens": 5, "stream": True, "stop_sequences": ["."]}
    answer = fake.post("/v1/messages/count_tokens", body)
    assert answer.status_code == 200, answer.text
    assert set(answer.json()) == {"input_tokens"}
    ignored = answer.headers["x-vlm-serve-ignored-fields"]
    assert ignored == "max_tokens, stop_sequences"
    refused = fake.post("/v1/messages/count_tokens", body | {"min_tokens": 5})
    assert refused.status_code == 400


class City(BaseModel):
    name: Literal["Paris", "Rome"]
    large: bool


def test_the_clients_parser_gets_its_schema(server: RunningServer) -> None:
    with client_of(server) as client:
        parsed = client.messages.parse(
            model="test-model",
            max_tokens=200,
            messages=HI,
            output_format=City,
            thinking={"type": "enabled", "budget_tokens": 9},
        )
    assert parsed.parsed_output is not None
    assert parsed.parsed_output.name in ("Paris", "Rome")
    assert parsed.content[0].type == "thinking"


def test_a_bad_budget_of_thinking_is_named(server: RunningServer) -> None:
    body = {"max_tokens": 5, "messages": HI, "thinking": {"type": "enabled", "budget_tokens": "9"}}
    refused = server.post("/v1/messages", body)
    assert refused.status_code == 400
    assert "thinking.budget_tokens must be a number" in refused.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_errors_before_the_body_is_read_have_anthropics_form(
    tokenizer: Tokenizer, path: str
) -> None:
    config = ServerConfig(port=0, api_key=("secret",), max_body_size=1000)
    with running(FakeEngine(tokenizer), config) as server:
        big = server.post(path, {"x": "y" * 2000}, headers={"x-api-key": "secret"})
        unknown = server.post(path, {})
    assert (big.status_code, big.json()["error"]["type"]) == (413, "request_too_large")
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (401, "authentication_error")


def test_a_history_with_a_damaged_document_goes_on(server: RunningServer) -> None:
    source = {"type": "base64", "media_type": "application/pdf"}
    source["data"] = base64.b64encode(b"%PDF-1.7 and no more").decode()
    document = {"type": "document", "source": source}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [document]}
    use = {"type": "tool_use", "id": "c1", "name": "read", "input": {}}
    messages: list[Any] = [
        *HI,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    place = "messages[2].content[0].content[0].source.data"
    body = {"messages": messages, "max_tokens": 3}
    for path, more in (
        ("/v1/messages", {}),
        ("/v1/messages", {"stream": True}),
        ("/v1/messages/count_tokens", {}),
    ):
        response = server.post(path, body | more)
        assert response.status_code == 200
        named = response.headers["x-vlm-serve-ignored-fields"]
        assert named.removeprefix("max_tokens, ") == place
    refused = server.post(
        "/v1/messages", body | {"messages": [{"role": "user", "content": [document]}]}
    )
    assert refused.status_code == 400 and "is damaged" in refused.json()["error"]["message"]


def test_a_document_of_a_url_waits_on_other_threads(server: RunningServer) -> None:
    document = {"type": "document", "source": {"type": "url", "url": "http://127.0.0.1:9/a.pdf"}}
    body = {"messages": [{"role": "user", "content": [document]}], "max_tokens": 3}
    refused = server.post("/v1/messages", body)
    assert refused.status_code == 422
    assert "not on the public network" in refused.json()["error"]["message"]
