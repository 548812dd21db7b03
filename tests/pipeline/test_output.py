"""What an answer shows, and the calls in it."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vlm_serve import EngineConfig, Pipeline, SamplingParams
from vlm_serve.errors import EngineClosedError

GREEDY = SamplingParams(temperature=0.0, max_tokens=60)
SHAPES = Path(__file__).parents[2] / "examples" / "media" / "shapes.png"
WEATHER = {
    "name": "get_weather",
    "description": "Returns the weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
TOOLS = [{"type": "function", "function": WEATHER}]


@pytest.fixture(scope="module")
def pipe() -> Iterator[Pipeline]:
    with Pipeline("demo", EngineConfig(cache_memory="64MiB", threads=1)) as made:
        yield made


def test_calls_are_read_as_over_http(pipe: Pipeline) -> None:
    question = "What is the weather in Paris?"
    out = pipe.chat(question, GREEDY, tools=TOOLS)
    (call,) = out.tool_calls
    assert call["type"] == "function" and call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    assert out.text == "" and out.choices[0].tool_calls == [call]
    assert "get_weather" in repr(out)
    messages = [{"role": "user", "content": question}, out.message]
    messages.append({"role": "tool", "tool_call_id": call["id"], "content": "21 degrees"})
    after = pipe.chat(messages, GREEDY, tools=TOOLS)
    assert after.usage.cached_tokens >= len(out.prompt_token_ids) - 16


def test_a_stream_has_calls_in_its_text(pipe: Pipeline) -> None:
    deltas = pipe.stream("What is the weather in Paris?", GREEDY, tools=TOOLS)
    assert "<tool_call>" in "".join(delta.text for delta in deltas)


def test_the_message_of_an_answer_gives_it_back(pipe: Pipeline) -> None:
    out = pipe.chat("Hello", GREEDY)
    assert out.message == {"role": "assistant", "content": out.text}
    thinking: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}}
    out = pipe.chat("Hello", GREEDY, **thinking)
    assert out.reasoning and out.message["reasoning"] == out.reasoning


def test_a_notebook_shows_one_line(pipe: Pipeline) -> None:
    out = pipe.chat(
        [
            {
                "role": "user",
                "content": [
                    {"type": "image", "image": SHAPES},
                    {"type": "text", "text": "What color is the star?"},
                ],
            }
        ],
        SamplingParams(temperature=0.0, n=2),
    )
    for shown in (repr(out), repr(out.choices[0])):
        assert len(shown) < 200 and "The star is red." in shown and "'stop'" in shown
    assert "choices=2" in repr(out) and f"prompt_tokens={out.usage.prompt_tokens}" in repr(out)
    long = pipe.chat("Hello", SamplingParams(max_tokens=400, ignore_eos=True, temperature=2.0))
    assert len(repr(long)) < 700
    assert repr(pipe).startswith("Pipeline('demo', max_model_len=")
    assert pickle.loads(pickle.dumps(out)).text == out.text
    with pytest.raises(TypeError, match="make one in each process"):
        pickle.dumps(pipe)


def test_a_forked_child_is_told_at_once(pipe: Pipeline) -> None:
    """The threads stayed with the parent, so it would wait for ever."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover
        said = "nothing"
        try:
            pipe.chat("Hello")
        except EngineClosedError as error:
            said = error.message
        pipe.close()
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    assert b"belongs to the process that made it" in os.read(reading, 1000)
    os.close(reading)
    assert os.waitpid(child, 0)[1] == 0
    assert pipe.chat("Hello", GREEDY).text, "the parent goes on"
