"""Conversations longer than the context, without their oldest turns."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from serving import RunningServer

from vlm_serve.errors import ContextLengthError
from vlm_serve.preprocess.identity.prompt import Prompt
from vlm_serve.preprocess.reading.conversation import Conversation
from vlm_serve.preprocess.reading.reader import read_conversation
from vlm_serve.server.api.shared.conversation import prepare_truncated

IMAGE = {"type": "image_url", "image_url": "data:image/png;base64,aGk="}


def talk(turns: int, *, words: int = 1, images: bool = False) -> Conversation:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "s"}]
    for turn in range(turns):
        text = {"type": "text", "text": f"{turn} " * words}
        messages.append({"role": "user", "content": [IMAGE, text] if images else [text]})
        messages.append({"role": "assistant", "content": "a"})
        messages.append({"role": "tool", "content": "t"})
    messages.append({"role": "user", "content": "last"})
    return read_conversation("chat", {"messages": messages})


class Maker:
    """Makes prompts of a token per message."""

    def __init__(self) -> None:
        self.made: list[Conversation] = []

    def __call__(self, conversation: Conversation) -> Prompt:
        self.made.append(conversation)
        length = len(conversation.messages)
        return Prompt((0,) * length, torch.zeros(3, length), 0, cast(Any, None))


@given(st.integers(0, 60), st.integers(2, 200), st.booleans())
def test_whole_turns_are_left_out_and_no_more_than_a_step(
    turns: int, room: int, images: bool
) -> None:
    conversation, maker = talk(turns, images=images), Maker()
    total = len(conversation.messages)
    prompt = prepare_truncated(conversation, maker, room)
    kept = maker.made[-1]
    assert len(prompt) == len(kept.messages) <= room
    assert kept.messages[0]["content"] == "s"
    assert kept.messages[1]["role"] == "user"
    assert kept.messages[-1]["content"] == "last"
    assert kept.messages[1:] == conversation.messages[total - len(kept.messages) + 1 :]
    num_images = sum(isinstance(m["content"], list) for m in kept.messages)
    assert len(kept.media) == (num_images if images else 0)
    if total <= room:
        assert kept is conversation
    else:
        assert len(kept.messages) > 2 * min(room, total) // 3 - 4
    assert len(maker.made) <= 9


def test_the_kept_part_begins_at_the_same_turn_for_a_while() -> None:
    begins = []
    for turns in range(40, 60):
        maker = Maker()
        prepare_truncated(talk(turns), maker, 60)
        begins.append(maker.made[-1].messages[1]["content"][0]["text"])
    assert len(set(begins)) <= 6


def test_a_last_turn_that_does_not_fit_is_refused() -> None:
    def prepare(conversation: Conversation) -> Prompt:
        raise ContextLengthError("too long", param="messages")

    with pytest.raises(ContextLengthError):
        prepare_truncated(talk(4), prepare, 5)


def test_a_response_to_the_end_of_a_long_conversation(fake: RunningServer) -> None:
    items = [{"role": role, "content": f"turn {turn} " * 20}
             for turn in range(100) for role in ("user", "assistant")]  # fmt: skip
    body: dict[str, Any] = {
        "input": [*items, {"role": "user", "content": "last"}],
        "max_output_tokens": 50,
    }
    answer = fake.post("/v1/responses", body | {"truncation": "auto"}).json()
    assert answer["truncation"] == "auto"
    room = fake.engine.max_model_len - 50
    assert room // 2 < answer["usage"]["input_tokens"] <= room
    sent = fake.engine.preprocessor.calls[-1]["messages"]
    assert sent[-1]["content"] == "last"
    assert sent[0]["role"] == "user"
    counted = fake.post("/v1/responses/input_tokens", body | {"truncation": "auto"}).json()
    assert counted["input_tokens"] == answer["usage"]["input_tokens"]
    plain = fake.post("/v1/responses", body).json()
    assert plain["truncation"] == "disabled"
    assert len(fake.engine.preprocessor.calls[-1]["messages"]) == len(body["input"])
