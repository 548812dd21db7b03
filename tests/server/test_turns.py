"""What a next turn reuses, and pictures in the results of tools, on a real engine."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import RunningServer, ok, running

from vlm_serve.engine.engine import Engine
from vlm_serve.options.config import EngineConfig
from vlm_serve.server.config import ServerConfig

CHAT = "/v1/chat/completions"
FILE = Path(__file__).parents[2] / "examples" / "media" / "shapes.png"
DATA = base64.b64encode(FILE.read_bytes()).decode()
URL = f"data:image/png;base64,{DATA}"
QUESTIONS = ("How many legs has a spider?", "And a cat?", "Name a color.", "Thank you!")
GREEDY: dict[str, Any] = {"temperature": 0, "cache_report": True}


@pytest.fixture(
    scope="module", params=["off", "auto"], ids=["no states in answers", "states in answers"]
)
def _server(request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    config = EngineConfig(
        device="cpu",
        block_size=16,
        cache_memory="64MiB",
        max_model_len=2048,
        threads=1,
        prefix_cache_answer_ends=request.param,
    )
    engine = Engine.from_checkpoint("demo", config)
    with running(engine, ServerConfig(port=0, idle_check=False)) as server:
        yield server


@pytest.fixture
def server(_server: RunningServer) -> Iterator[RunningServer]:
    _server.engine.flush()
    yield _server
    _server.engine.check()


def length(server: RunningServer, messages: list[Any], variables: dict[str, Any]) -> int:
    """How many tokens these messages are, without the beginning of an answer."""
    body = {"messages": messages, "add_generation_prompt": False}
    body |= {"chat_template_kwargs": variables}
    return int(ok(server.post("/tokenize", body))["count"])


@pytest.mark.parametrize(
    ("variables", "sent_back"),
    [
        ({"enable_thinking": False}, False),
        ({"enable_thinking": True}, False),
        ({"enable_thinking": True}, True),
        ({"enable_thinking": True, "preserve_thinking": True}, True),
    ],
    ids=["no thoughts", "thoughts dropped", "thoughts sent back", "thoughts preserved"],
)
def test_a_next_turn_reuses_all_up_to_the_last_question(
    server: RunningServer, variables: dict[str, Any], sent_back: bool
) -> None:
    messages: list[dict[str, Any]] = []
    asked: list[int] = []
    reports = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        options = GREEDY | {"max_tokens": 60, "chat_template_kwargs": variables}
        made = ok(server.post(CHAT, options | {"messages": messages}))
        report = made["cache_report"]
        reports.append(report)
        if asked:
            assert report["boundary"] >= asked[-1] - 1, (
                "the line break behind it is the next turn's"
            )
            assert report["reason"] in ("unseen", "no_snapshot")
        asked.append(length(server, messages, variables))
        said = made["choices"][0]["message"]
        answer = {"role": "assistant", "content": said["content"] or ""}
        if sent_back:
            answer["reasoning"] = said.get("reasoning")
        messages.append(answer)
    # The KV of a thought that comes again is there; so is its state, unless that is turned off.
    if variables.get("preserve_thinking"):
        assert reports[-1]["kv_boundary"] > asked[-2]
        states = server.engine.config.prefix_cache_answer_ends == "auto"
        assert (reports[-1]["boundary"] > asked[-2]) == states
        assert reports[-1]["answer_tokens"] > 0


TOOL: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris"]}},
    "required": ["city"],
}
FORMS: dict[str, dict[str, Any]] = {
    "auto": {},
    "forced call": {"tool_choice": "required"},
    "json": {"response_format": {"type": "json_schema", "json_schema": {"schema": TOOL}}},
    "choice": {"structured_outputs": {"choice": ["Paris", "Rome"]}},
    "regex": {"regex": "[0-9]{4,9}"},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("more", [{}, {"n": 2, "logprobs": True, "stop": ["\n\n"]}])
def test_a_next_turn_begins_with_the_whole_answer_of_any_form(
    server: RunningServer, form: str, more: dict[str, Any]
) -> None:
    """The form of an answer begins with what the template writes behind its thought."""
    tool = {"type": "function", "function": {"name": "look", "parameters": TOOL}}
    options = GREEDY | {"max_tokens": 200, "reasoning_effort": "high", "return_token_ids": True}
    options["chat_template_kwargs"] = {"preserve_thinking": True}
    if form in ("auto", "forced call"):
        options["tools"] = [tool]
    messages: list[Any] = [{"role": "system", "content": "Be brief. " * 200}]
    messages.append({"role": "user", "content": "What is the weather in Paris?"})
    before: list[int] = []
    for _ in range(3):
        made = ok(server.post(CHAT, options | FORMS[form] | more | {"messages": messages}))
        choice = made["choices"][0]
        assert made["prompt_token_ids"][: len(before)] == before
        if before and server.engine.config.prefix_cache_answer_ends == "auto":
            assert made["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0.98 * len(before)
        before = made["prompt_token_ids"] + choice["token_ids"]
        assert len(before) > 1000 and choice["finish_reason"] in ("stop", "tool_calls")
        said = choice["message"]
        calls = said.get("tool_calls") or ()
        assert said["reasoning"] and (calls or said["content"])
        messages.append({key: value for key, value in said.items() if value is not None})
        for call in calls:
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "rain"})
        if not calls:
            messages.append({"role": "user", "content": "And then?"})


def test_kept_thoughts_are_reused_as_claude_code_asks(server: RunningServer) -> None:
    keep = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    body: dict[str, Any] = {"max_tokens": 90, "temperature": 0, "context_management": keep}
    body |= {"thinking": {"type": "adaptive"}, "system": "Be brief. " * 200}
    messages: list[Any] = []
    before = 0
    for question in QUESTIONS[:3]:
        messages.append({"role": "user", "content": question})
        made = ok(server.post("/v1/messages", body | {"messages": messages}))
        use, content = made["usage"], made["content"]
        cached = use["cache_read_input_tokens"]
        if server.engine.config.prefix_cache_answer_ends == "auto":
            assert cached >= 0.98 * before
        written = use["cache_creation_input_tokens"]
        before = use["input_tokens"] + cached + written + use["output_tokens"]
        assert content[0]["type"] == "thinking" and content[0]["signature"]
        messages.append({"role": "assistant", "content": content})


def test_choices_and_seeds_over_a_picture_are_those_of_a_cold_run(server: RunningServer) -> None:
    content = [
        {"type": "image_url", "image_url": {"url": URL}},
        {"type": "text", "text": "What color is the star?"},
    ]
    body = {"messages": [{"role": "user", "content": content}], "cache_report": True}
    body |= {"max_tokens": 8, "n": 4, "logprobs": True, "top_logprobs": 3}
    for sampling in (
        {"temperature": 0},
        {"temperature": 1.5, "seed": 7},
        {"temperature": 3, "seed": 8},
    ):
        server.engine.flush()
        cold, hot = (ok(server.post(CHAT, body | sampling)) for _ in range(2))
        assert cold["cache_report"]["boundary"] == 0 < hot["cache_report"]["boundary"]
        assert hot["choices"] == cold["choices"]
        texts = {choice["message"]["content"] for choice in cold["choices"]}
        assert len(texts) == 1 or sampling["temperature"]
        assert len(texts) > 1 or sampling["temperature"] != 3


def test_pictures_in_the_results_of_tools_are_seen(server: RunningServer) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    question = {"role": "user", "content": "What color is the star?"}
    shown = [{"type": "image_url", "image_url": {"url": URL}}]
    chat = [
        question,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": shown},
    ]
    items = [
        question,
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c1",
            "output": [{"type": "input_image", "image_url": URL, "detail": "auto"}],
        },
    ]
    source = {"type": "base64", "media_type": "image/png", "data": DATA}
    result = [{"type": "image", "source": source}]
    blocks = [
        question,
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {}}],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c1", "content": result}],
        },
    ]
    first = ok(server.post(CHAT, GREEDY | {"messages": chat, "max_tokens": 16}))
    responded = ok(server.post("/v1/responses", GREEDY | {"input": items, "max_output_tokens": 16}))
    message = ok(server.post("/v1/messages", GREEDY | {"messages": blocks, "max_tokens": 16}))
    text = first["choices"][0]["message"]["content"]
    assert first["usage"]["prompt_tokens_details"]["image_tokens"] > 0
    assert responded["output"][0]["content"][0]["text"] == text
    assert message["content"][0]["text"] == text
    for then in (responded, message):
        assert (then["cache_report"]["media_encoded"], then["cache_report"]["reason"]) == (
            0,
            "full",
        )
