"""Videos whose positions tell the time, as in Qwen2-VL, Qwen2.5-VL and Qwen3-Omni, where positions
are fractions: prompts equal transformers', and the same frames at another rate share nothing behind
the first temporal patch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import media_reference
import oracle
import pytest
import torch
from conversation import Messages, build, clip, frames, picture, record, say
from families import SPECS
from hypothesis import given
from hypothesis import strategies as st
from make_checkpoint import make_checkpoint
from PIL import Image

from vlm_serve.errors import CheckpointError
from vlm_serve.preprocess.identity.prompt import Prompt
from vlm_serve.preprocess.media.sampling import patch_indices
from vlm_serve.preprocess.prepare import Preprocessor

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
KINDS = ("vl of qwen2", "vl of qwen2.5")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {name: tmp_path_factory.mktemp("timed") for name in (*KINDS, "omni")}
    return {name: make_checkpoint(folder, SPECS[name]) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def preprocessors(checkpoints: dict[str, Path]) -> Iterator[dict[str, Preprocessor]]:
    made = {name: build(path) for name, path in checkpoints.items()}
    yield made
    for each in made.values():
        each.close()


@pytest.fixture(scope="module")
def timed(preprocessors: dict[str, Preprocessor]) -> Preprocessor:
    return preprocessors["vl of qwen2.5"]


def conversations(image: Image.Image, folder: Path) -> dict[str, Messages]:
    tall = image.resize((41, 193))

    def film(name: str, *sizes: int, rate: int = 10) -> dict[str, Any]:
        file = folder / f"{name}.mp4"
        if not file.exists():
            count, height, width = sizes
            record(file, frames(count, height, width, len(name)), rate)
        return clip(str(file))

    return {
        "odd pictures": [say(picture(image), "a", picture(tall), picture(image), "?")],
        "one video": [say(film("one", 60, 34, 90), "What's that?")],
        "late frames": [say("x", film("late", 90, 32, 32, rate=5))],
        "all kinds": [
            say(picture(image), "a", film("first", 50, 64, 96, rate=7), "b", picture(tall)),
            {"role": "assistant", "content": "A cat."},
            say(film("second", 13, 64, 96), film("third", 47, 40, 40, rate=30), "c"),
        ],
    }


NAMES = ("odd pictures", "one video", "late frames", "all kinds")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_prompts_equal_transformers(
    kind: str,
    name: str,
    preprocessors: dict[str, Preprocessor],
    checkpoints: dict[str, Path],
    cat: Image.Image,
) -> None:
    path = checkpoints[kind]
    messages = conversations(cat, path)[name]
    prompt, expected = preprocessors[kind].prepare(messages), media_reference.inputs(path, messages)
    assert list(prompt.token_ids) == expected["input_ids"][0].tolist()
    for modality, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        items = [item for item in prompt.media if item.modality == modality]
        found = [item.patches(patch) for item in items for patch in range(item.grid[0])]
        assert not items or torch.equal(torch.cat(found), expected[pixels])
    names = ("input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw")
    known = {each: expected[each] for each in names if each in expected}
    if kind == "vl of qwen2.5" and "second_per_grid_ts" in expected:
        known["second_per_grid_ts"] = expected["second_per_grid_ts"]
    positions, _ = oracle.model(path).model.get_rope_index(**known)
    assert torch.equal(prompt.positions, positions[:, 0])
    last = int(positions[0, 0, -1])  # behind which `generate` goes on, whatever the offset says
    assert prompt.rope_delta == last + 1 - len(prompt)


def test_positions_with_fractions_equal_transformers(
    preprocessors: dict[str, Preprocessor], checkpoints: dict[str, Path], cat: Image.Image
) -> None:
    path, pixels = checkpoints["omni"], "pixel_values_videos"
    record(path / "long.mp4", frames(23, 64, 96), 7)
    record(path / "short.mp4", frames(5, 48, 40), 3)
    long, short = (clip(str(path / f"{name}.mp4")) for name in ("long", "short"))
    messages = [
        say(picture(cat), "a", long, "b", picture(cat.resize((41, 193)))),
        {"role": "assistant", "content": "A cat."},
        say(short, long, "c"),
    ]
    prompt = preprocessors["omni"].prepare(messages)
    expected = media_reference.inputs(path, messages)
    assert list(prompt.token_ids) == expected["input_ids"][0].tolist()
    videos = [item for item in prompt.media if item.modality == "video"]
    found = torch.cat([item.patches(each) for item in videos for each in range(item.grid[0])])
    assert torch.equal(found, expected[pixels])
    names = ("input_ids", "attention_mask", "image_grid_thw", "video_grid_thw")
    seconds = expected["video_second_per_grid"]
    positions, deltas = oracle.model(path).get_rope_index(
        **{name: expected[name] for name in names}, second_per_grids=seconds
    )
    assert prompt.positions.dtype == torch.float64 and positions.dtype == torch.float32
    # transformers rounds every sum to float32, here no sum is rounded.
    torch.testing.assert_close(prompt.positions.float(), positions[:, 0], rtol=1e-6, atol=0)
    assert prompt.rope_delta == pytest.approx(float(deltas), rel=1e-6)
    assert (prompt.positions % 1 > 0.01).any() and prompt.spans[1].time == 0
    assert prompt.spans[2].time == pytest.approx(13 * 2 / 7)
    whole = preprocessors["omni"].prepare_tokens(prompt.token_ids)
    assert whole.positions.dtype == torch.int64, "text alone has no fractions"


def test_a_continued_prompt_has_the_positions_of_a_new_one(
    preprocessors: dict[str, Preprocessor], checkpoints: dict[str, Path]
) -> None:
    video = clip(frames(4, 64, 64), fps=0.3, num_frames=-1)
    first = [say("x", video, "What?"), {"role": "assistant", "content": "A cat."}]
    messages = [*first, say("And then?", clip(frames(2, 64, 64), fps=3, num_frames=-1))]
    preprocessor = preprocessors["omni"]
    preprocessor.prepare(first)
    before = preprocessor.known_text.prompts.counts["hits"]
    continued = preprocessor.prepare(messages)
    assert preprocessor.known_text.prompts.counts["hits"] > before
    preprocessor.forget()
    fresh = preprocessor.prepare(messages)
    assert torch.equal(continued.positions, fresh.positions)
    assert continued.rope_delta == fresh.rope_delta


def at_rate(preprocessor: Preprocessor, rate: float, count: int = 12) -> Prompt:
    video = clip(frames(count, 64, 64), fps=rate, num_frames=-1)
    return preprocessor.prepare([say("This is a recording: ", video, "What is the red circle?")])


def test_the_same_frames_at_another_rate_share_nothing_behind_the_first_patch(
    timed: Preprocessor,
) -> None:
    slow, fast = at_rate(timed, 1.0), at_rate(timed, 2.0)
    assert slow.token_ids == fast.token_ids
    pixels = [[span.pixels for span in prompt.spans] for prompt in (slow, fast)]
    assert pixels[0] == pixels[1], "embeddings are shared"
    assert [span.time for span in slow.spans] == [0, 4, 8, 12, 16, 20]
    assert [span.time for span in fast.spans] == [0, 2, 4, 6, 8, 10]
    first = slow.spans[0].end // slow.keys.block_size
    assert first and slow.keys.block_keys[:first] == fast.keys.block_keys[:first]
    rest = set(slow.keys.block_keys[first:]), set(fast.keys.block_keys[first:])
    assert all(rest) and rest[0].isdisjoint(rest[1])
    assert not set(slow.keys.tails.values()) & {
        key for cut, key in fast.keys.tails.items() if cut > fast.spans[0].end
    }
    again = at_rate(timed, 1.0)
    assert again.keys.block_keys == slow.keys.block_keys


def test_patches_a_position_apart_do_not_depend_on_the_rate(
    preprocessors: dict[str, Preprocessor],
) -> None:
    slow, fast = (at_rate(preprocessors["vl of qwen2"], rate) for rate in (1.0, 2.0))
    assert [span.time for span in slow.spans] == list(range(6))
    assert slow.keys.block_keys == fast.keys.block_keys


def test_an_answer_goes_on_behind_the_text_also_if_a_patch_is_later(timed: Preprocessor) -> None:
    late, soon = at_rate(timed, 0.1), at_rate(timed, 4.0)
    for prompt, later in ((late, True), (soon, False)):
        last = int(prompt.positions[0, -1])
        assert prompt.rope_delta + len(prompt) == last + 1, "as in generate"
        assert (int(prompt.positions.max()) > last) is later


@given(st.integers(1, 400), st.floats(0.1, 500), st.integers(2, 64), st.sampled_from([1, 2]))
def test_sampled_frames_fill_whole_patches(
    total: int, wanted: float, most: int, together: int
) -> None:
    found = patch_indices(total, wanted, most, together)
    assert found == sorted(set(found)) and found[0] == 0 and found[-1] < total
    assert len(found) % together == 0 or len(found) == total
    assert len(found) <= max(most, together - 1)


def test_more_frames_than_allowed_are_refused(timed: Preprocessor) -> None:
    with pytest.raises(Exception, match="limit of 4"):
        part = clip(frames(12), num_frames=-1, max_frames=4)
        timed.prepare([say(part)])


def test_a_rate_that_is_none_is_refused(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    from checkpoint_parts import write_json

    from vlm_serve.preprocess.text.tokenizer import read_json

    path = make_checkpoint(tmp_path, SPECS["vl of qwen2.5"])
    config = read_json(path / "config.json")
    config["vision_config"]["tokens_per_second"] = -1
    write_json(path / "config.json", config)
    with pytest.raises(CheckpointError, match="tokens_per_second in config.json must be"):
        build(path)
