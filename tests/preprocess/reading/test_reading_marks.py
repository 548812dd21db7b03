"""Cache marks of other vendors are taken wherever their clients send them, and only named."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from conversation import picture, say
from lines_run import lines_of
from PIL import Image

from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.identity.affinity import affinity_keys
from vlm_serve.preprocess.prepare import Preprocessor
from vlm_serve.preprocess.reading.items import read_past
from vlm_serve.preprocess.reading.reader import read_conversation

MARKS: dict[str, Any] = {
    "cache_control": {"type": "ephemeral", "ttl": "1h"},
    "prompt_cache_breakpoint": {"mode": "explicit", "ttl": "30m"},
}
URL = "data:image/png;base64,aGk="
CLIP = "data:video/mp4;base64,aGk="
TEXT_FILE = {"filename": "a.txt", "file_data": "data:text/plain;base64,aGk="}
SCHEMA = {
    "type": "object",
    "properties": {"cache_control": {"type": "string"}, "content": {"type": "array"}},
}
ARGUMENTS = {"cache_control": "no-store", "content": [{"cache_control": 1}]}
TOOL = {"name": "look", "description": "Looks.", "parameters": SCHEMA}
CHAT: dict[str, Any] = {
    "tools": [{"type": "function", "function": TOOL}],
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "S"}]},
        {"role": "user", "content": [
            {"type": "text", "text": "U"},
            {"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
            {"type": "input_image", "image_url": URL},
            {"type": "image", "image": {"url": URL}},
            {"type": "video_url", "video_url": {"url": CLIP}},
            {"type": "video_url", "video_url": CLIP, "num_frames": 4},
            {"type": "file", "file": TEXT_FILE},
            {"type": "file", "file": {"file_data": URL}},
        ]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "tool_calls": [
            {"id": "c", "type": "function",
             "function": {"name": "look", "arguments": json.dumps(ARGUMENTS)}},
        ]},
        {"role": "tool", "tool_call_id": "c", "content": [
            {"type": "text", "text": "T"}, {"type": "image_url", "image_url": {"url": URL}},
        ]},
    ],
}  # fmt: skip
RESPONSES: dict[str, Any] = {
    "tools": [{"type": "function", **TOOL}, {"type": "custom", "name": "say"}],
    "input": [
        {"role": "developer", "content": [{"type": "input_text", "text": "S"}]},
        {"role": "user", "content": [
            {"type": "input_text", "text": "U"},
            {"type": "input_image", "image_url": URL, "detail": "auto"},
            {"type": "input_file", **TEXT_FILE},
            {"type": "video_url", "video_url": {"url": CLIP}},
        ]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "A"}]},
        {"type": "function_call", "call_id": "c", "name": "look",
         "arguments": json.dumps(ARGUMENTS)},
        {"type": "custom_tool_call", "call_id": "d", "name": "say", "input": "hi"},
        {"type": "function_call_output", "call_id": "c", "output": [
            {"type": "input_text", "text": "T"}, {"type": "input_image", "image_url": URL},
        ]},
        {"type": "custom_tool_call_output", "call_id": "d", "output": "V"},
    ],
}  # fmt: skip
SOURCE = {"type": "base64", "media_type": "image/png", "data": "aGk="}
TEXT = {"type": "text", "text": "T"}
MESSAGES: dict[str, Any] = {
    "max_tokens": 1,
    "tools": [
        {"name": "look", "description": "Looks.", "input_schema": SCHEMA},
        {"type": "bash_20250124", "name": "bash"},
    ],
    "system": [{"type": "text", "text": "S"}],
    "messages": [
        {"role": "user", "content": [
            {"type": "text", "text": "U"},
            {"type": "image", "source": SOURCE},
            {"type": "document", "source": {"type": "content", "content": [TEXT]}},
            {"type": "document",
             "source": {"type": "text", "media_type": "text/plain", "data": "D"}},
        ]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm."},
            {"type": "text", "text": "A"},
            {"type": "tool_use", "id": "c", "name": "look", "input": ARGUMENTS},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c", "content": [
                TEXT, {"type": "image", "source": SOURCE},
                {"type": "tool_reference", "tool_name": "look"},
            ]},
        ]},
    ],
}  # fmt: skip
BODIES = {"chat": CHAT, "responses": RESPONSES, "messages": MESSAGES}
# What a client chooses freely: a mark's name is a plain name there.
FREE = {"arguments", "input", "input_schema", "parameters"}


def objects(value: Any, place: str, key: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each object in which a mark may stand, with its place."""
    if isinstance(value, list):
        for at, each in enumerate(value):
            yield from objects(each, f"{place}[{at}]")
    elif isinstance(value, dict) and key not in FREE:
        yield place, value
        for name, each in value.items():
            yield from objects(each, f"{place}.{name}", name)


