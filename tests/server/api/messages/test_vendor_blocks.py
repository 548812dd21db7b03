"""What only Anthropic's servers understand is left out and named; tools of clients are served."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from serving import RunningServer, ok

from vlm_serve.preprocess.text.template import TemplateTraits, Thinking

IGNORED = "x-vlm-serve-ignored-fields"
HI: Any = [{"role": "user", "content": "hi"}]
BILLING = "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch={};"
EDITS = [{"type": "clear_thinking_20251015", "keep": "all"}]


def asked(fake: RunningServer, **fields: Any) -> tuple[dict[str, Any], str | None]:
    """Return the call that reached the preprocessor, and the header."""
    response = fake.post("/v1/messages", {"messages": HI, "max_tokens": 9} | fields)
    ok(response)
    call: dict[str, Any] = fake.engine.preprocessor.calls[-1]
    return call, response.headers.get(IGNORED)


@pytest.mark.parametrize(
    ("edits", "kept", "named"),
    [
        (EDITS, True, None),
        ([{"type": "clear_thinking_20251015", "keep": {"type": "all"}}], True, None),
        ([*EDITS, {"type": "clear_tool_uses_20250919"}], True, "context_management"),
        ([{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 2}}],
         None, "context_management"),
        ([{"type": "clear_thinking_20251015"}], None, "context_management"),
        ([{"type": "clear_tool_uses_20250919", "keep": "all"}], None, "context_management"),
        ([5], None, "context_management"),
        ([], None, "context_management"),
    ],
)  # fmt: skip
def test_thoughts_are_kept_where_the_client_and_the_template_do(
    fake: RunningServer, edits: list[Any], kept: bool | None, named: str | None
) -> None:
    assert asked(fake, context_management={"edits": edits})[1] == "context_management"
    known = frozenset({"messages", "enable_thinking", "preserve_thinking"})
    fake.engine.preprocessor.template_traits = TemplateTraits(known)
    call, header = asked(fake, context_management={"edits": edits})
    assert (call["chat_template_kwargs"] or {}).get("preserve_thinking") is kept
    assert header == named
    own = {"preserve_thinking": False}
    call, _ = asked(fake, context_management={"edits": edits}, chat_template_kwargs=own)
    assert call["chat_template_kwargs"] == own


def test_any_signature_of_a_thought_or_none_is_taken(fake: RunningServer) -> None:
    block = {"type": "thinking", "thinking": "Hm"}
    rendered = []
    for signed in (block, block | {"signature": ""}, block | {"signature": "Ev" * 500}):
        content = [signed, {"type": "redacted_thinking", "data": "x"}]
        content.append({"type": "text", "text": "Yes."})
        messages = [*HI, {"role": "assistant", "content": content}, *HI]
        rendered.append(asked(fake, messages=messages)[0]["messages"])
    assert rendered[0] == rendered[1] == rendered[2]
    assert rendered[0][1]["reasoning_content"] == "Hm"


def test_thoughts_are_signed(fake: RunningServer) -> None:
    fake.engine.preprocessor.generation_prompt = "assistant: <think>\n"
    fake.engine.answer = "Hm.</think>Yes."
    fake.engine.preprocessor.template_traits = TemplateTraits(thinking=Thinking(marked=True))
    body = {"messages": HI, "max_tokens": 40}
    thought = ok(fake.post("/v1/messages", body))["content"][0]
    assert thought["thinking"] == "Hm." and re.fullmatch("[0-9a-f]{32}", thought["signature"])
    text = fake.post("/v1/messages", body | {"stream": True}).text
    events = [json.loads(each.split("data: ")[1]) for each in text.split("\n\n")[:-1]]
    mine = [event for event in events if event.get("index") == 0]
    assert mine[0]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
    kinds = [event["delta"]["type"] for event in mine[1:-1]]
    assert set(kinds[:-1]) == {"thinking_delta"} and kinds[-1] == "signature_delta"
    assert mine[-2]["delta"]["signature"] and mine[-1]["type"] == "content_block_stop"


def test_settings_of_thoughts_are_taken(fake: RunningServer) -> None:
    assert asked(fake, thinking={"type": "adaptive", "display": "omitted"})[1] is None


def test_the_billing_block_leaves_the_cache_warm(server: RunningServer) -> None:
    long = " ".join(f"Rule {n}." for n in range(90))
    cached = []
    for number in range(2):
        system = [{"type": "text", "text": BILLING.format(number)}, {"type": "text", "text": long}]
        body = {"messages": HI, "system": system, "max_tokens": 1}
        response = server.post("/v1/messages", body)
        cached.append(ok(response)["usage"]["cache_read_input_tokens"])
        assert response.headers[IGNORED] == "system[0]"
    plain = {"messages": HI, "system": long, "max_tokens": 1}
    cached.append(ok(server.post("/v1/messages", plain))["usage"]["cache_read_input_tokens"])
    assert cached[0] == 0 and cached[1] == cached[2] > 200


def test_blocks_of_anthropics_servers_are_left_out(fake: RunningServer) -> None:
    messages = [
        *HI,
        {"role": "assistant", "content": [
            {"type": "redacted_thinking", "data": "x"},
            {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {}},
            {"type": "web_search_tool_result", "tool_use_id": "s1", "content": []},
            {"type": "text", "text": "Yes."},
            {"type": "tool_use", "id": "c1", "name": "ToolSearch", "input": {"query": "a"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": [
                {"type": "tool_reference", "tool_name": "look"},
            ]},
        ]},
    ]  # fmt: skip
    call, named = asked(fake, messages=messages)
    _, answer, result = call["messages"]
    assert answer["content"] == "Yes." and "reasoning" not in answer
    assert [each["function"]["name"] for each in answer["tool_calls"]] == ["ToolSearch"]
    assert result["content"] == [{"type": "text", "text": "<tool>look</tool>"}]
    assert named == ", ".join(f"messages[1].content[{at}]" for at in range(3))


FOUND = {
    "type": "search_result",
    "source": "https://example.com/a",
    "title": "Hearts",
    "content": [{"type": "text", "text": "They are "}, {"type": "text", "text": "yellow."}],
    "citations": {"enabled": True},
}
FOUND_TEXT = (
    "<search_result>\n<source>https://example.com/a</source>\n<title>Hearts</title>\n"
    "They are yellow.\n</search_result>\n"
)


def test_search_results_are_texts_with_their_source(fake: RunningServer) -> None:
    use = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
    plain = {name: FOUND[name] for name in FOUND if name != "citations"}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [FOUND, plain]}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "So:"}, plain]},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    call, named = asked(fake, messages=messages)
    question, _, results = call["messages"]
    assert [part["text"] for part in question["content"]] == ["So:", FOUND_TEXT]
    assert [part["text"] for part in results["content"]] == [FOUND_TEXT, FOUND_TEXT]
    assert named == "messages[2].content[0].content[0].citations"
    wrong = plain | {"title": 5}
    body = {"messages": [{"role": "user", "content": [wrong]}], "max_tokens": 9}
    response = fake.post("/v1/messages", body)
    assert response.status_code == 400
    assert "messages[0].content[0].title must be text" in response.json()["error"]["message"]


def test_wanted_citations_of_a_document_are_named(fake: RunningServer) -> None:
    for form in ("text/plain", "text/markdown", None):
        source = {"type": "text", "media_type": form, "data": "Ann."}
        block = {"type": "document", "source": source, "citations": {"enabled": True}}
        call, named = asked(fake, messages=[{"role": "user", "content": [block]}])
        (part,) = call["messages"][0]["content"]
        assert part["text"] == "<document>\nAnn.\n</document>\n"
        assert named == "messages[0].content[0].citations"
    off = block | {"citations": {"enabled": False}}
    assert asked(fake, messages=[{"role": "user", "content": [off]}])[1] is None


def test_a_compaction_is_its_summary(fake: RunningServer) -> None:
    blocks: list[Any] = [
        {"type": "compaction", "content": "They said hi."},
        {"type": "compaction", "content": None},
        {"type": "text", "text": "Yes."},
    ]
    messages = [*HI, {"role": "assistant", "content": blocks}, *HI]
    call, named = asked(fake, messages=messages)
    answer = call["messages"][1]["content"]
    assert [part["text"] for part in answer] == ["They said hi.", "Yes."]
    assert named == "messages[1].content[1]"
    call, named = asked(fake, messages=[{"role": "user", "content": blocks}])
    assert [part["text"] for part in call["messages"][0]["content"]] == ["They said hi.", "Yes."]
    assert named == "messages[0].content[1]"


SERVER_TOOLS = [
    {"type": "web_search_20250305", "name": "web_search"},
    {"type": "web_fetch_20250910", "name": "web_fetch"},
    {"type": "code_execution_20250825", "name": "code_execution"},
    {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
    {"type": "mcp_toolset", "mcp_server_name": "x"},
    {"type": "computer_20250124", "name": "computer", "display_width_px": 9},
]


def test_tools_of_anthropics_servers_are_left_out(fake: RunningServer) -> None:
    function = {"name": "look", "input_schema": {"type": "object"}, "defer_loading": True}
    call, named = asked(fake, tools=[*SERVER_TOOLS, function], tool_choice={"type": "auto"})
    assert [tool["function"]["name"] for tool in call["tools"]] == ["look"]
    assert named == ", ".join(f"tools[{at}]" for at in range(6))
    call, _ = asked(fake, tools=SERVER_TOOLS, tool_choice={"type": "auto"})
    assert call["tools"] is None
    choice = {"type": "tool", "name": "web_search"}
    body = {"messages": HI, "max_tokens": 9, "tools": SERVER_TOOLS, "tool_choice": choice}
    answer = fake.post("/v1/messages", body)
    assert answer.status_code == 400
    assert "'web_search', which is not among the tools" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("tool", "required", "names"),
    [
        ({"type": "bash_20250124", "name": "bash"}, [], {"command", "restart"}),
        (
            {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
            ["command", "path"],
            {
                "command", "path", "file_text", "old_str", "new_str", "insert_line", "insert_text",
                "view_range",
            },
        ),
    ],
)  # fmt: skip
def test_tools_of_the_client_are_functions(
    fake: RunningServer, tool: dict[str, Any], required: list[str], names: set[str]
) -> None:
    fake.engine.answer = (
        f"<tool_call>\n<function={tool['name']}>\n<parameter=command>\nview\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    body = {"messages": HI, "max_tokens": 999, "tools": [tool]}
    answer = ok(fake.post("/v1/messages", body))
    (block,) = answer["content"]
    assert (block["type"], block["name"]) == ("tool_use", tool["name"])
    assert block["input"] == {"command": "view"} and answer["stop_reason"] == "tool_use"
    (made,) = fake.engine.preprocessor.calls[-1]["tools"]
    parameters = made["function"]["parameters"]
    assert parameters["properties"].keys() == names and parameters["required"] == required
    if len(names) > 2:
        commands = parameters["properties"]["command"]["enum"]
        assert commands == ["view", "create", "str_replace", "insert"]


def test_a_limit_beyond_the_context_ends_there(server: RunningServer) -> None:
    def prompt(repeats: int) -> tuple[list[dict[str, Any]], int]:
        messages = [{"role": "user", "content": "a " * repeats}]
        counted = ok(server.post("/v1/messages/count_tokens", {"messages": messages}))
        return messages, server.engine.max_model_len - counted["input_tokens"]

    messages, left = prompt(900)
    each = (left - prompt(901)[1]) or 1
    messages, left = prompt(900 + (left - 3) // each)
    assert 3 <= left < 3 + each
    for limit, reason in ((32000, "model_context_window_exceeded"), (2, "max_tokens")):
        body: dict[str, Any] = {"messages": messages, "max_tokens": limit}
        answer = ok(server.post("/v1/messages", body))
        assert answer["stop_reason"] == reason
        assert answer["usage"]["output_tokens"] == min(limit, left)
    for path, fields in (
        ("/v1/chat/completions", {"messages": messages, "max_tokens": 32000}),
        ("/v1/responses", {"input": messages, "max_output_tokens": 32000}),
    ):
        refused = server.post(path, fields)
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "context_length_exceeded"
    messages, _ = prompt(server.engine.max_model_len)
    refused = server.post("/v1/messages", {"messages": messages, "max_tokens": 5})
    assert refused.status_code == 400
    room = server.engine.max_model_len - 1
    message = refused.json()["error"]["message"]
    assert re.fullmatch(rf"prompt is too long: \d+ tokens > {room} maximum", message)


def test_unknown_members_of_output_config_are_named(fake: RunningServer) -> None:
    config = {"effort": "none", "task_budget": {"type": "tokens", "total": 20000}, "new": 1}
    _, named = asked(fake, output_config=config)
    assert named == "output_config.task_budget, output_config.new"


def test_the_betas_name_of_a_format_is_taken(server: RunningServer) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"enum": [1]}}}
    schema |= {"required": ["a"], "additionalProperties": False}
    body: dict[str, Any] = {"messages": HI, "max_tokens": 40, "thinking": {"type": "disabled"}}
    body["output_format"] = {"type": "json_schema", "schema": schema}
    answer = ok(server.post("/v1/messages", body))["content"][-1]["text"]
    assert json.loads(answer) == {"a": 1}
