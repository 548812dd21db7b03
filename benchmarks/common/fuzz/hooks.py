"""Hooks of schemathesis for `fuzz_api.py`: ids that exist, and forms that no schema describes.

A random value of a free field is almost never a grammar, a tool or a batch. So half of the bodies
get some of the fragments below. What a case gets follows from the case alone, as replays need.
"""

from __future__ import annotations

import copy
import json
import os
import random
from typing import Any

import schemathesis

IDS: dict[str, list[str]] = json.loads(os.environ["FUZZ_IDS"])
"""Name of a path's parameter or body's field -> ids that the server knows."""
SHARE = 0.5

_TOOL = {"name": "look", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
_FUNCTION = {"type": "function", "function": _TOOL}
_SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, "x"]}}, "required": ["a"]}
_TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<a>", "schema": _SCHEMA, "end": "</a>"}],
    "triggers": ["<a"],
}
_FORMAT_TAG = {
    "type": "structural_tag",
    "format": {"type": "json_schema", "json_schema": _SCHEMA},
}
_USER = {"role": "user", "content": "go on"}
_THOUGHT = [_USER, {"role": "assistant", "content": "<think>\nso", "reasoning": "well"}]
_CUT = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"a": "x'}}
_CALLED = [
    _USER,
    {"role": "assistant", "content": None, "tool_calls": [_CUT], "refusal": None},
    {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "seen"}]},
]
_SAMPLING: list[dict[str, Any]] = [
    {"thinking_token_budget": 0},
    {"thinking_token_budget": 3},
    {"regex": "[ab]{1,9}"},
    {"regex": "(((a{1,50}){1,50}){1,50}"},
    {"structured_outputs": {"json": _SCHEMA}},
    {"structured_outputs": {"choice": ["a", "b"]}},
    {"structured_outputs": {"grammar": 'root ::= "a" root | "b"'}},
    {"structured_outputs": {"structural_tag": json.dumps(_TAG)}},
    {"structured_outputs": {"structural_tag": _FORMAT_TAG}},
    {"structured_outputs": {"regex": "a", "json": _SCHEMA}},
    {"truncate_prompt_tokens": -1},
    {"truncate_prompt_tokens": 2, "prompt_logprobs": 1},
    {"include_stop_str_in_output": True, "stop": ["e"], "skip_special_tokens": False},
    {"top_p": 0, "top_k": 8.0, "max_tokens": -1, "seed": -1},
    {"logit_bias": {"5": 100, "7": -100}, "allowed_token_ids": [5, 6]},
    {"bad_words": ["a", "the"], "min_tokens": 3},
    {"n": 3, "logprobs": 2},
]
_CHAT: list[dict[str, Any]] = [
    *_SAMPLING,
    {"tools": [_FUNCTION], "tool_choice": "required"},
    {"tools": [_FUNCTION], "tool_choice": {"type": "function", "function": {"name": "look"}}},
    {"tools": [], "tool_choice": "auto", "parallel_tool_calls": False},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": _SCHEMA}}},
    {"response_format": _TAG},
    {"response_format": {"type": "json_object"}},
    {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 2},
    {"reasoning_effort": "xhigh", "thinking": {"type": "enabled", "budget_tokens": 1024}},
    {"messages": _THOUGHT, "continue_final_message": True},
    {"messages": _THOUGHT},
    {"messages": _CALLED, "tools": [_FUNCTION]},
    {"messages": [_USER, {"role": "system", "content": "s"}, {"role": "developer", "content": []}]},
    {"logprobs": True, "top_logprobs": 3, "n": 2},
    {"prediction": {"type": "content", "content": "go on"}},
    {"stream": True, "stream_options": {"include_usage": True}, "cache_report": True},
]
_RESPONSES: list[dict[str, Any]] = [
    {"thinking_token_budget": 2, "reasoning": {"effort": "high"}},
    {"text": {"format": {"type": "json_schema", "name": "s", "schema": _SCHEMA}}},
    {"tools": [{"type": "function", **_TOOL}], "tool_choice": "required"},
    {"tools": [{"type": "custom", "name": "patch"}], "tool_choice": "auto", "stream": True},
    {"tools": [{"type": "web_search"}, {"type": "local_shell"}], "tool_choice": "auto"},
    {"input": [{"role": "user", "content": "hi"}, {"type": "item_reference", "id": "msg_0"}]},
    {"input": [{"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "a"}]},
    {"store": True, "input": "again"},
    {"truncation": "auto", "input": "long " * 4000},
    {"include": ["reasoning.encrypted_content"], "stream": True},
]
_MESSAGES: list[dict[str, Any]] = [
    {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 1100},
    {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
    {"tools": [{"name": "look", "input_schema": _SCHEMA}], "tool_choice": {"type": "any"}},
    {"tools": [{"type": "bash_20250124", "name": "bash"}], "tool_choice": {"type": "auto"}},
    {"system": [{"type": "text", "text": "x-anthropic-billing-header: a; cch=1;"}]},
    {"messages": [_USER, {"role": "system", "content": "s"}]},
    {"output_config": {"effort": "max"}, "max_tokens": 100_000},
    {"output_format": {"type": "json_schema", "schema": _SCHEMA}},
]
_BATCHES: list[dict[str, Any]] = [
    {"endpoint": "/v1/chat/completions", "completion_window": "24h"},
    {"endpoint": "/v1/chat/completions", "completion_window": "30s", "metadata": {"a": "b"}},
    {"endpoint": "/v1/completions", "completion_window": "24h"},
]
FRAGMENTS: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": _CHAT,
    "/v1/chat/completions/render": _CHAT,
    "/v1/completions": [*_SAMPLING, {"prompt": ["a", "b"], "echo": True, "logprobs": 1}],
    "/inference/v1/generate": [{"sampling_params": each} for each in _SAMPLING],
    "/v1/responses": _RESPONSES,
    "/v1/responses/input_tokens": _RESPONSES,
    "/v1/messages": _MESSAGES,
    "/v1/messages/count_tokens": _MESSAGES,
    "/v1/batches": _BATCHES,
}


@schemathesis.hook
def map_path_parameters(context: Any, path_parameters: Any) -> Any:
    """Name something that exists in half of the cases."""
    rng = random.Random(repr(path_parameters))
    for name in path_parameters or {}:
        if name in IDS and rng.random() < SHARE:
            path_parameters[name] = rng.choice(IDS[name])
    return path_parameters


@schemathesis.hook
def map_query(context: Any, query: Any) -> Any:
    """Ask for pages in a part of the cases, and reset with flags."""
    path = context.operation.path
    rng = random.Random(repr((path, query)))
    if path in ("/v1/files", "/v1/batches") or path.endswith("input_items"):
        known = IDS["file_id" if "files" in path else "batch_id"]
        given = {"limit": "2", "after": rng.choice(known), "order": rng.choice(["asc", "DESC"])}
    elif path == "/reset_prefix_cache":
        given = {"reset_external": "true", "reset_running_requests": "0", "x": "1"}
    else:
        return query
    return (query or {}) | {name: given[name] for name in given if rng.random() < SHARE}


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """Lay fragments over the body in half of the cases."""
    fragments = FRAGMENTS.get(context.operation.path)
    rng = random.Random(repr(body))
    if not isinstance(body, dict) or fragments is None or rng.random() < SHARE:
        return body
    made = {name: value for name, value in body.items() if rng.random() < SHARE}
    if context.operation.path == "/v1/batches":
        made["input_file_id"] = rng.choice(IDS["file_id"])
    else:
        made |= {name: body[name] for name in _NEEDED if name in body}
    for fragment in rng.sample(fragments, rng.choice([1, 1, 2])):
        made |= copy.deepcopy(fragment)
    return made


_NEEDED = ("messages", "prompt", "input", "token_ids", "sampling_params", "max_tokens", "model")
