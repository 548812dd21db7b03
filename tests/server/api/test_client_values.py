"""Values as clients write them: whole numbers with a point, no limit, no tools."""

from __future__ import annotations

from typing import Any

import pytest
from serving import RunningServer

from vlm_serve.structured_outputs import StructuredOutputs

PROMPTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}]},
}
LIMITS = {"/v1/responses": "max_output_tokens"}


@pytest.mark.parametrize("path", PROMPTS)
def test_a_whole_number_may_have_a_point(fake: RunningServer, path: str) -> None:
    limit = LIMITS.get(path, "max_tokens")
    made = fake.post(path, PROMPTS[path] | {limit: 8.0, "top_k": 3.0, "seed": 5.0, "priority": 1.0})
    assert made.status_code == 200, made.text
    assert "x-vlm-serve-ignored-fields" not in made.headers
    params = fake.engine.latest_params
    found = (params.max_tokens, params.top_k, params.seed)
    assert found == (8, 3, 5)
    assert all(isinstance(value, int) for value in found)
    for bad in (8.5, "8", True):
        body = PROMPTS[path] | {"max_tokens": 9, "top_k": bad}
        refused = fake.post(path, body)
        assert refused.status_code == 400
        assert "top_k" in refused.json()["error"]["message"]


@pytest.mark.parametrize("path", PROMPTS)
def test_a_mass_of_zero_is_the_likeliest_token(fake: RunningServer, path: str) -> None:
    body = PROMPTS[path] | {LIMITS.get(path, "max_tokens"): 5}
    for zero in (0, 0.0):
        assert fake.post(path, body | {"top_p": zero, "temperature": 1}).status_code == 200
        assert fake.engine.latest_params.top_p == 0
    refused = fake.post(path, body | {"top_p": -0.1})
    assert refused.status_code == 400
    assert "top_p must be at least 0" in refused.json()["error"]["message"]


def test_numbers_in_lists_and_of_logprobs_may_have_a_point(fake: RunningServer) -> None:
    fields: dict[str, Any] = {
        "n": 2.0,
        "stop_token_ids": [3.0],
        "logprobs": True,
        "top_logprobs": 2.0,
    }
    assert fake.chat(**fields).status_code == 200
    params = fake.engine.latest_params
    assert (params.n, params.stop_token_ids, params.logprobs) == (2, (3,), 2)


@pytest.mark.parametrize("path", PROMPTS)
def test_minus_one_is_no_limit(fake: RunningServer, path: str) -> None:
    fake.engine.answer = "word " * 40
    made = fake.post(path, PROMPTS[path] | {LIMITS.get(path, "max_tokens"): -1})
    assert made.status_code == 200, made.text
    assert fake.engine.latest_params.max_tokens is None
    assert made.text.count("word") >= 40
    assert made.json().get("max_output_tokens") is None
    assert fake.post(path, PROMPTS[path] | {LIMITS.get(path, "max_tokens"): -2}).status_code == 400


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("tools", [{}, {"tools": []}, {"tools": None}])
def test_no_tools_to_choose_from(fake: RunningServer, path: str, tools: dict[str, Any]) -> None:
    messages = path == "/v1/messages"
    body = PROMPTS[path] | tools | ({"max_tokens": 5} if messages else {})
    made = fake.post(path, body | {"tool_choice": {"type": "auto"} if messages else "auto"})
    assert made.status_code == 200, made.text
    must = fake.post(path, body | {"tool_choice": {"type": "any"} if messages else "required"})
    assert must.status_code == 400
    assert must.json()["error"]["message"] == "tool_choice requires a call, but there are no tools"


def test_options_of_the_text_reach_the_engine(fake: RunningServer) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        options = {"include_stop_str_in_output": True, "skip_special_tokens": False}
        assert fake.post(path, PROMPTS[path] | options).status_code == 200
        params = fake.engine.latest_params
        assert (params.include_stop_str_in_output, params.skip_special_tokens) == (True, False)
    for path in ("/v1/responses", "/v1/messages"):
        for name, neutral in (("include_stop_str_in_output", False), ("skip_special_tokens", True)):
            body = PROMPTS[path] | {LIMITS.get(path, "max_tokens"): 5}
            assert fake.post(path, body | {name: neutral}).status_code == 200
            refused = fake.post(path, body | {name: not neutral})
            assert refused.status_code == 400
            assert name in refused.json()["error"]["message"]


def test_an_end_token_in_the_text_does_not_go_with_tools(fake: RunningServer) -> None:
    fields: dict[str, Any] = {"include_stop_str_in_output": True, "skip_special_tokens": False}
    tools = [{"type": "function", "function": {"name": "f"}}]
    refused = fake.chat(tools=tools, **fields)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "include_stop_str_in_output"
    for name, value in fields.items():
        assert fake.chat(tools=tools, **{name: value}).status_code == 200
    assert fake.chat(tools=tools, tool_choice="none", **fields).status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_regex_is_a_constraint(fake: RunningServer, path: str) -> None:
    assert fake.post(path, PROMPTS[path] | {"regex": "[ab]+"}).status_code == 200
    assert fake.engine.latest_params.structured_outputs == StructuredOutputs(regex="[ab]+")
    for fields in (
        {"regex": ""},
        {"regex": 5},
        {"regex": "a", "structured_outputs": {"regex": "a"}},
        {"regex": "a", "response_format": {"type": "json_object"}},
    ):
        refused = fake.post(path, PROMPTS[path] | fields)
        assert refused.status_code == 400, fields
        assert refused.json()["error"]["param"] == "regex"
    for other in ("/v1/responses", "/v1/messages"):
        body = PROMPTS[other] | {LIMITS.get(other, "max_tokens"): 5}
        refused = fake.post(other, body | {"regex": "a"})
        assert refused.status_code == 400
        assert "regex" in refused.json()["error"]["message"]


def test_a_regex_among_sampling_params(fake: RunningServer) -> None:
    path, body = "/inference/v1/generate", {"token_ids": [5, 6]}
    assert fake.post(path, body | {"sampling_params": {"regex": "[ab]+"}}).status_code == 200
    assert fake.engine.latest_params.structured_outputs == StructuredOutputs(regex="[ab]+")
    refused = fake.post(path, body | {"sampling_params": {"regex": ""}})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("sampling_params.regex ")


def test_equal_tools_give_equal_prompts_with_nulls_or_without(fake: RunningServer) -> None:
    schema = {"type": "object", "properties": None, "required": None}
    nulls = {"description": None, "strict": None, "parameters": schema}
    given = []
    for extra in (nulls, {"parameters": {"type": "object"}}):
        tool = {"name": "f"} | extra
        for path, listed in (
            ("/v1/chat/completions", {"type": "function", "function": tool}),
            ("/v1/responses", {"type": "function"} | tool),
        ):
            made = fake.post(path, PROMPTS[path] | {"tools": [listed]})
            assert made.status_code == 200, made.text
            given.append(fake.engine.preprocessor.calls[-1]["tools"])
    function = {"name": "f", "parameters": {"type": "object"}}
    assert given == [[{"type": "function", "function": function}]] * 4
