"""A message that is continued keeps its text, and an open thought stays open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import chat_templates
import pytest
from conversation import build

from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.prepare import Preprocessor
from vlm_serve.preprocess.text.family import begins_in_thought

Make = Callable[[str], Preprocessor]
USER = {"role": "user", "content": "hi"}
START = "<|im_start|>assistant\n"


@pytest.fixture
def make(checkpoint: Path, tmp_path: Path) -> Iterator[Make]:
    made: list[Preprocessor] = []

    def of(name: str) -> Preprocessor:
        source = chat_templates.published(name) or pytest.skip(f"{name} is not beside the project")
        path = chat_templates.with_template(checkpoint, tmp_path / name, source)
        made.append(build(path))
        return made[-1]

    yield of
    for each in made:
        each.close()


def text_of(made: Preprocessor, **message: Any) -> str:
    messages = [USER, {"role": "assistant", **message}]
    prompt = made.prepare(messages, add_generation_prompt=False, continue_final_message=True)
    return prompt.text[prompt.text.rindex(START) + len(START) :]


@pytest.mark.parametrize("name", ["qwen35", "qwen36", "qwen38"])
@pytest.mark.parametrize(
    "message",
    [
        {"content": None, "reasoning_content": "Let me"},
        {"content": None, "reasoning": "Let me"},
        {"content": "<think>\nLet me"},
        {"content": [{"type": "text", "text": "<think>Let me"}]},
    ],
)
def test_an_open_thought_stays_open(make: Make, name: str, message: dict[str, Any]) -> None:
    if isinstance(message["content"], list):
        message = {"content": message["content"][0]["text"]}
    text = text_of(make(name), **message)
    assert text == "<think>\nLet me"
    assert begins_in_thought(START + text, continued=True)


@pytest.mark.parametrize("name", ["qwen35", "qwen36", "qwen38"])
def test_a_closed_thought_stays_closed(make: Make, name: str) -> None:
    made = make(name)
    closed = "<think>\nLet me\n</think>\n\n"
    assert text_of(made, content="The star", reasoning_content="Let me") == closed + "The star"
    assert text_of(made, content="", reasoning_content="Let me").rstrip() == closed.rstrip()
    assert text_of(made, content="The star") == "<think>\n\n</think>\n\nThe star"


def test_where_a_template_knows_no_thought_it_is_text(make: Make) -> None:
    made = make("qwen3vl")
    assert text_of(made, content="<think>\nLet me") == "<think>\nLet me"
    with pytest.raises(InvalidRequestError, match="no text to continue"):
        text_of(made, content=None, reasoning_content="Let me")


@pytest.mark.parametrize("message", [{"content": None}, {"content": None, "reasoning": " "}])
def test_nothing_is_not_continued(make: Make, message: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="no text to continue"):
        text_of(make("qwen36"), **message)
