"""What agents and their client libraries send is answered, and what has no effect is named."""

from __future__ import annotations

import json
from typing import Any

import pytest
from serving import RunningServer, ok

from vlm_serve.preprocess.text.template import TemplateTraits, Thinking

IGNORED = "x-vlm-serve-ignored-fields"


def say(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def sent(fake: RunningServer) -> list[dict[str, Any]]:
    """The messages that the last request came to."""
    messages: list[dict[str, Any]] = fake.engine.preprocessor.calls[-1]["messages"]
    return messages


LATE = [say("system", "a"), say("user", "b"), say("system", "c")]


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/chat/completions", {"messages": LATE}, "messages[2].role"),
        ("/v1/chat/completions/render", {"messages": LATE}, "messages[2].role"),
        ("/tokenize", {"messages": LATE}, "messages[2].role"),
        (
            "/v1/messages",
            {"messages": LATE[1:], "system": "a", "max_tokens": 5},
            "messages[1].role",
        ),
        ("/v1/messages/count_tokens", {"messages": LATE[1:], "system": "a"}, "messages[1].role"),
        ("/v1/responses", {"instructions": "a", "input": LATE[1:]}, "input[1].role"),
        ("/v1/responses/input_tokens", {"input": LATE}, "input[2].role"),
    ],
)
def test_a_late_system_message_is_named(
    fake: RunningServer, path: str, body: dict[str, Any], named: str
) -> None:
    response = fake.post(path, body)
    ok(response)
    assert response.headers[IGNORED] == named
    assert sent(fake) == [say("system", "a"), say("user", "b"), say("user", "c")]


@pytest.mark.parametrize("role", ["system", "developer"])
def test_system_messages_over_a_real_template(server: RunningServer, role: str) -> None:
    one = ok(server.post("/tokenize", {"messages": [say("system", "a\n\nb"), say("user", "c")]}))
    two = [say("system", "a"), say(role, "b"), say("user", "c")]
    assert ok(server.post("/tokenize", {"messages": two}))["tokens"] == one["tokens"]
    for later in (say(role, "d"), say("user", "e")):
        two.append(later)
        ok(server.post("/v1/chat/completions", {"messages": two, "max_tokens": 1}))


RESULTS = [{"role": "tool", "tool_call_id": id, "content": id} for id in ("unknown", "c2", "c1")]


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        (
            "/v1/chat/completions",
            {"messages": [
                {"role": "assistant", "tool_calls": [
                    {"id": id, "function": {"name": "look", "arguments": "{}"}}
                    for id in ("c1", "c2")
                ]},
                *RESULTS,
            ]},
            "messages[1].tool_call_id",
        ),
        (
            "/v1/responses",
            {"input": [
                *({"type": "function_call", "call_id": id, "name": "look", "arguments": "{}"}
                  for id in ("c1", "c2")),
                *({"type": "function_call_output", "call_id": each["tool_call_id"],
                   "output": each["content"]} for each in RESULTS),
            ]},
            "input[2].call_id",
        ),
        (
            "/v1/messages",
            {"max_tokens": 5, "messages": [
                say("assistant", [
                    {"type": "tool_use", "id": id, "name": "look", "input": {}}
                    for id in ("c1", "c2")
                ]),
                say("user", [
                    {"type": "tool_result", "tool_use_id": each["tool_call_id"],
                     "content": each["content"]} for each in RESULTS
                ]),
            ]},
            "messages[1].content[0].tool_use_id",
        ),
    ],
)  # fmt: skip
def test_results_go_to_their_calls_and_unknown_ids_are_named(
    fake: RunningServer, path: str, body: dict[str, Any], named: str
) -> None:
    response = fake.post(path, body)
    ok(response)
    assert response.headers[IGNORED] == named
    assert [each["content"] for each in sent(fake)[1:]] == ["c1", "c2", "unknown"]


def call(arguments: Any, **others: Any) -> dict[str, Any]:
    function: Any = {"name": "look", "arguments": arguments}
    return {"id": "c1", "type": "function", "function": function} | others


