"""Affinity keys: equal where prompts begin alike, from bytes alone."""

from __future__ import annotations

import base64
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm_serve.preprocess.identity.affinity import (
    KEY_BYTES,
    MAX_KEYS,
    affinity_keys_of_body,
    place_of,
)

PICTURE = "data:image/png;base64," + base64.b64encode(bytes(range(256)) * 20).decode()
TOOL = {"name": "find", "description": "Finds.", "parameters": {"type": "object"}}


def keys_of(body: Any, api: str = "chat", **others: str) -> tuple[bytes, ...]:
    return affinity_keys_of_body(api, body, **{"salt": "", "model": "m", **others})


def say(role: str, *parts: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": each} if isinstance(each, str) else each for each in parts]
    return {"role": role, "content": content}


def picture(url: str = PICTURE, **options: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **options}}


def chat(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": list(messages), **fields}


SYSTEM = say("system", "Be brief.")
CONVERSATION = chat(
    SYSTEM,
    say("user", picture(), "What is this?"),
    {"role": "assistant", "content": "A cat.", "reasoning_content": "Whiskers."},
    say("user", "And there?", picture(PICTURE + "AA")),
)


def test_keys_are_few_bytes_and_say_where_their_prefix_ends() -> None:
    keys = keys_of(CONVERSATION)
    assert len(keys) == 6, "four turns and two pictures"
    assert all(len(key) == KEY_BYTES for key in keys)
    places = [place_of(key) for key in reversed(keys)]
    assert [place.media for place in places] == [0, 1, 1, 1, 2, 2]
    assert [place.text_bytes for place in places] == [9, 9, 22, 37, 47, 47]
    assert places[1].tokens > places[0].tokens


def test_a_conversation_that_goes_on_has_the_keys_of_its_beginning() -> None:
    messages = CONVERSATION["messages"]
    whole = keys_of(CONVERSATION)
    for count in range(1, len(messages)):
        beginning = keys_of(chat(*messages[:count]))
        assert beginning == whole[len(whole) - len(beginning) :]


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 300), st.integers(0, 300))
def test_a_long_conversation_keeps_its_first_and_latest_keys(before: int, after: int) -> None:
    turns = [say("user", f"turn {number}") for number in range(before + after)]
    short, long = keys_of(chat(*turns[:before])), keys_of(chat(*turns))
    assert len(set(long)) == len(long) <= MAX_KEYS
    shared = set(short) & set(long)
    assert set(short[-8:]) <= shared
    if after < 8:
        assert short[0] == max(shared, key=lambda key: place_of(key).text_bytes)
    # Whatever of the beginning the long one still has, the short one has too, and nothing else.
    end = place_of(short[0]).text_bytes
    assert {key for key in long if place_of(key).text_bytes <= end} == shared
    deepest = max(place_of(key).text_bytes for key in shared)
    assert deepest >= end - 8 * (2 + after // 3), "about a quarter of what came behind is lost"


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 12_000), st.integers(1, 200))
def test_questions_about_one_text_share_most_of_its_keys(length: int, question: int) -> None:
    document = "".join(f"{number} " for number in range(length))
    one, other = (
        keys_of(chat(SYSTEM, say("user", document + letter * question))) for letter in "ab"
    )
    shared = set(one) & set(other)
    assert one[0] not in shared
    covered = max(place_of(key).text_bytes for key in shared)
    assert covered >= (len(document) + 9) * 7 / 8 - 1024
    assert len(one) <= MAX_KEYS


def test_the_largest_body_has_few_keys() -> None:
    keys = keys_of(chat(*(say("user", f"{number}" * 50) for number in range(4096))))
    assert MAX_KEYS // 2 < len(keys) <= MAX_KEYS
    assert len(keys_of({"prompt": "x" * (64 << 20)}, "completions")) <= MAX_KEYS


def different(one: dict[str, Any], other: dict[str, Any], **others: str) -> None:
    assert not set(keys_of(one)) & set(keys_of(other, **others))


