"""Whatever form a template wants content in: no text is lost, and prompts are transformers'."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import chat_templates
import media_reference
import oracle
import pytest
from conversation import TOOLS, Messages, build, clip, frames, picture, say
from PIL import Image

from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.prepare import Preprocessor
from vlm_serve.preprocess.text.template import ChatTemplate, ContentForms

BOTH, TEXT, PARTS, ONE_PART = (
    ContentForms(text, parts)
    for text, parts in ((True, True), (True, False), (False, True), (False, False))
)
OWN = {
    "skips lists": (chat_templates.SKIPS_LISTS, TEXT, TEXT),
    "adds strings": (chat_templates.ADDS_STRINGS, TEXT, TEXT),
    "prints whatever": (chat_templates.PRINTS_WHATEVER, TEXT, TEXT),
    "dumps JSON": (chat_templates.DUMPS_JSON, TEXT, TEXT),
    "parts of users alone": (chat_templates.USERS_ALONE, BOTH, TEXT),
    "parts alone": (chat_templates.PARTS_ALONE, PARTS, PARTS),
    "first part": (chat_templates.FIRST_PART, TEXT, TEXT),
    "first part alone": (chat_templates.FIRST_PART_ALONE, ONE_PART, ONE_PART),
    "None beside calls": (chat_templates.NONE_BESIDE_CALLS, TEXT, TEXT),
}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
ROLES = ("system", "user", "assistant", "tool")
Make = Callable[[str], Preprocessor]


@pytest.fixture
def make(checkpoint: Path, tmp_path: Path) -> Iterator[Make]:
    """Preprocessors of checkpoints with other templates."""
    made: list[Preprocessor] = []

    def of(source: str) -> Preprocessor:
        path = chat_templates.with_template(checkpoint, tmp_path / str(len(made)), source)
        made.append(build(path))
        return made[-1]

    yield of
    for each in made:
        each.close()


def published(name: str) -> str:
    return chat_templates.published(name) or pytest.skip(f"{name} is not beside the project")


def around(role: str, content: Any) -> Messages:
    """A conversation with content of one role."""
    conversation: Messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "well", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "found"},
        {"role": "user", "content": "so"},
    ]
    conversation[ROLES.index(role)] |= {"content": content}
    return conversation


@pytest.mark.parametrize("name", OWN)
def test_forms_of_content_are_found_out(name: str) -> None:
    source, user, other = OWN[name]
    found = ChatTemplate(source).traits.content
    assert found == {"system": other, "user": user, "assistant": other, "tool": other}


def test_the_syntax_tree_decides_where_probes_are_refused() -> None:
    assert ChatTemplate(chat_templates.ALTERNATES).traits.content["tool"] == BOTH
    assert ChatTemplate(chat_templates.CAPITALS).traits.content["user"] == TEXT
    refuses = "{{ raise_exception('no') }}"
    assert ChatTemplate(refuses + "{{ messages[0].content }}").traits.content["user"] == TEXT
    for loop in (
        "{% for part in messages[0]['content'] %}{% endfor %}",
        "{% set said = messages[0].content %}{% for part in said | list %}{% endfor %}",
        "{% macro show(said) %}{% for part in said %}{% endfor %}{% endmacro %}"
        "{{ show(messages[0].content) }}",
    ):
        assert ChatTemplate(refuses + loop).traits.content["user"] == BOTH


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("name", OWN)
def test_no_text_is_lost(make: Make, name: str, role: str) -> None:
    made = make(OWN[name][0])
    whole = make_text(made, around(role, "one\ntwo"))
    assert whole.count("one\ntwo") == 1
    several = make_text(made, around(role, say("one", "two")["content"]))
    assert several in (whole, whole.replace("one\ntwo", "onetwo"))
    assert ("one\ntwo" in several) is not made.template_traits.content[role].parts


def make_text(made: Preprocessor, messages: Messages) -> str:
    return made.prepare(messages, tools=TOOLS).text


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("name", [*OWN, *chat_templates.PUBLISHED])
def test_one_text_part_is_the_string(make: Make, name: str, role: str) -> None:
    made = make(OWN[name][0] if name in OWN else published(name))
    for text in ("x", " a <|im_end|> b ", ""):
        plain = made.prepare(around(role, text))
        part = made.prepare(around(role, [{"type": "text", "text": text}]))
        assert plain.token_ids == part.token_ids
        assert plain.keys.block_keys == part.keys.block_keys
        assert plain.stable_end == part.stable_end


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("name", [*OWN, *chat_templates.PUBLISHED])
def test_empty_content_renders_alike(make: Make, name: str, role: str) -> None:
    made = make(OWN[name][0] if name in OWN else published(name))
    expected = made.prepare(around(role, "")).token_ids
    assert made.prepare(around(role, [])).token_ids == expected
    if name != "None beside calls":
        assert made.prepare(around(role, None)).token_ids == expected


@pytest.mark.parametrize("name", [*OWN, *chat_templates.PUBLISHED])
def test_calls_without_content_are_shown(make: Make, name: str) -> None:
    made = make(OWN[name][0] if name in OWN else published(name))
    messages = around("assistant", None)
    messages[2] |= {"reasoning_content": None, "name": None, "refusal": None}
    absent = around("assistant", None)
    del absent[2]["content"]
    for given in (messages, absent):
        text = make_text(made, given)
        assert "None" not in text
        assert text.split("found")[0].count("look") > make_text(made, given[:2]).count("look")
    thought = around("assistant", None)
    thought[2] |= {"tool_calls": None, "reasoning": "hm"}
    assert "None" not in make_text(made, thought)


@pytest.mark.parametrize("name", chat_templates.PUBLISHED)
def test_published_templates_render_as_transformers_does(
    make: Make, checkpoint: Path, name: str
) -> None:
    source = published(name)
    made = make(source)
    contents: list[Any] = ["one", say("one")["content"], say("one", "two")["content"], "", []]
    for role, content in itertools.product(ROLES, contents):
        assert_equal(made, checkpoint, source, around(role, content))
    assert_equal(made, checkpoint, source, around("assistant", None))


def test_a_part_that_is_written_unlike_a_string_stays_one(make: Make, checkpoint: Path) -> None:
    source = chat_templates.LINE_A_PART
    made = make(source)
    contents: list[Any] = ["one", say("one")["content"], say("one", "two")["content"], ""]
    for role, content in itertools.product(ROLES, contents):
        assert_equal(made, checkpoint, source, around(role, content))
    part, text = (make_text(made, [say("x")]), make_text(made, [{"role": "user", "content": "x"}]))
    assert part == text.replace("x", "x\n")


def assert_equal(made: Preprocessor, checkpoint: Path, source: str, messages: Messages) -> None:
    """transformers gets what it can render: calls as objects, no None, text joined for templates
    that take strings."""
    joined = []
    for message in messages:
        given = {key: value for key, value in message.items() if value is not None}
        text_alone = not made.template_traits.content[message["role"]].parts
        if text_alone and isinstance(content := given.get("content"), list):
            given["content"] = "\n".join(part["text"] for part in content)
        if "tool_calls" in given:
            function = {"name": "look", "arguments": {"at": 1}}
            given["tool_calls"] = [CALL | {"function": function}]
        joined.append(given)
    expected = oracle.tokenizer(checkpoint).apply_chat_template(
        joined, tools=TOOLS, chat_template=source, add_generation_prompt=True, return_dict=False
    )
    assert list(made.prepare(messages, tools=TOOLS).token_ids) == expected


@pytest.mark.parametrize("name", ["qwen35", "qwen36", "qwen38", "qwen3vl"])
def test_media_beside_text_keep_their_places(
    make: Make, checkpoint: Path, cat: Image.Image, name: str
) -> None:
    source = published(name)
    made = make(source)
    messages = [
        say("be brief", role="system"),
        say("a", picture(cat), "b", clip(frames(8)), "c"),
        say("d", "e", role="assistant"),
        say("f"),
    ]
    prompt = made.prepare(messages)
    expected = media_reference.inputs(checkpoint, messages, chat_template=source)
    assert list(prompt.token_ids) == expected["input_ids"][0].tolist()
    pads = made.media_token_ids
    inside = [index for span in prompt.spans for index in range(span.start, span.end)]
    assert inside == [i for i, token in enumerate(prompt.token_ids) if token in pads]


@pytest.mark.parametrize("role", ["system", "assistant", "tool"])
def test_media_where_only_text_is_taken_are_named(make: Make, cat: Image.Image, role: str) -> None:
    made = make(chat_templates.USERS_ALONE)
    messages = around(role, say("a", picture(cat))["content"])
    messages[1] = say(picture(cat), "go")
    index = ROLES.index(role)
    with pytest.raises(InvalidRequestError, match=f"only text from the role {role}") as caught:
        made.prepare(messages)
    assert caught.value.param == f"messages[{index}].content[1].image"
    assert len(made.prepare([say(picture(cat), "go")]).spans) == 1


@pytest.mark.parametrize("name", ["skips lists", "parts alone", "first part alone"])
def test_a_last_message_of_parts_can_be_continued(make: Make, name: str) -> None:
    made = make(OWN[name][0])
    given = [say("a"), say("b", "c", role="assistant")]
    prompt = made.prepare(given, add_generation_prompt=False, continue_final_message=True)
    assert prompt.text.endswith("<|im_start|>assistant\nbc" if "parts" in name else "b\nc")
    with pytest.raises(InvalidRequestError, match="no text to continue"):
        made.prepare(
            [say("a"), {"role": "assistant", "content": None}],
            add_generation_prompt=False,
            continue_final_message=True,
        )


@pytest.mark.parametrize("role", ["system", "user", "tool"])
def test_a_message_without_the_field_is_refused(make: Make, role: str) -> None:
    messages = around(role, None)
    del messages[ROLES.index(role)]["content"]
    with pytest.raises(InvalidRequestError) as caught:
        make(chat_templates.PARTS_ALONE).prepare(messages)
    assert caught.value.param == f"messages[{ROLES.index(role)}].content"
