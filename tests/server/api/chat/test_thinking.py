"""Thoughts over HTTP: split off by default, ended by a budget, and behind them what is enforced."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chat_templates
import pytest
from conversation import png_url
from PIL import Image
from serving import RunningServer, chat_body, ok, running

from vlm_serve.engine.engine import Engine
from vlm_serve.errors import ConfigError
from vlm_serve.options.config import EngineConfig
from vlm_serve.server.config import ServerConfig

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
CONTINUED = {"add_generation_prompt": False, "continue_final_message": True}
USER = {"role": "user", "content": "hi"}


def engine_of(checkpoint: Path, **options: Any) -> Engine:
    config = EngineConfig(
        device="cpu", block_size=16, cache_memory="48MiB", max_model_len=1024, threads=1, **options
    )
    return Engine.from_checkpoint(str(checkpoint), config)


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[RunningServer]:
    engine = engine_of(checkpoint, thinking_budget_message="\nEnough.")
    with running(engine, ServerConfig(port=0)) as server:
        yield server


def message_of(response: Any) -> dict[str, Any]:
    message: dict[str, Any] = ok(response)["choices"][0]["message"]
    return message


def test_thoughts_are_split_off_by_default_and_end_at_their_budget(server: RunningServer) -> None:
    fields: dict[str, Any] = {"max_tokens": 60, "temperature": 0, "thinking_token_budget": 7}
    message = message_of(server.chat(**fields))
    assert message["reasoning"].endswith("\nEnough.")
    assert message["reasoning_content"] == message["reasoning"]
    assert "</think>" not in message["reasoning"] + (message["content"] or "")
    chunks = [chunk["choices"][0]["delta"] for chunk in server.stream_chat(**fields)]
    assert "".join(c.get("reasoning") or "" for c in chunks) == message["reasoning"]
    usage = ok(server.chat(**fields | {"max_tokens": 5}))["choices"][0]
    assert usage["message"]["content"] is None and usage["finish_reason"] == "length"


@pytest.mark.parametrize("budget", [0, 5])
@pytest.mark.parametrize("fields", [{"response_format": FORM}, {"tools": [TOOL]}])
def test_what_is_enforced_begins_behind_the_thought(
    server: RunningServer, fields: dict[str, Any], budget: int
) -> None:
    if "tools" in fields:
        fields = fields | {"tool_choice": "required", "parallel_tool_calls": False}
    given = fields | {"max_tokens": 200, "temperature": 1, "seed": 2}
    message = message_of(server.chat(**given, thinking_token_budget=budget))
    assert message["reasoning"].endswith("Enough.")
    if "tools" in fields:
        found = message["tool_calls"][0]["function"]["arguments"]
    else:
        found = message["content"]
    assert json.loads(found)["a"] in (1, 2)


def test_without_a_thought_all_is_enforced(server: RunningServer) -> None:
    off: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
    message = message_of(server.chat(response_format=FORM, max_tokens=100, **off))
    assert message.get("reasoning") is None and json.loads(message["content"])["a"] in (1, 2)


def test_stop_strings_wait_for_the_end_of_the_thought(server: RunningServer) -> None:
    every = [chr(c) for c in range(ord("a"), ord("a") + 15)]
    given: dict[str, Any] = {"max_tokens": 60, "temperature": 0, "thinking_token_budget": 12}
    choice = ok(server.chat(stop=["Enough", *every], **given))["choices"][0]
    assert "Enough." in choice["message"]["reasoning"]
    choice = ok(server.chat(stop="</think>", **given))["choices"][0]
    assert choice["stop_reason"] == "</think>"
    assert choice["message"]["reasoning"].rstrip().endswith("Enough.")


def test_a_continued_thought_goes_on_and_ends(server: RunningServer) -> None:
    for answer in ({"content": None, "reasoning": "Let me"}, {"content": "<think>\nLet me"}):
        messages = [USER, {"role": "assistant", **answer}]
        body = {"messages": messages, **CONTINUED, "max_tokens": 40, "temperature": 0}
        message = message_of(
            server.post("/v1/chat/completions", body | {"thinking_token_budget": 4})
        )
        assert message["reasoning"].endswith("Enough.")


def test_a_continued_message_keeps_its_white_space(server: RunningServer) -> None:
    messages = [USER, {"role": "assistant", "content": "def f():"}]
    body = {"messages": messages, **CONTINUED, "structured_outputs": {"regex": r"\n    return 1"}}
    assert message_of(server.post("/v1/chat/completions", body))["content"] == "\n    return 1"


def test_responses_take_the_budget(server: RunningServer) -> None:
    body = {"input": "hi", "max_output_tokens": 40, "thinking_token_budget": 3, "temperature": 0}
    output = ok(server.post("/v1/responses", body))["output"]
    assert output[0]["type"] == "reasoning"
    assert output[0]["content"][0]["text"].endswith("Enough.")
    refused = server.post("/v1/responses", body | {"thinking_token_budget": -1})
    assert refused.status_code == 400 and "thinking_token_budget" in refused.text


def test_a_rendered_request_can_be_sent_on(server: RunningServer) -> None:
    body = chat_body(
        "hi", max_tokens=9, temperature=0, seed=4, stop=["zz"], logit_bias={"5": 1.5}, n=2
    )
    rendered = ok(server.post("/v1/chat/completions/render", body))
    sampling = rendered["sampling_params"]
    assert sampling == {
        "max_tokens": 9,
        "temperature": 0,
        "seed": 4,
        "stop": ["zz"],
        "logit_bias": {"5": 1.5},
        "n": 2,
    }
    answer = ok(server.post("/v1/chat/completions", body | {"return_token_ids": True}))
    assert answer["prompt_token_ids"] == rendered["token_ids"]
    generated = ok(server.post("/inference/v1/generate", rendered))
    assert [c["token_ids"] for c in generated["choices"]] == [
        c["token_ids"] for c in answer["choices"]
    ]
    assert rendered["model"] == "test-model" and rendered["stream"] is False
    form = ok(server.post("/v1/chat/completions/render", body | {"response_format": FORM}))
    assert form["sampling_params"]["structured_outputs"] == {"json": SCHEMA}


def test_a_rendered_request_names_its_media(server: RunningServer) -> None:
    url = png_url(Image.new("RGB", (64, 64)))
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what?"}]
    messages = [{"role": "user", "content": parts}]
    rendered = ok(server.post("/v1/chat/completions/render", {"messages": messages}))
    (place,) = rendered["features"]["mm_placeholders"]["image"]
    inside = rendered["token_ids"][place["offset"] : place["offset"] + place["length"]]
    assert len(set(inside)) == 1 and len(rendered["features"]["mm_hashes"]["image"][0]) == 64
    bad = server.post("/v1/chat/completions/render", {"messages": [{"role": "x"}]})
    assert bad.status_code == 400 and "messages[0].role" in bad.json()["error"]["message"]


def test_a_template_file_and_its_variables_are_options(checkpoint: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.jinja"
    own.write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ tone }}:", "utf-8"
    )
    engine = engine_of(checkpoint, chat_template=str(own), chat_template_kwargs={"tone": "calmly"})
    with running(engine, ServerConfig(port=0)) as server:

        def text(**fields: Any) -> str:
            ids = ok(server.post("/v1/chat/completions/render", chat_body("hi", **fields)))
            found = ok(server.post("/detokenize", {"tokens": ids["token_ids"]}))
            return str(found["prompt"])

        assert text() == "user: hi\ncalmly:"
        assert text(chat_template_kwargs={"tone": "boldly"}) == "user: hi\nboldly:"
        message = message_of(server.chat(max_tokens=3))
        assert message.get("reasoning") is None, "the template knows no thoughts"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (None, "cannot be read: No such file"),
        ("{% for m in messages %}", "does not compile: .*endfor"),
        ("{{ raise_exception('no') }}", "does not render a user's message: .*no"),
        ("hello", "does not render a user's message"),
    ],
)
def test_a_bad_template_file_is_named(
    checkpoint: Path, tmp_path: Path, source: str | None, said: str
) -> None:
    path = tmp_path / "bad.jinja"
    if source is not None:
        path.write_text(source, "utf-8")
    with pytest.raises(ConfigError, match=f"^chat_template: .*bad.jinja.*{said}"):
        engine_of(checkpoint, chat_template=str(path))


def test_a_variable_that_the_server_sets_is_no_option(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="'messages' cannot be set"):
        engine_of(checkpoint, chat_template_kwargs={"messages": []})


def test_deepseeks_parser_takes_all_text_before_the_mark(checkpoint: Path, tmp_path: Path) -> None:
    silent = tmp_path / "silent.jinja"
    silent.write_text(chat_templates.PARTS_ALONE, "utf-8")
    config = ServerConfig(port=0, reasoning_parser="deepseek_r1")
    with running(engine_of(checkpoint, chat_template=str(silent)), config) as server:
        message = message_of(server.chat(max_tokens=20, thinking_token_budget=5, temperature=0))
        assert message["reasoning"]
