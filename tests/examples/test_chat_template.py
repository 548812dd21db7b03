"""The chat template follows the conventions of Qwen3.5."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import oracle
import pytest
from checkpoint_spec import CheckpointSpec
from jinja2.exceptions import TemplateError
from make_checkpoint import make_checkpoint

Message = dict[str, Any]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("text"), CheckpointSpec(vision_depth=0))


def render(path: Path, messages: list[Message], **options: Any) -> str:
    rendered = oracle.tokenizer(path).apply_chat_template(messages, tokenize=False, **options)
    assert isinstance(rendered, str)
    return rendered


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def test_generation_prompt_and_thinking_switch(path: Path) -> None:
    turn = "<|im_start|>user\nHi<|im_end|>\n"
    opened = turn + "<|im_start|>assistant\n<think>\n"
    assert render(path, [user(" Hi ")]) == turn
    assert render(path, [user("Hi")], add_generation_prompt=True) == opened
    closed = render(path, [user("Hi")], add_generation_prompt=True, enable_thinking=False)
    assert closed == opened + "\n</think>\n\n"


def test_media_parts(path: Path) -> None:
    parts = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "video_url"}]
    assert render(path, [{"role": "user", "content": parts}]) == (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>and"
        "<|vision_start|><|video_pad|><|vision_end|><|im_end|>\n"
    )


def test_thinking_is_dropped_before_the_last_question_and_kept_after_it(path: Path) -> None:
    call = {"function": {"name": "f", "arguments": {}}}
    messages = [
        user("one"),
        {"role": "assistant", "content": "A", "reasoning_content": "old"},
        {"role": "assistant", "content": "<think>\nold\n</think>\n\nB"},
        user("two"),
        {"role": "assistant", "reasoning_content": "new", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3"},
    ]
    assert render(path, messages) == (
        "<|im_start|>user\none<|im_end|>\n"
        "<|im_start|>assistant\nA<|im_end|>\n"
        "<|im_start|>assistant\nB<|im_end|>\n"
        "<|im_start|>user\ntwo<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nnew\n</think>\n\n"
        "<tool_call>\n<function=f>\n</function>\n</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n"
    )


def test_tools_and_calls(path: Path) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    arguments = {"text": "a\nb", "size": [1, 2], "deep": True}
    messages = [
        {"role": "system", "content": "Be brief."},
        user("go"),
        {
            "role": "assistant",
            "content": "Well.",
            "tool_calls": [
                {"function": {"name": "look", "arguments": arguments}},
                {"function": {"name": "look", "arguments": {}}},
            ],
        },
        {"role": "tool", "content": "x"},
        {"role": "tool", "content": "y"},
    ]
    text = render(path, messages, tools=[tool])
    system, _, rest = text.partition("<|im_end|>\n")
    assert system.startswith("<|im_start|>system\n# Tools\n") and system.endswith("\n\nBe brief.")
    assert '<tools>\n{"type": "function", "function": {"name": "look"' in system
    assert rest.partition("</think>\n\n")[2] == (
        "Well.\n\n<tool_call>\n<function=look>\n<parameter=text>\na\nb\n</parameter>\n"
        "<parameter=size>\n[1, 2]\n</parameter>\n<parameter=deep>\ntrue\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=look>\n</function>\n</tool_call>"
        "<|im_end|>\n<|im_start|>user\n<tool_response>\nx\n</tool_response>\n<tool_response>\ny\n"
        "</tool_response><|im_end|>\n"
    )


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([{"role": "robot", "content": "a"}], "Unknown role: robot"),
        ([user("a"), {"role": "system", "content": "b"}], "must come first"),
        ([{"role": "system", "content": [{"type": "image"}]}, user("a")], "cannot carry"),
        ([{"role": "user", "content": 5}], "string or a list"),
        ([{"role": "user", "content": [{"type": "file"}]}], "must be text, an image or a video"),
        (
            [
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
                }
            ],
            "must be an object",
        ),
    ],
)
def test_bad_messages_are_named(path: Path, messages: list[Message], complaint: str) -> None:
    with pytest.raises(TemplateError, match=complaint):
        render(path, messages)
