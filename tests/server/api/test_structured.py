"""Constrained answers over HTTP: whatever a model of no great wit says, it fits what was asked."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from engine_forms import FORMS
from serving import RunningServer, chat_body, running, wait_for
from sweeps import quick

from vlm_serve.engine.engine import Engine
from vlm_serve.options.config import EngineConfig
from vlm_serve.server.config import ServerConfig

SCHEMA = {
    "type": "object",
    "properties": {
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "color": {"enum": ["red", "blue"]},
    },
    "required": ["count", "color"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 6},
                "days": {"type": "integer", "minimum": 0, "maximum": 9},
            },
            "required": ["city", "days"],
        },
    },
}
STOP = {"type": "function", "function": {"name": "stop", "parameters": {"type": "object"}}}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


CONFIG = EngineConfig(
    device="cpu", block_size=16, cache_memory="48MiB", max_model_len=1024, max_num_seqs=4
)


@pytest.fixture(scope="module", params=FORMS)
def _server(request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    options = ServerConfig(port=0, idle_check=False, reasoning_parser="qwen3")
    with running(request.param("demo", CONFIG), options) as server:
        yield server


@pytest.fixture
def server(_server: RunningServer) -> Iterator[RunningServer]:
    yield _server
    wait_for(lambda: _server.service.requests.num_open == 0)
    _server.engine.check()


def ask(server: RunningServer, **fields: Any) -> Any:
    response = server.chat("What is it?", **({"max_tokens": 100, "temperature": 1} | fields))
    assert response.status_code == 200, response.text
    return response.json()


def contents(server: RunningServer, **fields: Any) -> list[str]:
    choices = ask(server, **fields)["choices"]
    assert {choice["finish_reason"] for choice in choices} == {"stop"}
    return [choice["message"]["content"] for choice in choices]


@pytest.mark.parametrize("strict", [False, True])
def test_every_choice_fits_the_schema(server: RunningServer, strict: bool) -> None:
    schema = JSON_SCHEMA["json_schema"] | {"strict": strict}  # type: ignore[operator]
    form = {"type": "json_schema", "json_schema": schema}
    for text in contents(server, response_format=form, n=3, seed=1, ignore_eos=strict):
        value = json.loads(text)
        assert value.keys() == {"count", "color"}
        assert 0 <= value["count"] <= 99
        assert value["color"] in ("red", "blue")


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": r"[a-c]{3}-\d"}, r"[a-c]{3}-\d"),
        ({"choice": ["héllo", 'a "b"']}, 'héllo|a "b"'),
        ({"grammar": 'root ::= "x" [0-9] "y"'}, "x[0-9]y"),
        ({"json": {"type": "boolean"}}, "true|false"),
    ],
)
def test_structured_outputs(server: RunningServer, form: dict[str, Any], pattern: str) -> None:
    for text in contents(server, structured_outputs=form, n=2, seed=3):
        assert re.fullmatch(pattern, text)


def test_a_regex_may_be_a_field_of_its_own(server: RunningServer) -> None:
    for text in contents(server, regex=r"[a-c]{3}-\d", n=2, seed=3):
        assert re.fullmatch(r"[a-c]{3}-\d", text)
    refused = server.chat("What is it?", regex="(a")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "regex")
    body = {"token_ids": [5], "sampling_params": {"regex": "(a"}}
    error = server.post("/inference/v1/generate", body).json()["error"]
    assert error["param"] == "sampling_params.regex"


def test_a_grammar_begins_behind_the_reasoning(server: RunningServer) -> None:
    body = {
        "chat_template_kwargs": {"enable_thinking": True},
        "structured_outputs": {"choice": ["yes", "no"]},
        "temperature": 0,
    }
    end = server.engine.preprocessor.tokenizer.encode("</think>")
    message = ask(server, **body, logit_bias={str(token): 100 for token in end[:1]})["choices"][0]
    if len(end) == 1:
        assert message["message"]["content"] in ("yes", "no")
    message = ask(server, **body, max_tokens=3)["choices"][0]
    assert message["finish_reason"] == "length"
    assert message["message"]["reasoning"]
    assert message["message"]["content"] is None
    message = ask(server, **body, max_tokens=200)["choices"][0]
    assert message["finish_reason"] == "stop"  # it may not end before it has answered
    assert message["message"]["reasoning"]
    assert message["message"]["content"] in ("yes", "no")


def test_a_grammar_begins_behind_a_thought_that_tokens_leave_open(server: RunningServer) -> None:
    encode = server.engine.preprocessor.tokenizer.encode
    turn = "<|im_start|>user\nGo.<|im_end|>\n<|im_start|>assistant\n<think>\n"
    for text, ends in ((turn, "length"), (turn + "\n</think>\n\n", "stop")):
        params = {"max_tokens": 9, "structured_outputs": {"choice": ["yes"]}, "temperature": 0}
        body = {"token_ids": encode(text), "sampling_params": params}
        (choice,) = server.post("/inference/v1/generate", body).json()["choices"]
        assert choice["finish_reason"] == ends
        decoded = server.engine.preprocessor.tokenizer.decode(choice["token_ids"])
        assert decoded.startswith("yes") == (ends == "stop")


@pytest.mark.parametrize(
    "parameters", [None, {}, {"type": "object", "properties": None, "required": None}]
)
def test_a_call_without_parameters_is_enforced(server: RunningServer, parameters: Any) -> None:
    tool = {"type": "function", "function": {"name": "stop", "parameters": parameters}}
    answer = ask(server, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "stop"


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"tool_choice": "required"}, {"weather", "stop"}),
        ({"tool_choice": "required", "parallel_tool_calls": False}, {"weather", "stop"}),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, {"weather"}),
    ],
)
def test_a_call_is_enforced(server: RunningServer, fields: dict[str, Any], names: set[str]) -> None:
    tools = [WEATHER, STOP]
    for choice in ask(server, tools=tools, n=3, seed=5, max_tokens=150, **fields)["choices"]:
        calls = choice["message"]["tool_calls"]
        assert choice["finish_reason"] in ("tool_calls", "length")
        if choice["finish_reason"] == "length":
            continue
        if fields.get("parallel_tool_calls") is False or names == {"weather"}:
            assert len(calls) == 1
        for call in calls:
            assert call["function"]["name"] in names
            arguments = json.loads(call["function"]["arguments"])
            if call["function"]["name"] == "weather":
                assert isinstance(arguments["city"], str)
                assert 0 <= arguments["days"] <= 9


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("parallel", [None, False])
def test_only_allowed_tools_are_called(server: RunningServer, parallel: bool | None) -> None:
    fields = {"tools": [WEATHER, STOP], "parallel_tool_calls": parallel}
    start = server.engine.preprocessor.tokenizer.encode("<tool_call>")
    push = {str(token): 100 for token in start[:1]} if len(start) == 1 else {}
    for mode, bias in (("required", {}), ("auto", push)):
        choice = allowed(mode, "stop")
        answer = ask(server, tool_choice=choice, logit_bias=bias, n=3, seed=2, **fields)
        if mode == "auto" and not push:
            continue  # nothing makes this model begin a call
        called = [call["function"]["name"] for each in answer["choices"]
                  for call in each["message"].get("tool_calls") or []]  # fmt: skip
        assert set(called) == {"stop"}


PAINT: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "paint",
        "parameters": {
            "type": "object",
            "$defs": {"size": {"type": "string", "enum": ["small", "large"]}},
            "properties": {
                "color": {"enum": ["red", "yellow"]},
                "size": {"$ref": "#/$defs/size"},
                "code": {"type": "string", "pattern": "^[A-Z]{2}[0-9]$"},
                "day": {"type": "string", "format": "date"},
                "layer": {"anyOf": [{"type": "integer"}, {"const": "top"}]},
            },
            "required": ["color", "size", "code", "day", "layer"],
        },
    },
}
PAINTED = {
    "color": "red|yellow",
    "size": "small|large",
    "code": "[A-Z]{2}[0-9]",
    "day": r"\d{4}-\d\d-\d\d",
    "layer": "-?[0-9]+|top",
}


def test_arguments_of_an_enforced_call_keep_their_schema(server: RunningServer) -> None:
    """Sampled hot, so that the grammar's white space around values comes up as well."""
    choice = {"type": "function", "function": {"name": "paint"}}
    fields = {"temperature": 5.0, "max_tokens": 200, "n": 4, "seed": 5}
    complete = 0
    for answer in ask(server, tools=[PAINT], tool_choice=choice, **fields)["choices"]:
        (call,) = answer["message"]["tool_calls"]
        if answer["finish_reason"] == "length":  # then it is sent as far as it came
            continue
        arguments = json.loads(call["function"]["arguments"])
        complete += arguments.keys() == PAINTED.keys()
        for name, value in arguments.items():
            assert re.fullmatch(PAINTED[name], str(value)), (name, value)
        assert isinstance(arguments.get("layer", 0), int) or arguments["layer"] == "top"
    assert complete


