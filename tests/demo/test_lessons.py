"""Lessons are written as the template writes what clients send, and their cuts change no token."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from demo_chat import ChatFormat, Medium
from demo_data import IGNORE, BatchSizes, collate
from demo_fields import known, scene_fields
from demo_forms import TOOLS_HEAD, call_pieces, call_text, json_pieces, with_tools
from demo_lessons import BUDGET, Lessons, alike
from demo_model import DemoModel
from demo_recall import copies
from demo_scenes import draw_scene
from demo_shape import DemoShape
from demo_words import MEDIA_HERE, Turn
from PIL import Image
from teach import PARTS, Course
from tokenizers import Tokenizer

import vlm_serve
from vlm_serve import Pipeline

DEMO = Path(vlm_serve.__file__).parent / "demo"
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "take_picture",
            "description": "Takes a picture — «now».",
            "parameters": {"type": "object", "properties": {"name": {"type": "string"}}},
        },
    }
]
KINDS = sorted({each.split()[0] for _, text in PARTS for each in text.split(", ")})
ARGUMENTS = [known("name", "Ana Bo"), known("times", 3), known("where", ["left", "top"])]


@pytest.fixture(scope="module")
def chat() -> ChatFormat:
    return ChatFormat(Tokenizer.from_file(str(DEMO / "dense" / "tokenizer.json")))


CALL = re.compile(
    r"<tool_call>\n<function=([^>\n]+)>\n((?:<parameter=[^>\n]+>\n.*?\n</parameter>\n)*)"
    r"</function>\n</tool_call>",
    re.DOTALL,
)
PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n(.*?)\n</parameter>\n", re.DOTALL)


def read_call(text: str) -> tuple[str, dict[str, str]] | None:
    """Return the name and the arguments of an answer that is one complete call."""
    found = CALL.fullmatch(text)
    return (found[1], dict(PARAMETER.findall(found[2]))) if found else None


def test_tools_are_written_as_the_template_writes_them(pipe: Pipeline, chat: ChatFormat) -> None:
    call = {
        "type": "function",
        "id": "1",
        "function": {
            "name": "take_picture",
            "arguments": {field.name: field.value for field in ARGUMENTS},
        },
    }
    picture = {"type": "image", "image": Image.new("RGB", (64, 64))}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Take one."},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "1", "content": [picture, {"type": "text", "text": "ok"}]},
        {"role": "tool", "tool_call_id": "1", "content": "done"},
        {"role": "assistant", "content": "A star."},
        {"role": "user", "content": "And now?"},
    ]
    prompt = pipe.engine.preprocessor.prepare(messages, tools=TOOLS)
    calls = "\n".join([call_text("take_picture", ARGUMENTS)] * 2)
    results = f"<tool_response>\n{MEDIA_HERE}ok\n</tool_response>"
    results += "\n<tool_response>\ndone\n</tool_response>"
    turns = [Turn("", "Take one.", calls), Turn("", results, "A star."), Turn("", "And now?", "")]
    rows, columns = prompt.media[0].grid[1:]
    medium = Medium(rows // 2, columns // 2)
    encoded = chat.conversation(
        turns, [[], [medium]], system=with_tools(TOOLS, "Be brief."), open_end=True
    )
    assert tuple(encoded.ids) == prompt.token_ids


def test_thoughts_are_opened_and_kept_by_the_template(pipe: Pipeline, chat: ChatFormat) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!", "reasoning_content": "They greet."},
        {"role": "user", "content": "Bye"},
    ]

    def written(**options: bool) -> str:
        prompt = pipe.engine.preprocessor.prepare(messages, chat_template_kwargs=options)
        return str(chat.tokenizer.decode(list(prompt.token_ids), skip_special_tokens=False))

    assert written(enable_thinking=True).endswith("<|im_start|>assistant\n<think>\n")
    assert "They greet." not in written(enable_thinking=True)
    assert "<think>\nThey greet.\n</think>\n\nHello!" in written(preserve_thinking=True)
    assert written().endswith("<|im_start|>assistant\n")


def test_forms_are_tokenised_like_whole_answers(chat: ChatFormat) -> None:
    rng = random.Random(4)
    for _ in range(60):
        fields = [*scene_fields(rng, draw_scene(rng, "train")), *ARGUMENTS]
        for parts, given in (json_pieces(fields), call_pieces("some_name", fields)):
            whole = chat.encode_text("".join(parts))
            assert [i for part in parts for i in chat.encode_text(part)] == list(whole)
            assert given and max(given) < len(parts)


def test_a_call_is_read_back() -> None:
    text = call_text("look", ARGUMENTS)
    wanted = {"name": "Ana Bo", "times": "3", "where": '["left", "top"]'}
    assert read_call(text) == ("look", wanted)
    assert read_call(text + "\nmore") is None
    assert read_call(text.removesuffix("</tool_call>")) is None


@pytest.mark.parametrize("kind", KINDS)
def test_every_lesson_teaches(chat: ChatFormat, kind: str) -> None:
    sizes = BatchSizes(image=3, album=2, video=2, vision=3)
    maker = Lessons(chat, 1, sizes, records=0.5)
    batch = maker.make(3, kind)
    assert batch.kind == kind
    assert bool((batch.targets != IGNORE).any()) == (kind != "vision")
    again = maker.make(3, kind)
    assert batch.ids.tolist() == again.ids.tolist()


def test_the_course_changes_at_its_steps(chat: ChatFormat) -> None:
    course = Course(Lessons(chat, 1), 100, ((40, "copies 1"), (60, "image 1, talk 1")))
    assert {course.kind(step) for step in range(40)} == {"copies"}
    assert {course.kind(step) for step in range(40, 100)} == {"image", "talk"}


@pytest.mark.parametrize("seed", range(8))
def test_copies_are_found_in_what_was_listed(chat: ChatFormat, seed: int) -> None:
    """Most learned tokens follow the two before them in the list, so they can be looked up."""
    found = copies(random.Random(seed), chat, "train")
    start = found.learned.index(0)
    listed = found.ids[: found.ids.index(chat.special["im_end"])]
    triples = {tuple(listed[i : i + 3]) for i in range(len(listed) - 2)}
    learned = [i for i in range(start, len(found.ids)) if found.learned[i] == 0]
    assert len(learned) > 5
    known = sum(tuple(found.ids[i - 2 : i + 1]) in triples for i in learned)
    # The first name has no space before it in the list, and the last no comma behind it.
    assert known > 0.75 * len(learned)


def test_conversations_of_a_batch_are_of_like_lengths(chat: ChatFormat) -> None:
    rng = random.Random(5)
    texts = ["word " * rng.randint(1, 900) for _ in range(20)]
    made = [(chat.conversation([Turn("", text, "Hello!")], []), text) for text in texts]
    for _ in range(30):
        lengths = [len(encoded.ids) for encoded, _ in alike(rng, made)]
        assert len(lengths) == 1 or len(lengths) * max(lengths) <= BUDGET


def test_the_template_s_words_about_tools_are_those_of_the_lessons() -> None:
    template = (DEMO / "dense" / "chat_template.jinja").read_text(encoding="utf-8")
    head, _, tail = TOOLS_HEAD.partition("{tools}")
    for line in (*head.splitlines(), *tail.splitlines()):
        assert line in template.replace("\\n", "\n")


def test_long_padding_leaves_gradients_finite(chat: ChatFormat) -> None:
    """Equal tokens one after the other have equal keys; inverting their triangle overflows."""
    torch.manual_seed(2)
    model = DemoModel(DemoShape(vocab=chat.tokenizer.get_vocab_size(), hidden=32, layers=2))
    talk = [Turn("", "Hi", "Hello!")]
    long = [Turn("", "word " * 900, "Hello!")]
    encoded = [chat.conversation(each, []) for each in (talk, long)]
    batch = collate("talk", encoded, [], chat, [talk, long])
    padding = batch.ids[0, len(encoded[0].ids) :]
    assert bool((padding[1:] != padding[:-1]).all())
    hidden = model.read(batch, [])
    learned = batch.targets != IGNORE
    loss = F.cross_entropy(model.logits(hidden[learned]), batch.targets[learned])
    torch.autograd.backward(loss)
    assert all(
        bool(each.grad.isfinite().all()) for each in model.parameters() if each.grad is not None
    )