def test_salt_model_tools_and_options_are_part_of_every_key() -> None:
    different(CONVERSATION, CONVERSATION, salt="other")
    different(CONVERSATION, CONVERSATION, model="other")
    different(CONVERSATION, CONVERSATION | {"tools": [{"type": "function", "function": TOOL}]})
    different(CONVERSATION, CONVERSATION | {"media_io_kwargs": {"video": {"num_frames": 8}}})
    different(CONVERSATION, CONVERSATION | {"mm_processor_kwargs": {"max_pixels": 65536}})
    different(CONVERSATION, CONVERSATION | {"chat_template_kwargs": {"persona": "pirate"}})


def test_what_asks_for_nothing_and_what_shows_at_the_end_changes_no_key() -> None:
    neutral = {
        "chat_template_kwargs": {"enable_thinking": False},
        "media_io_kwargs": {},
        "mm_processor_kwargs": {"max_pixels": None},
        "tools": [],
        "temperature": 0.5,
        "max_tokens": 7,
    }
    assert keys_of(CONVERSATION | neutral) == keys_of(CONVERSATION)
    marked = picture() | {"uuid": "1", "cache_control": {"type": "ephemeral"}}
    assert keys_of(chat(say("user", marked))) == keys_of(chat(say("user", picture())))


@pytest.mark.parametrize(
    "other",
    [
        picture(PICTURE[:-1] + "B"),
        picture(PICTURE + "A"),
        picture(detail="low"),
        picture("https://example.com/a.png"),
        {"type": "video_url", "video_url": {"url": PICTURE}},
    ],
)
def test_other_pictures_have_other_keys(other: dict[str, Any]) -> None:
    keys = keys_of(chat(SYSTEM, say("user", picture(), "hm")))
    changed = keys_of(chat(SYSTEM, say("user", other, "hm")))
    assert set(keys) & set(changed) == {keys[-1]}, "the system message alone"


def test_parts_of_a_text_are_one_text_and_borders_of_turns_count() -> None:
    assert keys_of(chat(say("user", "ab", "cd"))) == keys_of(
        chat({"role": "user", "content": "abcd"})
    )
    assert not set(keys_of(chat(say("user", "a"), say("user", "b")))) & set(
        keys_of(chat(say("user", "ab")))
    )
    different(chat(say("user", "a")), chat(say("assistant", "a")))
    first = chat({"role": "assistant", "content": "a", "reasoning": "b"})
    different(first, chat(say("assistant", "ab")))


CALL = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"x": 1}'}}

IN_CHAT = chat(
    SYSTEM,
    say("user", picture(), "What is this?"),
    {"role": "assistant", "content": "Let me see.", "reasoning": "Hm.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "a cat"},
    say("user", "And now?"),
    tools=[{"type": "function", "function": TOOL}],
)
IN_RESPONSES = {
    "instructions": "Be brief.",
    "tools": [{"type": "function", **TOOL}],
    "input": [
        {
            "role": "user",
            "content": [
                {"type": "input_image", "image_url": PICTURE},
                {"type": "input_text", "text": "What is this?"},
            ],
        },
        {
            "type": "reasoning",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
        },
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Let me see."}],
        },
        {"type": "function_call", "call_id": "c1", "name": "find", "arguments": '{"x":1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "a cat"},
        {"type": "message", "role": "user", "content": "And now?"},
    ],
}
IN_MESSAGES = {
    "system": "Be brief.",
    "tools": [
        {"name": "find", "description": "Finds.", "input_schema": {"type": "object"}},
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {
                    "type": "image",
                    "source": {
                        "type": "base64",
                        "media_type": "image/png",
                        "data": PICTURE.partition(",")[2],
                    },
                },
                {"type": "text", "text": "What is this?"},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "c1", "name": "find", "input": {"x": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "a cat"},
                {"type": "text", "text": "And now?"},
            ],
        },
    ],
}


def test_one_conversation_has_the_same_keys_in_every_form() -> None:
    expected = keys_of(IN_CHAT)
    assert len(expected) == 7
    assert keys_of(IN_RESPONSES, "responses") == expected
    assert keys_of(IN_MESSAGES, "messages") == expected
    text = {"input": "hi"}
    assert keys_of(text, "responses") == keys_of(chat(say("user", "hi")))
    continued = keys_of({**text, "previous_response_id": "resp_1"}, "responses")
    assert not set(continued) & set(keys_of(text, "responses"))