def test_an_enforced_call_is_streamed(server: RunningServer) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    chunks = server.stream_chat(tools=[WEATHER], tool_choice=choice, temperature=0, max_tokens=150)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    calls = [call for delta in deltas for call in delta.get("tool_calls") or []]
    assert calls[0]["function"]["name"] == "weather"
    arguments = "".join(call["function"]["arguments"] for call in calls)
    assert json.loads(arguments).keys() == {"city", "days"}


def test_biases_and_lists(server: RunningServer) -> None:
    tokenizer = server.engine.preprocessor.tokenizer
    token = tokenizer.encode("x")[0]
    assert set(contents_of(server, logit_bias={str(token): 100})) == {"x"}
    assert set(contents_of(server, allowed_token_ids=[token])) == {"x"}
    plain = contents_of(server)
    word = plain.split()[1]
    assert word not in contents_of(server, bad_words=[word])


def contents_of(server: RunningServer, **fields: Any) -> str:
    answer = ask(server, temperature=0, **({"max_tokens": 8} | fields))
    text: str = answer["choices"][0]["message"]["content"]
    return text


def test_the_prompt_is_reported(server: RunningServer) -> None:
    ask(server, max_tokens=2)
    body = ask(server, max_tokens=2, prompt_logprobs=1, return_token_ids=True, cache_report=True)
    rows = body["prompt_logprobs"]
    assert rows[0] is None
    assert len(rows) == len(body["prompt_token_ids"])
    for token, row in zip(body["prompt_token_ids"][1:], rows[1:], strict=True):
        assert row[str(token)]["logprob"] <= 0
        assert (row[str(token)]["rank"] == 1) == (len(row) == 1)
    again = ask(server, max_tokens=2, prompt_logprobs=1, cache_report=True)
    assert again["prompt_logprobs"] == rows
    report = again["cache_report"]
    # The last one kept is that of the last cut's last token: what is computed begins before it.
    assert report["boundary"] <= report["logprobs_reused"] < len(rows) - 1
    assert report["reason"] == "prompt_logprobs"


