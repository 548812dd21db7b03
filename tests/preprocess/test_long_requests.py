"""What is far too long for the context is refused before it costs much, wherever it stands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conversation import build, say

from vlm_serve.errors import ContextLengthError
from vlm_serve.preprocess.prepare import Preprocessor

CONTEXT = 512
WORDS = "word and other " * 500_000


@pytest.fixture(scope="module")
def small(checkpoint: Path) -> Iterator[Preprocessor]:
    made = build(checkpoint, max_tokens=CONTEXT)
    yield made
    made.close()


@pytest.fixture
def encoded(small: Preprocessor, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Characters that the tokenizer has seen, by call."""
    seen: list[int] = []
    encode = small.tokenizer.encode_plain

    def counting(text: str) -> list[int]:
        seen.append(len(text))
        return encode(text)

    monkeypatch.setattr(small.tokenizer, "encode_plain", counting)
    return seen


def tool(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


def call(arguments: Any) -> list[dict[str, Any]]:
    return [{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}]


def answer(**fields: Any) -> list[dict[str, Any]]:
    return [say("hi"), {"role": "assistant", "content": "x", **fields}]


@pytest.mark.parametrize("size", [3_000, len(WORDS)])
@pytest.mark.parametrize(
    ("made", "param"),
    [
        (lambda text: ([say(text)], None), "messages"),
        (lambda text: ([say("hi")], [tool(description=text)]), "tools"),
        (lambda text: ([say("hi")], [tool(parameters={text: 1})]), "tools"),
        (lambda text: (answer(reasoning_content=text), None), "messages"),
        (lambda text: (answer(tool_calls=call({"a": text})), None), "messages"),
        (lambda text: (answer(tool_calls=call({"a": [text[:10]] * (len(text) // 10)})), None),
         "messages"),
    ],
    ids=["content", "description", "parameters", "reasoning", "argument", "list of arguments"],
)  # fmt: skip
def test_the_tokenizer_sees_little_of_it(
    small: Preprocessor, encoded: list[int], made: Any, param: str, size: int
) -> None:
    messages, tools = made(WORDS[:size])
    with pytest.raises(ContextLengthError) as raised:
        small.prepare(messages, tools=tools, add_generation_prompt=True)
    assert raised.value.param == param
    assert sum(encoded) < 20_000
    if size == len(WORDS) and param == "tools":
        assert not encoded, "its size alone shows it"


def test_special_tokens_alone_may_be_too_many(small: Preprocessor, encoded: list[int]) -> None:
    for count in (1_000, 1_000_000):
        with pytest.raises(ContextLengthError):
            small.tokenizer.encode("<|im_end|>" * count)
    assert not encoded


def test_many_short_turns_are_not_taken_for_more_than_they_are(checkpoint: Path) -> None:
    made = build(checkpoint, max_tokens=4096)
    try:
        messages = [say("a"), {"role": "assistant", "content": "b"}] * 200
        prompt = made.prepare([*messages, say("c")])
        made.tokenizer._max_tokens = len(prompt)
        made.prepare([*messages, say("c")])
    finally:
        made.close()


def test_the_longest_token(small: Preprocessor) -> None:
    tokenizer = small.tokenizer
    sizes = [len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size)]
    assert tokenizer.longest_token == max(sizes)
