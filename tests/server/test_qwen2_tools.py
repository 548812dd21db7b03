"""Tool calls of Qwen2.5's and Qwen2.5-VL's templates over HTTP: JSON in `<tool_call>`, and no
thought."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from families import SPECS
from make_checkpoint import make_checkpoint
from serving import RunningServer, running

from vlm_serve.engine.engine import Engine
from vlm_serve.options.config import EngineConfig
from vlm_serve.server.config import ServerConfig

TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\nYou may call:\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' ~ (tool | tojson) }}{% endfor %}
{{- '\\n</tools>\\nAnswer a call as\\n<tool_call>\\n' }}
{{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' ~ message.content }}
{{- '\\n</tool_response><|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' ~ message.role ~ '\\n' ~ (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
{{- (call.function.arguments | tojson) ~ '}\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
TOOL = {
    "type": "function",
    "function": {
        "name": "click",
        "parameters": {
            "type": "object",
            "properties": {"x": {"enum": [1, 2]}, "y": {"enum": [3, 4]}},
            "required": ["x", "y"],
        },
    },
}
ASKED = [{"role": "user", "content": "Click."}]


@pytest.fixture(scope="module", params=["qwen2", "vl of qwen2.5"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    path: Path = make_checkpoint(tmp_path_factory.mktemp("tools"), SPECS[request.param])
    (path / "chat_template.jinja").write_text(TEMPLATE)
    config = EngineConfig(dtype="float32", block_size=16, cache_memory="32MiB")
    with running(
        Engine.from_checkpoint(str(path), config), ServerConfig(port=0, idle_check=False)
    ) as made:
        yield made


def ask(server: RunningServer, messages: list[Any], **fields: Any) -> dict[str, Any]:
    body = {"messages": messages, "tools": [TOOL], "temperature": 0, "max_tokens": 120} | fields
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_a_call_and_its_result(server: RunningServer) -> None:
    first = ask(server, ASKED, tool_choice="required", parallel_tool_calls=False)
    message = first["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "click" and not message.get("content")
    arguments = json.loads(call["function"]["arguments"])
    assert arguments["x"] in (1, 2) and arguments["y"] in (3, 4) and len(arguments) == 2
    assert not message.get("reasoning_content") and not message.get("reasoning")
    result = {"role": "tool", "tool_call_id": call["id"], "content": "Done."}
    second = ask(server, [*ASKED, message, result], tool_choice="none", max_tokens=8)
    told = second["choices"][0]["message"]
    assert isinstance(told["content"], str) and not told.get("tool_calls")
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= first["usage"]["prompt_tokens"] - 16