def test_an_echo_comes_with_the_logprobs_that_answers_have(server: RunningServer) -> None:
    fields = {"temperature": 0, "logprobs": 1, "max_tokens": 6}
    answer = server.post("/v1/completions", {"prompt": "The red", **fields}).json()["choices"][0]
    whole = {"prompt": "The red" + answer["text"], "echo": True, **fields, "max_tokens": 1}
    echoed = server.post("/v1/completions", whole).json()["choices"][0]
    tokens = answer["logprobs"]["tokens"]
    start = len(echoed["logprobs"]["tokens"]) - 1 - len(tokens)
    if echoed["logprobs"]["tokens"][start:-1] == tokens:  # else it is spelled in other tokens
        theirs = echoed["logprobs"]["token_logprobs"][start:-1]
        assert theirs == pytest.approx(answer["logprobs"]["token_logprobs"], abs=1e-3)
    assert echoed["logprobs"]["token_logprobs"][0] is None
    scored = server.post("/v1/completions", whole | {"max_tokens": 0}).json()["choices"][0]
    for name, values in scored["logprobs"].items():
        assert values == echoed["logprobs"][name][:-1]
    assert scored["text"] == whole["prompt"]
    # The end of the turn is a token with a probability and without a text.
    assert "".join(echoed["logprobs"]["tokens"]).removesuffix("<|im_end|>") == echoed["text"]


HOSTILE: list[dict[str, Any]] = [
    {"regex": "(a"},
    {"regex": "(?=a)b"},
    {"regex": "(" * 1000 + ")" * 1000},
    {"regex": "x" * 70_000},
    {"grammar": "root ::= nowhere"},
    {"grammar": "root ::= " + "(" * 30_000},
    {"grammar": "".join(f'r{i} ::= "a" r{i * 7 % 2000} | r0\n' for i in range(2000))},
    {"json": {"type": "zork"}},
    {"json": {"not": {}}},
    {"json": {"type": "array", "uniqueItems": True}},
    {"json": {"$ref": "http://127.0.0.1/schema"}},
    {"json": {"$ref": "#/$defs/nowhere"}},
    {"json": {"allOf": [{"type": "object"}, {"type": "string"}]}},
    {"json": "{"},
    {"choice": []},
    {"choice": ["x"] * 1025},
    {"structural_tag": {"type": "structural_tag", "format": {"type": "zork"}}},
]


