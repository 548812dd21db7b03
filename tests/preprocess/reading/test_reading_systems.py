"""System messages of agents reach a template where it can render them."""

from __future__ import annotations

from typing import Any

import chat_templates
import pytest

from vlm_serve.preprocess.reading.conversation import Conversation
from vlm_serve.preprocess.reading.reader import read_conversation
from vlm_serve.preprocess.reading.turns import fit_systems
from vlm_serve.preprocess.text.template import ChatTemplate

PICTURE = {"type": "image_url", "image_url": {"url": "data:,a"}}


def say(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def read(*messages: dict[str, Any]) -> Conversation:
    return read_conversation("chat", {"messages": list(messages)})


def fitted(*messages: dict[str, Any]) -> Conversation:
    return fit_systems(read(*messages), anywhere=False)


def text(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": each} for each in texts]


@pytest.mark.parametrize(
    ("contents", "joined"),
    [
        (["a", "b", "c"], "a\n\nb\n\nc"),
        (["a", "", "c"], "a\n\nc"),
        (["", ""], ""),
        (["a", text("b", "c"), "d"], text("a\n\nb", "c\n\nd")),
        ([text("a"), text("b")], text("a\n\nb")),
        (
            [[PICTURE], "b"],
            [{"type": "image", "image": "image"}, *text("\n\n", "b")],
        ),
    ],
)
def test_leading_messages_are_one(contents: list[Any], joined: Any) -> None:
    roles = ["system", "developer", "system"]
    messages = [say(role, content) for role, content in zip(roles, contents, strict=False)]
    conversation = read(*messages, say("user", "hi"))
    assert conversation.messages == [say("system", joined), say("user", "hi")]
    assert conversation.system_places == ["messages[0].role"]
    assert conversation.ignored == []


@pytest.mark.parametrize(
    ("roles", "found", "named"),
    [
        # A reminder of Claude Code, as the last word and in the next turn.
        ("sus", "suu", [2]),
        ("susau", "suuau", [2]),
        # Results of gptme's tools.
        ("ssuas", "suau", [4]),
        ("ssuassu", "suauuu", [4, 5]),
        ("suatsa", "suatua", [4]),
        # Instructions between two words of the user.
        ("susu", "suu", [2]),
        ("usu", "suu", [1]),
    ],
)
def test_later_messages(roles: str, found: str, named: list[int]) -> None:
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    messages = [say(names[role], f"{at}.") for at, role in enumerate(roles)]
    conversation = fitted(*messages)
    assert "".join(message["role"][0] for message in conversation.messages) == found
    assert conversation.ignored == [f"messages[{at}].role" for at in named]
    texts = "".join(message["content"] for message in conversation.messages)
    assert all(texts.count(f"{at}.") == 1 for at in range(len(roles)))
    same = fit_systems(read(*messages), anywhere=True)
    assert [m["content"] for m in same.messages][-1] == messages[-1]["content"]
    assert same.ignored == []


def test_a_longer_conversation_keeps_its_beginning() -> None:
    """Whatever was the prompt of one request is the beginning of the next one's."""
    turns = [
        say("system", "0"),
        say("user", "1"),
        say("system", "2"),
        say("assistant", "3"),
        say("system", "4"),
        say("system", "5"),
        say("assistant", "6"),
        say("user", "7"),
        say("system", "8"),
    ]
    prompts = [fitted(*turns[:end]).messages for end in (3, 6, 9)]
    for shorter, longer in zip(prompts, prompts[1:], strict=False):
        assert longer[: len(shorter)] == shorter


def test_media_follow_their_messages() -> None:
    pictures = [{"type": "image_url", "image_url": {"url": f"data:,{n}"}} for n in range(3)]
    conversation = fitted(
        say("user", [pictures[0]]), say("system", [pictures[1]]), say("user", [pictures[2]])
    )
    assert [message["role"] for message in conversation.messages] == ["system", "user", "user"]
    assert [medium.source for medium in conversation.media] == ["data:,1", "data:,0", "data:,2"]


def test_instructions_and_developer_items_are_one() -> None:
    """Codex sends both."""
    items = [say("developer", text("b")), say("developer", "c"), say("user", "hi")]
    body = {"instructions": "a", "input": items}
    conversation = read_conversation("responses", body)
    assert conversation.messages == [say("system", text("a\n\nb\n\nc")), say("user", "hi")]


@pytest.mark.parametrize("name", ["qwen35", "qwen36", "qwen38", "qwen3vl", "qwen3_2507"])
def test_published_templates_render_agents(name: str) -> None:
    source = chat_templates.published(name) or pytest.skip(f"{name} is not beside the project")
    template = ChatTemplate(source)
    conversation = read(
        say("system", "One."),
        say("developer", "Two."),
        say("user", "Three."),
        say("assistant", "Four."),
        say("system", "Five."),
    )
    late = template.traits.late_systems
    conversation = fit_systems(conversation, anywhere=late)
    rendered = template.render(template.traits.fit(conversation))
    assert rendered.startswith("<|im_start|>system\n")
    assert "One.\n\nTwo." in rendered and rendered.count("<|im_start|>system") == 1 + late
    role = "system" if late else "user"
    assert f"<|im_start|>{role}\nFive.<|im_end|>\n<|im_start|>assistant\n" in rendered


def test_many_system_messages_take_time_in_proportion() -> None:
    messages = [
        say("user", "hi"),
        *(say("system", "x" * 100) for _ in range(4000)),
        say("user", ""),
    ]
    (system, *others) = fitted(*messages).messages
    assert len(system["content"]) == 4000 * 100 + 3999 * 2 and len(others) == 2
