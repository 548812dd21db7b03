"""What the next turn shares with an answer is what its own prompt begins with."""

from __future__ import annotations

from typing import Any

import pytest
from conversation import TOOLS, picture, say
from PIL import Image

from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.prepare import Preprocessor

CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "seen"}


def said(text: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text} | fields


def shared(
    preprocessor: Preprocessor,
    messages: list[dict[str, Any]],
    text: str,
    answer: dict[str, Any],
    follow: list[dict[str, Any]],
) -> tuple[int, int, int]:
    """What is told, what the next prompt really shares, and how long prompt and answer are."""
    tokenizer = preprocessor.tokenizer
    prompt = preprocessor.prepare(messages, tools=TOOLS)
    generated = [*tokenizer.encode(text), tokenizer.special_tokens["<|im_end|>"]]
    assert prompt.next_turn is not None
    told = prompt.next_turn(answer, generated)
    following = preprocessor.prepare([*messages, answer, *follow], tools=TOOLS).token_ids
    whole = [*prompt.token_ids, *generated]
    pairs = zip(whole, following, strict=False)
    real = next((at for at, (one, other) in enumerate(pairs) if one != other), len(whole))
    return told, real, len(whole)


@pytest.mark.parametrize("text", ["Yes.", "It is 3, 4 or 5 of them", "你好"])
def test_an_answer_in_words_is_shared_whole(
    preprocessor: Preprocessor, cat: Image.Image, text: str
) -> None:
    for messages in ([say("a")], [say(picture(cat), "what?")], [say("a"), said("b"), say("c")]):
        kwargs = {"enable_thinking": False}
        prompt = preprocessor.prepare(messages, chat_template_kwargs=kwargs)
        told, real, length = shared(preprocessor, messages, text, said(text), [say("more")])
        assert told == real
        assert prompt.next_turn is not None and length > len(prompt)


@pytest.mark.parametrize("text", ["Yes. ", " Yes.", "Yes.\n\n", "<think>\nhm\n</think>\n\nNo."])
def test_what_the_template_trims_or_drops_is_not(preprocessor: Preprocessor, text: str) -> None:
    told, real, length = shared(preprocessor, [say("a")], text, said(text), [say("more")])
    assert told == real < length


def test_behind_a_call_come_its_results(preprocessor: Preprocessor) -> None:
    """A thought stays as long as no user has asked again."""
    thought = "look there"
    answer = said(None, reasoning_content=thought, tool_calls=[CALL])
    prompt = preprocessor.prepare([say("a")], tools=TOOLS)
    rendered = preprocessor.prepare(
        [say("a"), answer], tools=TOOLS, add_generation_prompt=False
    ).text
    text = rendered[len(prompt.text) :].removesuffix("<|im_end|>\n")
    assert "look there" in text and rendered.startswith(prompt.text)
    told, real, length = shared(preprocessor, [say("a")], text, answer, [RESULT])
    assert told == real == length
    # The same call as a client may write it anew.
    other = answer | {"tool_calls": [CALL | {"function": {"name": "look", "arguments": "{}"}}]}
    told, real, length = shared(preprocessor, [say("a")], text, other, [RESULT])
    assert len(prompt) < told == real < length


def test_a_continued_message_ends_where_the_answer_does(preprocessor: Preprocessor) -> None:
    messages = [say("a"), said("One, two")]
    prompt = preprocessor.prepare(messages, continue_final_message=True)
    generated = [
        *preprocessor.tokenizer.encode(", three"),
        preprocessor.tokenizer.special_tokens["<|im_end|>"],
    ]
    assert prompt.next_turn is not None
    following = preprocessor.prepare([say("a"), said("One, two, three"), say("b")]).token_ids
    whole = (*prompt.token_ids, *generated)
    pairs = zip(whole, following, strict=False)
    real = next((at for at, (one, other) in enumerate(pairs) if one != other), len(whole))
    assert prompt.next_turn(said(", three"), generated) == real
    with pytest.raises(InvalidRequestError):
        prompt.next_turn(said(None, tool_calls=[CALL]), generated)


def test_prompts_without_messages_have_none(preprocessor: Preprocessor) -> None:
    assert preprocessor.prepare_tokens([1, 2, 3]).next_turn is None
    assert preprocessor.prepare([say("a " * 50)]).last_tokens(5).next_turn is None
