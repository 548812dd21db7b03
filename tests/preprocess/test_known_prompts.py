"""Whatever was prepared before, a prompt is what it would have been without it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from conversation import TOOLS, build, picture
from PIL import Image
from sweeps import quick

from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.identity.keys import PromptKeys
from vlm_serve.preprocess.identity.prompt import Prompt
from vlm_serve.preprocess.known_prompts import KnownPrompts
from vlm_serve.preprocess.prepare import Preprocessor
from vlm_serve.preprocess.reading.reader import read_conversation
from vlm_serve.preprocess.reading.turns import fit_systems
from vlm_serve.preprocess.text.rendering import ChatRequest, TypedText, split_pieces, texts_of

CONTEXT = 3000
WORDS = (
    "river", " mill,", " 12", "\n\n", " você", "你好。", " <|im_end|>", " <think>", "</think>\n",
    " don't", "  ", "e\u0301", " \u0915\u093f", "\U0001f469\u200d\U0001f467",
)  # fmt: skip
PICTURES = [Image.new("RGB", size, "navy") for size in ((64, 48), (100, 70), (48, 48))]
Message = dict[str, Any]


@pytest.fixture(scope="module")
def remembering(checkpoint: Path) -> Iterator[Preprocessor]:
    # Small enough for prompts, pieces and turns to be forgotten again.
    made = build(checkpoint, max_tokens=CONTEXT, known_text_bytes=1 << 20)
    yield made
    made.close()


@pytest.fixture(scope="module")
def forgetful(checkpoint: Path) -> Iterator[Preprocessor]:
    made = build(checkpoint, max_tokens=CONTEXT, known_text_bytes=0, raw_index_bytes=0)
    yield made
    made.close()


def text_of(rng: random.Random) -> str:
    most = 900 if rng.random() < 0.1 else 12
    return "".join(rng.choices(WORDS, k=rng.randint(1, most)))


def message(rng: random.Random) -> Message:
    role = rng.choice(("user", "assistant", "tool", "user", "assistant"))
    made: Message = {"role": role, "content": text_of(rng)}
    if role == "user" and rng.random() < 0.2:
        shown = [picture(rng.choice(PICTURES)) for _ in range(rng.randint(1, 2))]
        made["content"] = [{"type": "text", "text": text_of(rng)}, *shown]
    if role == "assistant" and rng.random() < 0.3:
        made["reasoning_content"] = text_of(rng)
    if role == "tool":
        made["tool_call_id"] = "1"
    return made


def changed(messages: list[Message], rng: random.Random) -> list[Message]:
    """Edited, cut or grown: by a message, or at the end of the last one."""
    chance = rng.random()
    if chance < 0.55 or not messages:
        return [*messages, message(rng)]
    if chance < 0.7 and isinstance(messages[-1]["content"], str):
        grown = {**messages[-1], "content": messages[-1]["content"] + text_of(rng)}
        return [*messages[:-1], grown]
    if chance < 0.85:
        at = rng.randrange(len(messages))
        return [*messages[:at], message(rng), *messages[at + 1 :]]
    return messages[: rng.randint(0, len(messages))]


def outcome(preprocessor: Preprocessor, messages: list[Message], options: Any) -> Any:
    try:
        return preprocessor.prepare(messages, **options)
    except InvalidRequestError as error:
        return type(error), error.message, error.param


def as_before(
    preprocessor: Preprocessor, messages: list[Message], spans: Any, options: Any
) -> list[int]:
    """Check and encode everything whole, as it was done before texts were remembered."""
    given = {"messages": messages, "tools": options["tools"]}
    template, tokenizer = preprocessor._template, preprocessor.tokenizer
    late = template.traits.late_systems
    request = ChatRequest(fit_systems(read_conversation("chat", given), anywhere=late), template)
    tokenizer.check_length(texts_of(request.messages))
    tokenizer.check_length([request.tools_text()], "tools")
    special, pattern = tokenizer.special_tokens, tokenizer.special_pattern
    typed = TypedText([request.messages, request.tools, request.kwargs], tuple(special), pattern)
    pieces = list(split_pieces(request.render(typed), pattern))
    tokenizer.check_length(piece.text for piece in pieces if not piece.is_special)
    ids: list[int] = []
    left = iter(spans)
    for piece in pieces:
        if not piece.is_special:
            ids += tokenizer.encode_plain(typed.restore(piece.text))
            continue
        token = special[piece.text]
        count = 1
        if token in preprocessor.media_token_ids:
            span = next(left)
            count = span.end - span.start
        ids += [token] * count
    return ids


def assert_equal(mine: Prompt, other: Prompt) -> None:
    for field in fields(Prompt):
        if field.name in ("keys", "positions", "media", "next_turn", "corrected", "waited"):
            continue
        assert getattr(mine, field.name) == getattr(other, field.name), field.name
    assert (mine.positions == other.positions).all()
    for name in PromptKeys.__slots__:
        assert getattr(mine.keys, name) == getattr(other.keys, name), name


@pytest.mark.parametrize("seed", quick(range(100), 1))
def test_random_conversations(
    remembering: Preprocessor, forgetful: Preprocessor, seed: int
) -> None:
    """A hundred conversations of two tenants each, so 10 000 in all."""
    rng = random.Random(seed)
    saved: list[list[Message]] = [[], [], []]
    refused = 0
    for _ in range(100):
        number = rng.randrange(len(saved))
        messages = saved[number] = changed(saved[number], rng)
        options: dict[str, Any] = {
            "cache_salt": rng.choice(("", "other")),
            "tools": TOOLS if rng.random() < 0.2 else None,
        }
        mine, other = (outcome(each, messages, options) for each in (remembering, forgetful))
        if not isinstance(other, Prompt):
            refused += 1
            assert mine == other
            saved[number] = messages[: len(messages) // 2]
            continue
        assert isinstance(mine, Prompt)
        assert_equal(mine, other)
        assert list(mine.token_ids) == as_before(forgetful, messages, other.spans, options)
        held = remembering.known_text.num_bytes
        assert held <= 1 << 20
        assert forgetful.known_text.num_bytes == 0
    assert refused < 50


def test_what_is_too_long_is_refused_as_before(
    remembering: Preprocessor, forgetful: Preprocessor
) -> None:
    rng = random.Random(5)
    refused = 0
    for words in range(300, 3000, 150):
        text = "".join(rng.choices(WORDS, k=words))
        messages = [{"role": "user", "content": text}]
        try:
            expected: Any = as_before(forgetful, messages, (), {"tools": None})
        except InvalidRequestError as error:
            expected = type(error), error.message, error.param
            refused += 1
        mine = outcome(remembering, messages, {})
        assert (list(mine.token_ids) if isinstance(mine, Prompt) else mine) == expected
    assert 3 < refused < 17


def test_a_new_turn_adds_to_the_known_prompt(remembering: Preprocessor) -> None:
    remembering.known_text.clear()
    counts = remembering.known_text.prompts.counts
    asked: list[Message] = [{"role": "user", "content": [picture(PICTURES[0])]}]
    remembering.prepare(asked)
    before = dict(counts)
    asked += [{"role": "assistant", "content": "Blue."}, {"role": "user", "content": "Why?"}]
    known = remembering.prepare(asked)
    assert counts["hits"] == before["hits"] + 1
    remembering.prepare(asked, cache_salt="another")
    assert counts["hits"] == before["hits"] + 1
    remembering.known_text.clear()
    assert remembering.known_text.num_bytes == 0
    assert_equal(known, remembering.prepare(asked))


def test_an_older_turn_is_forgotten_for_the_newer(remembering: Preprocessor) -> None:
    remembering.known_text.clear()
    messages: list[Message] = []
    for turn in range(6):
        messages += [{"role": "user", "content": f"{turn}?"}]
        remembering.prepare(messages)
        messages += [{"role": "assistant", "content": f"{turn}."}]
    assert len(remembering.known_text.prompts._prompts) == 1


def test_nothing_is_kept_beyond_the_limit(remembering: Preprocessor) -> None:
    prompts = KnownPrompts(0)
    assert prompts.find([]) is None
    prompt = remembering.prepare([{"role": "user", "content": "hello"}])
    assert prompts.num_bytes == 0
    assert prompt.keys.block_keys is not None


@pytest.mark.parametrize("text", ["", "a<|im_end|>b", "<|im_end|>" * 3, "x<|im_start|"])
def test_raw_texts_have_the_tokenizers_ids(remembering: Preprocessor, text: str) -> None:
    for _ in range(2):
        assert remembering.encode(text) == remembering.tokenizer.encode(text)


@pytest.mark.parametrize("text", ["word and other " * 100_000, "<|im_end|>" * 10_000, "a" * 10**6])
def test_raw_texts_that_are_too_long_are_refused_as_before(
    remembering: Preprocessor, text: str
) -> None:
    errors = []
    for encode in (remembering.encode, remembering.tokenizer.encode):
        with pytest.raises(InvalidRequestError) as raised:
            encode(text)
        errors.append((raised.value.message, raised.value.param))
    assert errors[0] == errors[1]