def test_documents_are_text_between_their_tags() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "All of it."}
    block = {"type": "document", "source": source, "title": "T"}
    body = {"messages": [{"role": "user", "content": [block]}]}
    text = "<document>\n<title>T</title>\nAll of it.\n</document>\n"
    assert keys_of(body, "messages") == keys_of(chat(say("user", text)))


def test_plain_prompts() -> None:
    ids = list(range(1000))
    keys = keys_of({"token_ids": ids}, "generate")
    assert keys == keys_of({"prompt": ids}, "completions")
    assert keys == keys_of({"prompt": [ids, [1]]}, "completions"), "of several the first"
    assert place_of(keys[0]).tokens == 1000
    longer = keys_of({"token_ids": [*ids, 7]}, "generate")
    assert set(keys[1:]) == set(longer[1:]) and keys[0] != longer[0]
    assert keys_of({"prompt": ["a", "b"]}, "completions") == keys_of({"prompt": "a"}, "completions")


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
NAMES = st.sampled_from(
    [
        "messages",
        "role",
        "content",
        "type",
        "text",
        "image_url",
        "url",
        "input",
        "tools",
        "source",
        "data",
        "system",
        "function",
        "name",
        "arguments",
        "token_ids",
        "prompt",
        "media_io_kwargs",
        "tool_calls",
        "user",
        "assistant",
        "tool_use",
    ]
)
VALUES = st.recursive(
    SCALARS | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=20,
)


@settings(deadline=None)
@given(VALUES, st.sampled_from(["chat", "completions", "responses", "messages", "generate", "?"]))
def test_no_body_raises(body: Any, api: str) -> None:
    keys = keys_of(body, api)
    assert isinstance(keys, tuple)
    assert all(isinstance(key, bytes) and len(key) == KEY_BYTES for key in keys)
    assert keys == keys_of(body, api)


def test_a_body_that_cannot_be_read_has_no_keys() -> None:
    good = chat(SYSTEM, say("user", "hi"))
    for fault in (None, {"role": "user"} | {"content": 3}, {"content": "x"}, say("user", {})):
        assert keys_of(chat(*good["messages"], fault, say("user", "more"))) == ()
    assert keys_of(chat()) == ()
    lone = keys_of(chat(say("user", "\ud800")))
    assert len(lone) == 1


def test_keys_are_the_same_in_every_process_and_need_no_torch() -> None:
    code = (
        "import sys\n"
        "from vlm_serve.preprocess.identity.affinity import affinity_keys_of_body as keys\n"
        "body = {'messages': [{'role': 'user', 'content': 'hi'}]}\n"
        "print(keys('chat', body, salt='', model='m')[0].hex())\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == keys_of(chat({"role": "user", "content": "hi"}))[0].hex()


def test_what_only_vendors_understand_changes_no_key() -> None:
    """Claude Code's billing block changes with every request."""

    def keys(number: int) -> tuple[bytes, ...]:
        blocks = [{"type": "text", "text": f"x-anthropic-billing-header: cch={number};"}]
        system = [*blocks, {"type": "text", "text": "Be brief. " * 300}]
        tools = [{"type": "web_search_20250305", "name": f"search{number}"}]
        turns = [say("user", "hi")]
        return keys_of({"system": system, "messages": turns, "tools": tools}, "messages")

    assert keys(1) == keys(2) != ()


def test_references_to_stored_items_leave_keys() -> None:
    """A gateway has no store. Two turns of one conversation still share their beginning."""
    reference = {"type": "item_reference", "id": "msg_1"}
    turns = [say("user", "hi " * 900), reference, say("user", "more " * 900)]
    shorter = keys_of({"input": turns}, "responses")
    longer = keys_of({"input": [*turns, reference, say("user", "again")]}, "responses")
    assert shorter and set(shorter) < set(longer)
