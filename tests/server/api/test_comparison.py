"""Diagnostics of the vendors: in what a request differs from an earlier one, and what that cost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from serving import RunningServer, ok, running

from vlm_serve.engine.engine import Engine
from vlm_serve.options.config import EngineConfig
from vlm_serve.server.config import ServerConfig

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
LONG = "You answer questions about small red houses. " * 8
TOOL = {"name": "find", "description": "Finds.", "input_schema": {"type": "object"}}
FUNCTION = {"type": "function", "name": "find", "parameters": {"type": "object"}}


def turns(*texts: str) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]


def message(previous: str | None = None, *texts: str, **fields: Any) -> dict[str, Any]:
    asked = {"previous_message_id": previous}
    said = turns(*(texts or ("Where is it?",)))
    return {"system": LONG, "messages": said, "max_tokens": 2, "diagnostics": asked, **fields}


def response(compared: str | None = None, *texts: str, **fields: Any) -> dict[str, Any]:
    said, options = turns(*(texts or ("Where is it?",))), {"comparison_response_id": compared}
    body = {"input": said, "instructions": LONG, "max_output_tokens": 2, **fields}
    return body if compared is None else body | {"prompt_cache_options": options}


def test_a_conversation_that_goes_on_has_no_divergence(server: RunningServer) -> None:
    first = ok(server.post(MESSAGES, message()))
    assert first["diagnostics"] is None, "asked for, and nothing to compare with"
    said = ("Where is it?", first["content"][0].get("text") or "There.", "Which colour?")
    later = ok(server.post(MESSAGES, message(first["id"], *said)))
    assert later["diagnostics"] is None and later["usage"]["cache_read_input_tokens"] > 0
    again = ok(server.post(MESSAGES, message(later["id"], *said)))
    assert again["diagnostics"] is None
    plain = message()
    del plain["diagnostics"]
    assert "diagnostics" not in ok(server.post(MESSAGES, plain))


@pytest.mark.parametrize(
    ("changed", "kind"),
    [
        ({"system": "You know nothing. " + LONG}, "system_changed"),
        ({"tools": [TOOL]}, "tools_changed"),
        ({"messages": turns("Where was it?", "There.", "Which colour?")}, "messages_changed"),
    ],
)
def test_what_has_changed_is_named_with_the_tokens_that_are_missed(
    server: RunningServer, changed: dict[str, Any], kind: str
) -> None:
    first = ok(server.post(MESSAGES, message()))
    usage = first["usage"]
    reusable = usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]
    said = ("Where is it?", "There.", "Which colour?")
    body = message(first["id"], *said) | changed
    whole = ok(server.post(MESSAGES, body))
    missed = reusable - whole["usage"]["cache_read_input_tokens"]
    assert whole["diagnostics"] == {
        "cache_miss_reason": {"type": kind, "cache_missed_input_tokens": missed}
    }
    assert missed > 0
    with server.client.stream("POST", MESSAGES, json=body | {"stream": True}) as stream:
        begun = next(line for line in stream.iter_lines() if '"message_start"' in line)
    assert f'"type":"{kind}"' in begun, "a stream tells it with its first event"


def test_marks_may_move_and_strings_may_become_blocks(server: RunningServer) -> None:
    first = ok(server.post(MESSAGES, message()))
    mark = {"cache_control": {"type": "ephemeral"}}
    body = message(first["id"], "Where is it?", "There.", "Which colour?")
    body["system"] = [{"type": "text", "text": LONG, **mark}]
    body["messages"][0]["content"] = [{"type": "text", "text": "Where is it?", **mark}]
    assert ok(server.post(MESSAGES, body))["diagnostics"] is None


def test_what_the_server_does_not_know_it_says(server: RunningServer) -> None:
    unknown = {"cache_miss_reason": {"type": "previous_message_not_found"}}
    assert ok(server.post(MESSAGES, message("msg_none")))["diagnostics"] == unknown
    first = ok(server.post(MESSAGES, message()))
    salted = message(first["id"], cache_salt="another")
    assert ok(server.post(MESSAGES, salted))["diagnostics"] == unknown
    kwargs = message(first["id"], chat_template_kwargs={"preserve_thinking": True})
    unavailable = {"cache_miss_reason": {"type": "unavailable"}}
    assert ok(server.post(MESSAGES, kwargs))["diagnostics"] == unavailable
    server.engine.flush()
    evicted = ok(server.post(MESSAGES, message(first["id"])))
    assert evicted["diagnostics"] == unavailable, "nothing has changed, and nothing is left"
    server.post("/v1/cache/flush", {})
    assert ok(server.post(MESSAGES, message(first["id"])))["diagnostics"] == unknown


def test_responses_are_compared_with_any_earlier_one(server: RunningServer) -> None:
    first = ok(server.post(RESPONSES, response()))
    assert "prompt_cache_diagnostics" not in first
    said = ("Where is it?", "There.", "Which colour?")

    def told(*texts: str, **fields: Any) -> dict[str, Any]:
        compared = fields.pop("compared", first["id"])
        body = response(compared, *texts, **fields)
        whole = ok(server.post(RESPONSES, body))["prompt_cache_diagnostics"]
        assert isinstance(whole, dict)
        return whole

    assert told(*said) == {"type": "cache_hit"}
    assert told(*said, compared="resp_0") == {"type": "comparison_response_not_found"}
    changed = told(*said, tools=[FUNCTION])
    assert (changed["type"], changed["reason"]) == ("cache_miss", "tools_changed")
    details = first["usage"]["input_tokens_details"]
    reusable = details["cached_tokens"] + details["cache_write_tokens"]
    assert changed["comparison_reusable_tokens"] == reusable >= changed["cache_missed_tokens"] > 0
    for other in (told("Where was it?"), told(*said, instructions="Be kind.")):
        assert (other["type"], other["reason"]) == ("cache_miss", "input_changed")
    effort = told(*said, reasoning={"effort": "none"})
    assert effort == {"type": "cache_hit"}, "this template reads it behind everything else"
    server.engine.flush()
    assert told(*said) == {"type": "unavailable"}


def test_a_stored_conversation_is_compared_with_its_past(server: RunningServer) -> None:
    first = ok(server.post(RESPONSES, response()))
    body = response(first["id"], "And the other?") | {"previous_response_id": first["id"]}
    assert ok(server.post(RESPONSES, body))["prompt_cache_diagnostics"] == {"type": "cache_hit"}


def test_an_interrupted_answer_can_be_named(server: RunningServer) -> None:
    body = message(max_tokens=1500, stream=True)
    with server.client.stream("POST", MESSAGES, json=body) as stream:
        begun = next(line for line in stream.iter_lines() if '"message_start"' in line)
    name = begun.partition('"id":"')[2].partition('"')[0]
    said = ("Where is it?", "There.", "Which colour?")
    assert ok(server.post(MESSAGES, message(name, *said)))["diagnostics"] is None


def test_the_vendors_clients_read_them(server: RunningServer) -> None:
    asked: dict[str, Any] = message(model="test-model", max_tokens=2)
    client = anthropic.Anthropic(base_url=server.url, api_key="none")
    first = client.messages.create(**asked)
    assert first.diagnostics is None
    changed = asked | {"system": "Another. " + LONG}
    changed["diagnostics"] = {"previous_message_id": first.id}
    with client.messages.stream(**changed) as stream:
        found = stream.get_final_message().diagnostics
    assert found is not None and found.cache_miss_reason is not None
    assert found.cache_miss_reason.type == "system_changed"
    assert found.cache_miss_reason.cache_missed_input_tokens > 0
    theirs = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    made = theirs.responses.create(**response(model="test-model"))
    compared: dict[str, Any] = response(made.id, model="test-model")
    with theirs.responses.create(**compared, stream=True) as events:
        told = [event.response for event in events if hasattr(event, "response")]
    assert len(told) == 3, "created, in progress, and its end"
    for each in told:
        assert each.prompt_cache_diagnostics is not None
        assert each.prompt_cache_diagnostics.type == "cache_hit"


@pytest.fixture(scope="module")
def keyed(checkpoint: Path) -> Iterator[RunningServer]:
    config = EngineConfig(dtype="float32", block_size=16, cache_memory="32MiB", max_model_len=2048)
    options = ServerConfig(port=0, idle_check=False, api_key=("alice", "bob"))
    with running(Engine.from_checkpoint(str(checkpoint), config), options) as server:
        yield server


def test_anothers_answer_is_as_unknown_as_none(keyed: RunningServer) -> None:
    def ask(key: str, path: str, body: Any) -> dict[str, Any]:
        return ok(keyed.post(path, body, headers={"authorization": f"Bearer {key}"}))

    for path, make, field in (
        (MESSAGES, message, "diagnostics"),
        (RESPONSES, response, "prompt_cache_diagnostics"),
    ):
        first = ask("alice", path, make())
        foreign, unknown = (ask("bob", path, make(name)) for name in (first["id"], "msg_none"))
        assert foreign[field] == unknown[field] and "not_found" in str(foreign[field])
        assert "not_found" not in str(ask("alice", path, make(first["id"]))[field])


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (MESSAGES, message("x" * 257), "diagnostics.previous_message_id"),
        (MESSAGES, message() | {"diagnostics": 5}, "diagnostics"),
        (RESPONSES, response("x" * 257), "prompt_cache_options.comparison_response_id"),
    ],
)
def test_a_bad_id_is_refused(server: RunningServer, path: str, body: Any, param: str) -> None:
    refused = server.post(path, body)
    assert refused.status_code == 400 and param in refused.text