@pytest.mark.parametrize(
    ("message", "read"),
    [
        ({"content": None, "refusal": "No."}, {"content": "No.", "refusal": "No."}),
        ({"content": "a", "refusal": None, "tool_calls": None}, {"content": "a"}),
        ({"content": None, "tool_calls": []}, {"content": None, "tool_calls": []}),
        ({}, {"content": None}),
        ({"content": "a", "tool_calls": [call('{"at": ')]}, {"content": "a", "tool_calls": []}),
        (
            {"tool_calls": [call('{"at": 1}', index=0), call('{"at', id="c2")]},
            {"content": None, "tool_calls": [call({"at": 1}, index=0)]},
        ),
        (
            {"content": None, "function_call": {"name": "look", "arguments": '{"at": 1}'}},
            {"content": None, "tool_calls": [call({"at": 1}, id="call_1")]},
        ),
        (
            {"content": "a", "function_call": {"name": "look", "arguments": '{"at'}},
            {"content": "a", "tool_calls": []},
        ),
        ({"content": "a", "function_call": None}, {"content": "a"}),
    ],
)
def test_earlier_answers_of_any_age_go_on(
    fake: RunningServer, message: dict[str, Any], read: dict[str, Any]
) -> None:
    history = [say("user", "hi"), {"role": "assistant", **message}, say("user", "go on")]
    ok(fake.post("/v1/chat/completions", {"messages": history}))
    assert sent(fake)[1] == {"role": "assistant", **read}


def test_a_cut_call_with_a_result_has_no_arguments(fake: RunningServer) -> None:
    result = {"role": "tool", "tool_call_id": "c1", "content": "failed"}
    answer = {"role": "assistant", "content": None, "tool_calls": [call('{"at": "Par')]}
    ok(fake.post("/v1/chat/completions", {"messages": [say("user", "hi"), answer, result]}))
    assert sent(fake)[1]["tool_calls"] == [call({})]
    older: Any = {"role": "function", "name": "look", "content": None}
    before: Any = {"role": "assistant", "function_call": {"name": "look", "arguments": '{"at'}}
    ok(fake.post("/v1/chat/completions", {"messages": [say("user", "hi"), before, older]}))
    assert sent(fake)[1]["tool_calls"] == [call({}, id="call_1")]
    assert sent(fake)[2] == {
        "role": "tool", "tool_call_id": "call_1", "name": "look", "content": "",
    }  # fmt: skip


@pytest.mark.parametrize("arguments", ["[1", "[1]", "{} {}", '{"a": 1}}', 5])
def test_arguments_that_no_limit_cut_are_refused_or_read(
    fake: RunningServer, arguments: Any
) -> None:
    history = [say("user", "hi"), {"role": "assistant", "tool_calls": [call(arguments)]}]
    answer = fake.post("/v1/chat/completions", {"messages": history})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[1].tool_calls[0].function.arguments"


def test_no_tools_with_auto_are_no_tools(fake: RunningServer) -> None:
    ok(fake.chat(tools=[], tool_choice="auto"))
    assert fake.chat(tools=[], tool_choice="required").status_code == 400


EFFORTS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"reasoning_effort": "E"}, "reasoning_effort"),
    ("/v1/responses", {"reasoning": {"effort": "E"}}, "reasoning.effort"),
    ("/v1/messages", {"output_config": {"effort": "E"}}, "output_config.effort"),
]


@pytest.mark.parametrize(("path", "fields", "name"), EFFORTS)
@pytest.mark.parametrize("known", [True, False])
def test_an_effort_is_mapped_or_named(
    fake: RunningServer, path: str, fields: dict[str, Any], name: str, known: bool
) -> None:
    variables = {"enable_thinking"} | ({"reasoning_effort"} if known else set())
    thinking = Thinking(efforts=("low", "medium", "xhigh") if known else ())
    fake.engine.preprocessor.template_traits = TemplateTraits(
        frozenset(variables), thinking=thinking
    )
    mapped = {"minimal": "low", "low": "low", "medium": "medium", "high": "xhigh", "max": "xhigh"}
    for effort in ("none", *mapped):
        given = json.loads(json.dumps(fields).replace('"E"', f'"{effort}"'))
        given |= {"max_tokens": 5} if path == "/v1/messages" else {}
        turns = {"input" if path == "/v1/responses" else "messages": [say("user", "hi")]}
        response = fake.post(path, turns | given)
        ok(response)
        kwargs = fake.engine.preprocessor.calls[-1]["chat_template_kwargs"] or {}
        assert kwargs.get("reasoning_effort") == (mapped.get(effort) if known else None)
        named = not known and effort not in ("none", "medium")
        assert response.headers.get(IGNORED) == (name if named else None)
        if effort == "none":
            assert kwargs == {"enable_thinking": False}
