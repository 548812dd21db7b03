"""Prompts in the real vocabularies have transformers' ids, with templates of each published
behaviour and with the published ones where they lie."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import media_reference
import published_templates
import pytest
from conversation import TOOLS, Messages, build, clip, frames, picture, say
from PIL import Image
from published_layouts import LAYOUTS, write_files
from published_templates import TEXT_ALONE
from sweeps import quick

from vlm_serve.preprocess.prepare import Preprocessor

LAYOUT_OF = {
    "qwen35": "Qwen3.5-4B",
    "qwen3vl": "Qwen3-VL-2B",
    "qwen3_2507": "Qwen3-30B-A3B-2507",
    "wants strings": "Qwen3-Next-80B-A3B",
}
"""The layout that a template is tried with; Qwen3.6's for others."""
CALL = {
    "id": "1",
    "type": "function",
    "function": {"name": "look", "arguments": {"at": "the sea", "n": 3}},
}
CHATS: dict[str, Messages] = {
    "question": [{"role": "user", "content": "What is 2 + 2?"}],
    "system": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Why is the sky blue? Пожалуйста."},
    ],
    "turns": [
        {"role": "user", "content": "Name a colour."},
        {"role": "assistant", "content": "Blue.", "reasoning_content": "Sky, sea: blue."},
        {"role": "user", "content": "Another."},
    ],
    "thoughts inside": [
        {"role": "user", "content": "Name a colour."},
        {"role": "assistant", "content": "<think>\nSky.\n</think>\n\nBlue."},
        {"role": "user", "content": "Another."},
    ],
}
TOOL_CHATS: dict[str, Messages] = {
    "tools": [{"role": "user", "content": "Look at the sea."}],
    "calls": [
        {"role": "user", "content": "Look at the sea."},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "I must look.",
            "tool_calls": [CALL],
        },
        {"role": "tool", "tool_call_id": "1", "content": "waves"},
    ],
}


def media_chats() -> dict[str, Messages]:
    pictures = [Image.new("RGB", size, "navy") for size in ((321, 517), (64, 48), (700, 300))]
    return {
        "image": [say(picture(pictures[0]), "What is this?")],
        "images": [say("One", *map(picture, pictures), "of three?")],
        "video": [say(clip(frames(6, 96, 128)), "What happens?")],
        "image, then text": [
            say(picture(pictures[1]), "What is this?"),
            {"role": "assistant", "content": "The sea."},
            say("And now?"),
        ],
    }


Made = tuple[Preprocessor, Path, str]
Make = Callable[[str], Made]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a layout, without weights."""
    made: dict[str, Path] = {}

    def of(layout: str) -> Path:
        if layout not in made:
            made[layout] = tmp_path_factory.mktemp("prompts")
            write_files(made[layout], LAYOUTS[layout], published_templates.OWN["wants strings"])
        return made[layout]

    return of


@pytest.fixture(scope="module")
def make(folders: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The preprocessor of a layout with another template, the folder, and the template."""
    made: dict[str, Made] = {}

    def of(name: str) -> Made:
        source = published_templates.source_of(name)
        if name not in made:
            path = folders(LAYOUT_OF.get(name, "Qwen3.6-27B"))
            file = tmp_path_factory.mktemp("template") / "chat_template.jinja"
            file.write_text(source, encoding="utf-8")
            made[name] = build(path, template_file=file), path, source
        return made[name]

    yield of
    for preprocessor, *_ in made.values():
        preprocessor.close()


def assert_equal(made: Made, chat: Messages, **options: Any) -> None:
    preprocessor, path, source = made
    tools = options.pop("tools", None)
    prompt = preprocessor.prepare(chat, tools=tools, chat_template_kwargs=options)
    given = [dict(message) for message in chat]
    expected = media_reference.inputs(path, given, tools=tools, chat_template=source, **options)
    assert list(prompt.token_ids) == expected["input_ids"][0].tolist()


QUICK = (*published_templates.OWN, "qwen36", "qwen3vl")
"""The templates that every test of `make test` takes."""


@pytest.mark.parametrize("thinking", [None, True, False])
@pytest.mark.parametrize("template", quick(published_templates.NAMES, QUICK))
def test_conversations(make: Make, template: str, thinking: bool | None) -> None:
    made = make(template)
    options = {} if thinking is None else {"enable_thinking": thinking}
    for chat in CHATS.values():
        assert_equal(made, chat, **options)
    for chat in TOOL_CHATS.values():
        assert_equal(made, chat, tools=TOOLS, **options)


@pytest.mark.parametrize(
    "template",
    quick([each for each in published_templates.NAMES if each not in TEXT_ALONE], QUICK),
)
def test_media(make: Make, template: str) -> None:
    made = make(template)
    for chat in media_chats().values():
        assert_equal(made, chat)


@pytest.mark.parametrize("template", ["reads an effort", "qwen38"])
@pytest.mark.parametrize("effort", ["low", "medium", "xhigh"])
def test_efforts(make: Make, template: str, effort: str) -> None:
    assert_equal(make(template), CHATS["question"], reasoning_effort=effort)


@pytest.mark.parametrize("template", ["keeps thoughts", "qwen36", "qwen38"])
@pytest.mark.parametrize("keep", [True, False])
def test_kept_thoughts(make: Make, template: str, keep: bool) -> None:
    for chat in (*CHATS.values(), TOOL_CHATS["calls"]):
        assert_equal(make(template), chat, preserve_thinking=keep)


@pytest.mark.parametrize("template", published_templates.OWN)
def test_each_template_of_ours_has_its_behaviour(make: Make, template: str) -> None:
    made, *_ = make(template)
    traits = made.template_traits
    assert (not traits.content["user"].parts) is (template == "wants strings")
    assert bool(traits.thinking.efforts) is (template == "reads an effort")
    assert (not traits.late_systems) is (template == "refuses late system messages")
    text = made.prepare(CHATS["turns"]).text
    assert ("Sky, sea: blue." in text) is (template == "keeps thoughts")