@pytest.mark.parametrize("form", HOSTILE, ids=lambda form: str(form)[:40])
def test_a_hostile_grammar_is_refused(server: RunningServer, form: dict[str, Any]) -> None:
    response = server.chat(structured_outputs=form, max_tokens=1)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == "structured_outputs"
    assert "/project" not in error["message"]
    assert contents(server, structured_outputs={"choice": ["fine"]}) == ["fine"]


SLOW = "((a{1,100}){1,100}){1,100}"


@pytest.mark.parametrize("stream", quick([False, True], 1))
def test_a_grammar_that_is_slow_to_follow_ends_its_own_request(
    server: RunningServer, stream: bool
) -> None:
    """Each of its tokens takes longer than the one before; nobody waits for two hundred of them."""
    form = {"type": "structural_tag", "format": {"type": "regex", "pattern": SLOW}}
    fields: dict[str, Any] = {"max_tokens": 200, "min_tokens": 200, "response_format": form}
    if stream:
        error = server.stream_chat(**fields)[-1]["error"]
    else:
        response = server.chat(**fields)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
    assert (error["code"], error["param"]) == ("grammar_limit", "response_format")
    assert contents(server, structured_outputs={"regex": "fine"}) == ["fine"]


BAD = {"type": "object", "properties": {"x": {"contains": {"type": "null"}}}}
ZORK = {"type": "object", "properties": {"x": {"type": "zork"}}}


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def tool_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


@pytest.mark.parametrize("schema", [BAD, ZORK], ids=["refused", "not compiled"])
def test_an_error_names_the_field_that_the_grammar_came_from(
    server: RunningServer, schema: dict[str, Any]
) -> None:
    chat, plain = "/v1/chat/completions", "/v1/completions"
    forced: dict[str, Any] = {"tools": [tool_of(schema)], "tool_choice": "required"}
    tools = [{"name": "f", "input_schema": schema}]
    message: dict[str, Any] = {"max_tokens": 5, "tools": tools, "tool_choice": {"type": "any"}}
    text = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    both: dict[str, Any] = {"tools": [tool_of({})], "response_format": schema_format(BAD)}
    for path, body, param in (
        (chat, chat_body(structured_outputs={"json": schema}), "structured_outputs"),
        (chat, chat_body(response_format=schema_format(schema)), "response_format"),
        (chat, chat_body(**forced), "tools"),
        (chat, chat_body(**both), "response_format"),
        (plain, {"prompt": "x", "response_format": schema_format(schema)}, "response_format"),
        ("/v1/responses", {"input": "x", "text": text}, "text"),
        ("/v1/responses", {"input": "x", "text": text, "stream": True}, "text"),
        ("/v1/messages", chat_body(**message), None),
    ):
        response = server.post(path, body)
        assert response.status_code == 400, (path, body)
        assert response.json()["error"].get("param") == param, (path, body)


def test_ids_outside_the_vocabulary_are_refused(server: RunningServer) -> None:
    beyond = server.engine.spec.vocab_size
    for fields in ({"logit_bias": {str(beyond): 1}}, {"allowed_token_ids": [beyond]}):
        response = server.chat(**fields)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == next(iter(fields))
        assert str(beyond) in response.json()["error"]["message"]


def test_enforced_calls_in_the_form_of_hermes() -> None:
    """The grammar writes what the parser of that form reads."""
    options = ServerConfig(port=0, idle_check=False, tool_call_parser="hermes")
    complete = 0
    with running(Engine.from_checkpoint("demo", CONFIG), options) as server:
        for choice in ("required", {"type": "function", "function": {"name": "paint"}}):
            fields = {"tools": [PAINT], "tool_choice": choice, "max_tokens": 200}
            answer = ask(server, temperature=5.0, n=4, seed=5, **fields)
            for each in answer["choices"]:
                assert not each["message"].get("content")
                for call in each["message"]["tool_calls"]:
                    if each["finish_reason"] == "length":
                        continue
                    complete += 1
                    arguments = json.loads(call["function"]["arguments"])
                    assert arguments.keys() == PAINTED.keys()
                    for name, value in arguments.items():
                        assert re.fullmatch(PAINTED[name], str(value)), (name, value)
    assert complete


@pytest.mark.parametrize("tools", [{}, {"tools": [{"name": "look", "input_schema": {}}]}])
def test_a_form_that_nothing_satisfies_is_refused_beside_tools_too(
    server: RunningServer, tools: dict[str, Any]
) -> None:
    form = {"format": {"type": "json_schema", "schema": {"not": {}}}}
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "output_config": form}
    answer = server.post("/v1/messages", body | tools)
    assert answer.status_code == 400
    assert "# cannot be satisfied by any value" in answer.json()["error"]["message"]
