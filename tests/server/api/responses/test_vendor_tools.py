"""Tools that only OpenAI's servers run are left out and named; custom tools are served."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_engine import FakeEngine
from serving import RunningServer, ok, running

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
