"""Tools that only OpenAI's servers run are left out and named; custom tools are served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from serving import RunningServer, chat_body, ok, running
from tool_texts import CALL, CITY_TOOL

from vlm_serve.engine.engine import Engine
from vlm_serve.options.config import EngineConfig
from vlm_serve.preprocess.text.tokenizer import Tokenizer
from vlm_serve.server.config import ServerConfig

IGNORED = "x-vlm-serve-ignored-fields"
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edit.", "format": GRAMMAR}
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}}
SERVER_TOOLS: list[dict[str, Any]] = [
    {"type": "web_search"},
    {"type": "web_search_preview"},
    {"type": "file_search", "vector_store_ids": ["v"]},
    {"type": "namespace", "name": "n", "tools": [LOOK]},
    {"type": "local_shell"},
    {"type": "mcp", "server_label": "x"},
    {"type": "image_generation"},
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "computer_use_preview"},
]
INPUT = 'Add "x"\nand under\\n'
PATCH_CALL = (
    f"<tool_call>\n<function=apply_patch>\n<parameter=input>\n{INPUT}\n</parameter>\n"
    "</function>\n</tool_call>"
)


def test_tools_of_openais_servers_are_left_out(fake: RunningServer) -> None:
    body: dict[str, Any] = {"input": "hi", "tools": [*SERVER_TOOLS, LOOK], "tool_choice": "auto"}
    for path in ("/v1/responses", "/v1/responses/input_tokens"):
        response = fake.post(path, body)
        ok(response)
        assert response.headers[IGNORED] == ", ".join(f"tools[{at}]" for at in range(9))
        (tool,) = fake.engine.preprocessor.calls[-1]["tools"]
        assert tool["function"]["name"] == "look"
    ok(fake.post("/v1/responses", body | {"tools": SERVER_TOOLS}))
    assert fake.engine.preprocessor.calls[-1]["tools"] is None


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "web_search"},
        {"type": "function", "name": "n"},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp", "server_label": "x"}]},
    ],
)
def test_a_choice_of_a_tool_that_is_left_out_is_refused(fake: RunningServer, choice: Any) -> None:
    body = {"input": "hi", "tools": [*SERVER_TOOLS, LOOK], "tool_choice": choice}
    answer = fake.post("/v1/responses", body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "tool_choice"
    assert "not among the tools" in error["message"] or "not implemented" in error["message"]


def test_a_custom_tool_takes_one_text(fake: RunningServer) -> None:
    fake.engine.answer = PATCH_CALL
    body: dict[str, Any] = {"input": "hi", "tools": [PATCH]}
    response = fake.post("/v1/responses", body)
    (item,) = ok(response)["output"]
    assert response.json()["tools"] == [PATCH]
    assert response.headers[IGNORED] == "tools[0].format"
    (tool,) = fake.engine.preprocessor.calls[-1]["tools"]
    assert tool["function"]["description"].startswith("Edit.\n\n")
    assert "start: /a+/" in tool["function"]["description"]
    assert tool["function"]["parameters"]["required"] == ["input"]
    assert item["type"] == "custom_tool_call" and item["id"].startswith("ctc_")
    assert (item["name"], item["input"]) == ("apply_patch", INPUT)
    output = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "done"}
    turns = [{"role": "user", "content": "hi"}, item, output]
    ok(fake.post("/v1/responses", body | {"input": turns}))
    _, answer, result = fake.engine.preprocessor.calls[-1]["messages"]
    assert answer["tool_calls"][0]["function"] == {
        "name": "apply_patch", "arguments": {"input": INPUT},
    }  # fmt: skip
    assert result == {"role": "tool", "content": "done", "tool_call_id": item["call_id"]}


def test_the_events_of_a_custom_call(fake: RunningServer) -> None:
    fake.engine.answer = PATCH_CALL
    with fake.client.stream(
        "POST", "/v1/responses", json={"input": "hi", "tools": [PATCH], "stream": True}
    ) as response:
        text = "".join(response.iter_text())
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds == [
        "created", "in_progress", "output_item.added", "custom_tool_call_input.delta",
        "custom_tool_call_input.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert events[3]["delta"] == events[4]["input"] == events[5]["item"]["input"] == INPUT
    assert events[3]["item_id"] == events[5]["item"]["id"] == events[2]["item"]["id"]


LONG_INPUT = 'say "ä\U0001f600\\\\ \\n"\n\ttab\x01 <b> {"input": "x"} \\u00e4 ' * 40
CALLS = {"qwen3_xml": PATCH_CALL.replace(INPUT, "%s"), "hermes": "<tool_call>\n%s\n</tool_call>"}


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("form", CALLS)
def test_a_long_input_comes_in_pieces(tokenizer: Tokenizer, form: Any, cut: bool) -> None:
    # The scripted engine has a text for every token: only escaped characters stay whole.
    given = LONG_INPUT if form == "hermes" else LONG_INPUT.replace("ä\U0001f600", "")
    call = json.dumps({"name": "apply_patch", "arguments": {"input": given}})
    engine = FakeEngine(tokenizer)
    engine.answer = CALLS[form].replace("%s", call if form == "hermes" else given)
    limit = {"max_output_tokens": 300} if cut else {}
    with running(engine, ServerConfig(port=0, idle_check=False, tool_call_parser=form)) as server:
        body = {"input": "hi", "tools": [PATCH], "stream": True} | limit
        with server.client.stream("POST", "/v1/responses", json=body) as response:
            text = "".join(response.iter_text())
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    deltas = [each["delta"] for each in events if each["type"].endswith("input.delta")]
    (done,) = [each["input"] for each in events if each["type"].endswith("input.done")]
    assert len(deltas) > 50 and all(deltas)
    assert "".join(deltas) == done == (done if cut else given)
    assert given.startswith(done) and len(done) > 100
    item = next(each["item"] for each in events if each["type"].endswith("item.done"))
    assert item["input"] == done
    assert item["status"] == ("incomplete" if cut else "completed")


def test_a_cut_custom_call_goes_on(fake: RunningServer) -> None:
    call = {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "Ad"}
    turns = [{"role": "user", "content": "hi"}, call | {"status": "incomplete"}]
    ok(fake.post("/v1/responses", {"input": turns}))
    assert [each["role"] for each in fake.engine.preprocessor.calls[-1]["messages"]] == ["user"]


def test_records_of_openais_servers_are_left_out(fake: RunningServer) -> None:
    search = {"type": "web_search_call", "id": "ws_1", "status": "completed"}
    response = fake.post("/v1/responses", {"input": [{"role": "user", "content": "hi"}, search]})
    ok(response)
    assert response.headers[IGNORED] == "input[1]"
    odd = fake.post("/v1/responses", {"input": [{"type": ["x"]}]})
    assert odd.status_code == 400 and odd.json()["error"]["param"] == "input[0].type"


def test_items_of_stored_responses_are_found_by_id(tokenizer: Tokenizer) -> None:
    """The AI SDK sends such a body in its second turn."""
    config = ServerConfig(port=0, idle_check=False, response_store="1MiB")
    with running(FakeEngine(tokenizer), config) as server:
        hi = {"role": "user", "content": "hi"}
        first = ok(server.post("/v1/responses", {"input": [hi]}))
        reference = {"type": "item_reference", "id": first["output"][0]["id"]}
        more = {"role": "user", "content": "more"}
        second = ok(server.post("/v1/responses", {"input": [hi, reference, more]}))
        answer = {"role": "assistant", "content": "Hello, world!"}
        assert server.engine.preprocessor.calls[-1]["messages"] == [hi, answer, more]
        given = server.client.get(f"/v1/responses/{second['id']}/input_items?order=asc").json()
        assert [item["type"] for item in given["data"]] == ["message"] * 3
        third = [hi, reference, more, {"id": second["output"][0]["id"]}, more]
        ok(server.post("/v1/responses/input_tokens", {"input": third}))
        messages = server.engine.preprocessor.calls[-1]["messages"]
        assert messages == [hi, answer, more, answer, more]
        for salt, item in (("other", reference), (None, reference | {"id": "msg_x"})):
            body = {"input": [hi, item]} | ({"cache_salt": salt} if salt else {})
            missing = server.post("/v1/responses", body)
            assert missing.status_code == 404
            assert missing.json()["error"]["param"] == "input[1]"


@pytest.mark.parametrize(
    "name",
    ["web_search_call.action.sources", "code_interpreter_call.outputs", "file_search_call.results",
     "computer_call_output.output.image_url", "message.input_image.image_url"],
)  # fmt: skip
def test_what_hosted_tools_would_include_is_named(fake: RunningServer, name: str) -> None:
    included = ["reasoning.encrypted_content", name]
    response = fake.post("/v1/responses", {"input": "hi", "include": included})
    assert ok(response) and response.headers[IGNORED] == "include[1]"


PICTURE = "data:image/png;base64,aGk="
RUNS: list[tuple[dict[str, Any], dict[str, Any], str, dict[str, Any], Any]] = [
    (
        {"type": "shell_call", "action": {"commands": ["ls"], "timeout_ms": 5}},
        {"type": "shell_call_output", "output": [{"stdout": "é", "outcome": {"type": "exit"}}]},
        "shell", {"commands": ["ls"], "timeout_ms": 5},
        '[{"stdout": "é", "outcome": {"type": "exit"}}]',
    ),
    (
        {"type": "local_shell_call", "action": {"type": "exec", "command": ["ls"], "env": {}}},
        {"type": "local_shell_call_output", "output": "a b"},
        "local_shell", {"type": "exec", "command": ["ls"], "env": {}}, "a b",
    ),
    (
        {"type": "apply_patch_call", "operation": {"type": "delete_file", "path": "a"}},
        {"type": "apply_patch_call_output", "status": "failed"},
        "apply_patch", {"type": "delete_file", "path": "a"}, "failed",
    ),
    (
        {"type": "computer_call", "action": {"type": "wait"}, "pending_safety_checks": []},
        {"type": "computer_call_output",
         "output": {"type": "computer_screenshot", "image_url": PICTURE}},
        "computer", {"type": "wait"}, [{"type": "image", "image": "image"}],
    ),
    (
        {"type": "tool_search_call", "execution": "client", "arguments": {"query": "a"}},
        {"type": "tool_search_output", "execution": "client", "tools": [{"name": "b"}]},
        "tool_search", {"query": "a"}, '[{"name": "b"}]',
    ),
    (
        {"type": "robot_call", "speed": 5}, {"type": "robot_call_output", "output": None},
        "robot", {"speed": 5}, "completed",
    ),
]  # fmt: skip


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run[2])
@pytest.mark.parametrize("field", ["call_id", "id"])
def test_calls_that_clients_ran_are_read_with_their_results(
    fake: RunningServer, run: Any, field: str
) -> None:
    call, outcome, name, arguments, told = run
    named = {field: "c1", "status": "completed"}
    user = {"role": "user", "content": "hi"}
    body = {"input": [user, call | named, {"status": "completed"} | outcome | {field: "c1"}, user]}
    response = fake.post("/v1/responses", body)
    assert ok(response) and IGNORED not in response.headers
    _, answer, result, _ = fake.engine.preprocessor.calls[-1]["messages"]
    assert answer["tool_calls"][0]["function"] == {"name": name, "arguments": arguments}
    assert result["content"] == told and result["role"] == "tool"
    assert result["tool_call_id"] == answer["tool_calls"][0]["id"] == "c1"


def test_calls_of_mcp_servers_have_their_results_and_other_records_are_left_out(
    fake: RunningServer,
) -> None:
    mcp = {"type": "mcp_call", "id": "m1", "server_label": "x", "name": "find"}
    mcp |= {"arguments": '{"a": 1}', "output": "it"}
    records: list[dict[str, Any]] = [
        {"type": "compaction", "encrypted_content": "x"},
        {"type": "mcp_list_tools", "id": "l", "server_label": "x", "tools": []},
        {"type": "code_interpreter_call", "id": "i", "code": "1"},
        {"type": "web_search_call", "id": "w"},
        {"type": "robot_call"},
    ]
    unfinished = {"type": "shell_call", "call_id": "s", "action": {}, "status": "incomplete"}
    user = {"role": "user", "content": "hi"}
    response = fake.post("/v1/responses", {"input": [user, mcp, *records, unfinished, user]})
    ok(response)
    assert response.headers[IGNORED] == ", ".join(f"input[{at}]" for at in range(2, 7))
    _, answer, result, _ = fake.engine.preprocessor.calls[-1]["messages"]
    assert answer["tool_calls"][0]["function"] == {"name": "find", "arguments": {"a": 1}}
    assert result["content"] == "it"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("answer", [PATCH_CALL, PATCH_CALL.replace("r=input", "r=x")])
def test_a_custom_tool_of_a_chat_takes_one_text(
    fake: RunningServer, stream: bool, answer: str
) -> None:
    fake.engine.answer = answer
    about = {key: PATCH[key] for key in ("name", "description")}
    form = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /a+/"}}
    tools = [{"type": "custom", "custom": about | {"format": form}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
        {"type": "custom", "custom": {"name": "apply_patch"}}]}}  # fmt: skip
    asked = chat_body(tools=tools, tool_choice=choice)
    if stream:
        call: dict[str, Any] = {}
        for chunk in fake.stream("/v1/chat/completions", asked):
            for part in chunk["choices"][0]["delta"].get("tool_calls", []):
                text = call.get("custom", {}).get("input", "") + part["custom"].pop("input")
                named = {**call.get("custom", {}), **part["custom"], "input": text}
                call |= {**part, "custom": named}
        assert chunk["choices"][0]["finish_reason"] == "tool_calls" and call.pop("index") == 0
    else:
        response = fake.post("/v1/chat/completions", asked)
        assert response.headers[IGNORED] == "tools[0].custom.format"
        (call,) = ok(response)["choices"][0]["message"]["tool_calls"]
    assert call["type"] == "custom" and call["custom"]["name"] == "apply_patch"
    assert "function" not in call
    text = call["custom"]["input"]
    assert text == (INPUT if answer == PATCH_CALL else "")
    (tool,) = fake.engine.preprocessor.calls[-1]["tools"]
    assert "start: /a+/" in tool["function"]["description"]
    history: list[Any] = [*asked["messages"], {"role": "assistant", "tool_calls": [call]}]
    history.append({"role": "tool", "tool_call_id": call["id"], "content": "done"})
    ok(fake.post("/v1/chat/completions", asked | {"messages": history}))
    (read,) = fake.engine.preprocessor.calls[-1]["messages"][1]["tool_calls"]
    assert read["function"] == {"name": "apply_patch", "arguments": {"input": text}}


@pytest.mark.parametrize("stream", [False, True])
def test_functions_of_the_older_form_are_called_in_it(fake: RunningServer, stream: bool) -> None:
    fake.engine.answer = CALL + "\n" + CALL[CALL.index("<tool_call>") :]
    asked = chat_body(functions=[CITY_TOOL["function"]], function_call="auto")
    if stream:
        chunks = fake.stream("/v1/chat/completions", asked)
        told = [chunk["choices"][0] for chunk in chunks]
        parts = [each["delta"].get("function_call") for each in told]
        parts = [part for part in parts if part]
        call = {"name": parts[0]["name"], "arguments": "".join(p["arguments"] for p in parts)}
        reason = told[-1]["finish_reason"]
        assert not any("tool_calls" in each["delta"] for each in told)
    else:
        choice = ok(fake.post("/v1/chat/completions", asked))["choices"][0]
        call, reason = choice["message"]["function_call"], choice["finish_reason"]
        assert "tool_calls" not in choice["message"]
    assert reason == "function_call" and call["name"] == "get_weather"
    assert json.loads(call["arguments"]) == {"city": "Paris", "days": 3}
    assert fake.engine.preprocessor.calls[-1]["tools"] == [CITY_TOOL]
    for choice, status in (({"name": "x"}, 400), ({"name": "get_weather"}, 200), ("none", 200)):
        answer = fake.post("/v1/chat/completions", asked | {"function_call": choice})
        assert answer.status_code == status
    assert answer.json()["choices"][0]["finish_reason"] == "stop"
    refused = fake.post("/v1/chat/completions", asked | {"functions": [{"name": 5}]})
    assert refused.status_code == 400 and "functions[0]" in refused.json()["error"]["message"]
    both = fake.post("/v1/chat/completions", asked | {"tools": [CITY_TOOL], "function_call": None})
    assert ok(both)["choices"][0]["finish_reason"] == "tool_calls"
    assert both.headers[IGNORED] == "functions"


def test_llama_cpps_form_of_a_schema_is_enforced(checkpoint: Path) -> None:
    """Also by /v1/responses, whose format has the same types."""
    config = EngineConfig(device="cpu", block_size=16, cache_memory="16MiB", max_model_len=512)
    schema = {"properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_object", "schema": {"type": "object"} | schema}
    off: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
    with running(Engine.from_checkpoint(str(checkpoint), config)) as server:
        chat = ok(server.post("/v1/chat/completions", chat_body(response_format=form, **off)))
        assert json.loads(chat["choices"][0]["message"]["content"]) == {"a": 1}
        body = {"input": "hi", "text": {"format": form}} | off
        text = ok(server.post("/v1/responses", body))["output"][-1]["content"][0]["text"]
        assert json.loads(text) == {"a": 1}
