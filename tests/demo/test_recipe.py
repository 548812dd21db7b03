"""The recipe trains what is served: same tokens, same pixels, same mathematics."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import oracle
import pytest
import torch
from checkpoint_parts import build_tokenizer
from demo_albums import draw_album
from demo_cases import image_cases, video_cases
from demo_chat import VOCAB_SIZE, ChatFormat, Medium, stamps_of, training_text
from demo_clips import draw_clip
from demo_data import IGNORE, BatchMaker, BatchSizes
from demo_drills import album_drills, clip_drills, drill, picture_drills
from demo_experts import imbalance, upcycle
from demo_export import export
from demo_model import DemoModel
from demo_optim import orthogonalise
from demo_patches import image_size, story_labels
from demo_scenes import Hand, draw_scene, random_digit, random_single
from demo_shape import DemoShape
from demo_words import Turn
from tokenizers import Tokenizer

import vlm_serve
from vlm_serve import Pipeline

DEMO = Path(vlm_serve.__file__).parent / "demo"


@pytest.fixture(scope="module")
def chat() -> ChatFormat:
    return ChatFormat(Tokenizer.from_file(str(DEMO / "dense" / "tokenizer.json")))


def random_model(chat: ChatFormat, experts: int = 0) -> DemoModel:
    """A small model in which every layer does something."""
    torch.manual_seed(3)
    shape = DemoShape(vocab=chat.tokenizer.get_vocab_size(), hidden=64, experts=experts)
    model = DemoModel(shape)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


def test_the_tokenizer_is_the_same_every_time() -> None:
    one, two = (build_tokenizer(training_text(200), VOCAB_SIZE) for _ in range(2))
    assert one.to_str() == two.to_str()


def test_common_words_are_single_tokens(chat: ChatFormat) -> None:
    for word in (" star", " colour", " color", " picture", " seconds", " left", " triangle"):
        assert len(chat.encode_text(word)) == 1


def test_tokenizer_equals_transformers(chat: ChatFormat) -> None:
    theirs = oracle.tokenizer(DEMO / "dense")
    texts = [
        "What colour is the star?",
        "Ünïcödé — 你好\n\n 12 34!",
        "<|im_start|>user\nHi<|im_end|>",
    ]
    texts += [case.answer for case in image_cases(40, seed=3)]
    for text in texts:
        assert theirs(text).input_ids == chat.tokenizer.encode(text).ids
        assert theirs.decode(theirs(text).input_ids) == text


@pytest.mark.parametrize("experts", [0, 4])
@pytest.mark.parametrize("kind", ["image", "album", "video"])
def test_training_forward_equals_transformers(
    tmp_path: Path, chat: ChatFormat, kind: str, experts: int
) -> None:
    model = random_model(chat, experts)
    export(model, chat.tokenizer, tmp_path)
    theirs = oracle.model(tmp_path)
    with torch.no_grad():
        for ours in model.parameters():
            ours.copy_(ours.bfloat16())
        batch = BatchMaker(chat, 5, BatchSizes(image=1, album=1, video=1)).make(2, kind, turns=2)
        length = int((batch.targets[0] != IGNORE).nonzero().max()) + 1
        expected = model.logits(model.read(batch, model.see(batch)))[0, :length]
        patches = torch.cat([slot.patches.flatten(0, 1) for slot in batch.slots])
        grids = [[len(s.patches), 2 * s.rows, 2 * s.columns] for s in batch.slots]
        types = {"video": 2}.get(kind, 1)
        pad = chat.special["video_pad" if kind == "video" else "image_pad"]
        names = (
            ("pixel_values_videos", "video_grid_thw")
            if kind == "video"
            else (
                "pixel_values",
                "image_grid_thw",
            )
        )
        found = theirs(
            input_ids=batch.ids[:, :length],
            mm_token_type_ids=(batch.ids[:, :length] == pad).long() * types,
            **dict(zip(names, (patches, torch.tensor(grids)), strict=True)),
        ).logits[0]
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max().clamp(min=1)


def test_training_prompts_equal_served_ones(pipe: Pipeline, chat: ChatFormat) -> None:
    """Tokens, positions and pixels of the open prompt, through the real template and resize."""
    cases = [*image_cases(16, seed=4), *video_cases(8, seed=4)]
    checked = 0
    for case in cases:
        prompt = pipe.engine.preprocessor.prepare(case.messages)
        grids = [medium.grid for medium in prompt.media]
        stamps = None
        if prompt.media[0].modality == "video":
            part = case.messages[0]["content"][0]
            total, rate = len(part["video"]), part["fps"]
            wanted = min(int(total / rate * 2), total)
            frames = [int(i) for i in np.linspace(0, total - 1, wanted).round()]
            stamps = stamps_of(frames, rate)
        media = [Medium(grid[1] // 2, grid[2] // 2, stamps) for grid in grids]
        users = [m["content"][-1]["text"] for m in case.messages if m["role"] == "user"]
        given = [m["content"] for m in case.messages if m["role"] == "assistant"] + [""]
        turns = [Turn("", user, answer) for user, answer in zip(users, given, strict=True)]
        encoded = chat.conversation(turns, [media], open_end=True)
        assert tuple(encoded.ids) == prompt.token_ids
        assert torch.equal(torch.tensor(encoded.positions).T, prompt.positions)
        checked += 1
    assert checked == 24


def test_picture_sizes_equal_the_processor_s(pipe: Pipeline) -> None:
    for case in image_cases(24, seed=5):
        prompt = pipe.engine.preprocessor.prepare(case.messages)
        for part, medium in zip(case.messages[0]["content"], prompt.media, strict=False):
            width, height = part["image"].size
            rows, columns = medium.grid[1:]
            assert (rows * 8, columns * 8) == image_size(height, width)


def test_upcycling_changes_nothing(chat: ChatFormat) -> None:
    dense = random_model(chat)
    sparse = DemoModel(replace(dense.shape, experts=4))
    upcycle(dense.state_dict(), sparse)
    batch = BatchMaker(chat, 6, BatchSizes(image=2)).make(0, "image", turns=2)
    with torch.no_grad():
        before = dense.read(batch, dense.see(batch))
        after = sparse.read(batch, sparse.see(batch))
    assert torch.allclose(before, after, atol=1e-4)
    assert 0.5 < float(imbalance(sparse)) < 4


def test_batches_depend_on_seed_and_step_alone(chat: ChatFormat) -> None:
    sizes = BatchSizes(image=2)
    one, two = (BatchMaker(chat, 1, sizes).make(5, "image") for _ in range(2))
    other = BatchMaker(chat, 1, sizes).make(6, "image")
    assert torch.equal(one.ids, two.ids)
    assert torch.equal(one.slots[0].patches, two.slots[0].patches)
    assert not torch.equal(
        one.slots[0].patches.flatten()[:64], other.slots[0].patches.flatten()[:64]
    )


def test_train_and_test_digits_are_apart() -> None:
    glyphs: dict[str, set[int]] = {"train": set(), "test": set()}
    for split, found in glyphs.items():
        rng = random.Random(0)
        for _ in range(300):
            found |= {t.glyph for t in draw_scene(rng, split).things if t.kind.isdigit()}
    assert glyphs["train"] and glyphs["test"]
    assert max(glyphs["train"]) < min(glyphs["test"])


def test_orthogonalised_updates_have_equal_singular_values() -> None:
    matrices = torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrices))
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_drills_are_tokenised_like_whole_answers(chat: ChatFormat) -> None:
    """Names are given, what is said of them is learned; the cut between them changes no token."""
    rng = random.Random(7)
    for _ in range(60):
        turns = picture_drills(rng, draw_scene(rng, "train"))
        turns += album_drills(rng, draw_album(rng, "train", rng.choice((2, 3))))
        turns += clip_drills(rng, draw_clip(rng))
        for turn in turns:
            whole = chat.encode_text(turn.answer)
            assert [i for piece in turn.pieces for i in chat.encode_text(piece)] == list(whole)
    encoded = chat.conversation([Turn("", "Why?", "Because."), drill("Is it?", SAID)], [])
    learned = [token for token, turn in zip(encoded.ids, encoded.learned, strict=True) if turn == 1]
    assert chat.tokenizer.decode(learned, skip_special_tokens=False) == " yes no.<|im_end|>"
    first = [token for token, turn in zip(encoded.ids, encoded.learned, strict=True) if turn == 0]
    assert chat.tokenizer.decode(first, skip_special_tokens=False) == "Because.<|im_end|>"


SAID = [("red star", "yes"), ("cross", "no")]


def test_story_labels_count_what_is_new() -> None:
    rng = random.Random(8)
    one, two = random_single(rng), random_single(rng)
    moved = replace(one, x=0.9)
    labels = story_labels([[one, moved, None, one], [two, None, one, two]])
    assert labels.order.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert labels.fresh.tolist() == [1, 0, 0, 1, 1, 0, 1, 1]
    assert labels.count.tolist() == [1, 1, 1, 2, 1, 1, 2, 3]


def test_only_digits_to_train_on_are_bent() -> None:
    rng = random.Random(9)
    hands = {
        split: {random_digit(rng, split).hand for _ in range(9)} for split in ("train", "test")
    }
    assert hands["test"] == {Hand()}
    assert len(hands["train"]) == 9