def roots(body: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in ("input", "messages", "system", "tools"):
        if isinstance(body.get(name), list):
            yield from objects(body[name], name)


PARTS = re.compile(r"^(messages\[0\]|input\[[01]\])\.content\[\d+\]$|^(tools|system)\[0\]$")
"""Places of which marks have an effect for certain: parts, blocks and tools."""
PLACES = [
    (api, number, place)
    for api, body in BODIES.items()
    for number, (place, _) in enumerate(roots(body))
]


@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize(("api", "number", "place"), PLACES)
def test_a_mark_changes_no_prompt_and_is_named_where_it_has_no_effect(
    api: str, number: int, place: str, mark: str
) -> None:
    body = BODIES[api]
    plain = read_conversation(api, body)
    assert plain.ignored == []
    marked = json.loads(json.dumps(body))
    (_, target) = list(roots(marked))[number]
    target[mark] = MARKS[mark]
    before = copy.deepcopy(marked)
    found = read_conversation(api, marked)
    assert marked == before
    if found.cache.marks:
        assert [each.place for each in found.cache.marks] == [f"{place}.{mark}"]
        assert found.ignored == [] and found.cache.marked is not None
    else:
        assert found.ignored == [f"{place}.{mark}"] and not PARTS.search(place)
    assert (found.messages, found.media, found.tools) == (plain.messages, plain.media, plain.tools)
    keys = [affinity_keys(each, salt="", model="m") for each in (found, plain)]
    assert keys[0] == keys[1]
    target[mark] = None
    assert read_conversation(api, marked).ignored == []


def test_marks_are_tried_in_every_kind_of_place() -> None:
    assert len(PLACES) > 60


@pytest.mark.parametrize("api", BODIES)
def test_names_that_a_client_chooses_are_no_marks(api: str) -> None:
    found = read_conversation(api, BODIES[api])
    function = found.tools[0]["function"]
    assert function["parameters"] == SCHEMA
    (call,) = [
        each
        for message in found.messages
        for each in message.get("tool_calls") or ()
        if each["function"]["name"] == "look"
    ]
    assert call["function"]["arguments"] == ARGUMENTS


def test_marks_of_stored_items_change_nothing() -> None:
    """The store keeps items as they were sent."""
    body = {"input": "on", "previous_response_id": "resp_1"}
    plain, found = (read_conversation("responses", body) for _ in range(2))
    items = json.loads(json.dumps(RESPONSES["input"]))
    read_past(items, plain)
    for _, target in list(objects(items, "input")):
        target |= MARKS
    read_past(items, found)
    assert (found.messages, found.media) == (plain.messages, plain.media)


@pytest.mark.parametrize("mark", MARKS)
def test_a_marked_picture_is_the_same_medium(
    preprocessor: Preprocessor, cat: Image.Image, mark: str
) -> None:
    plain = preprocessor.prepare([say(picture(cat), "hi")])
    given = {mark: MARKS[mark]}
    parts = [picture(cat, **given), {"type": "text", "text": "hi", **given}]
    marked = preprocessor.prepare([say(*parts) | given])
    assert marked.token_ids == plain.token_ids
    assert marked.keys.block_keys == plain.keys.block_keys
    assert [span.content_hash for span in marked.spans] == [s.content_hash for s in plain.spans]


def test_other_unknown_keys_of_a_picture_are_refused_still() -> None:
    for name in ("cache", "prompt_cache_breakpoints", "cache_controls"):
        part = {"type": "image_url", "image_url": {"url": URL}, name: {}}
        with pytest.raises(InvalidRequestError, match="is not an option for images"):
            read_conversation("chat", {"messages": [say(part)]})


def test_content_that_holds_itself_is_refused_or_read() -> None:
    part: dict[str, Any] = {"type": "text", "text": "T"}
    part["content"] = [part]
    found = read_conversation("chat", {"messages": [say(part)]})
    assert found.messages[0]["content"] == [{"type": "text", "text": "T"}]


def test_reading_marks_takes_time_in_proportion_to_their_number() -> None:
    """Seek no mark in each text, as reading did: ten thousand took a quarter of a minute."""
    counts = []
    for number in (50, 200):
        part = {"type": "text", "text": "a", "cache_control": {}}
        body = {"messages": [say("user", *[{**part} for _ in range(number)])]}
        read = read_conversation("chat", body)
        assert len(read.cache.marks) == 4 and len(read.ignored) == number - 4
        counts.append(lines_of("/reading/", partial(read_conversation, "chat", body)))
    assert counts[1] < 5 * counts[0], counts
