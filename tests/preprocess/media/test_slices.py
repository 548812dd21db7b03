"""Pictures and videos in slices: tokens, pixels and positions are those of transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import media_reference
import oracle
import pytest
import torch
from checkpoint_parts import write_json
from checkpoint_spec import CheckpointSpec
from conversation import Messages, build, clip, picture, say
from families import FAMILIES
from make_checkpoint import make_checkpoint
from PIL import Image

from vlm_serve.errors import CheckpointError, InvalidRequestError
from vlm_serve.preprocess.identity.keys import embedding_key
from vlm_serve.preprocess.identity.prompt import Prompt
from vlm_serve.preprocess.media.media_processors import processor_fingerprint
from vlm_serve.preprocess.prepare import Preprocessor
from vlm_serve.preprocess.text.tokenizer import read_json

# transformers' processor counts a tensor's numbers with numpy.
pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")
KINDS = ("minicpmv4_6", "minicpmv4_7", "minicpm_ocr")


@pytest.fixture(scope="module", params=[*KINDS, "4x", "never enlarged"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name = request.param
    spec = CheckpointSpec(family=name if name in KINDS else KINDS[0], num_layers=4)
    if name == "4x":
        spec = FAMILIES["minicpmv4_6"]["minicpm, 4x, tied"]
    if name == "never enlarged":
        spec = FAMILIES["minicpm_ocr"]["minicpm ocr"]
    made = make_checkpoint(tmp_path_factory.mktemp("slices"), spec)
    if name == "never enlarged":
        file = made / "preprocessor_config.json"
        write_json(file, read_json(file) | {"small_image_upsize": "never"})
    return made


@pytest.fixture(scope="module")
def sliced(path: Path) -> Iterator[Preprocessor]:
    made = build(path)
    yield made
    made.close()


def conversations(image: Image.Image, videos: Path) -> dict[str, Messages]:
    sizes = [(150, 100), (40, 190), (500, 60), (30, 31), (96, 96), (97, 96), (333, 250)]
    pictures = [picture(image.resize(size)) for size in sizes]
    return {
        "text": [say("hello")],
        **{
            f"one image, {size}": [say(one, "What's that?")]
            for size, one in zip(sizes, pictures, strict=True)
        },
        "image last": [say("What's that?", pictures[0])],
        "images together": [say(*pictures, "?")],
        "images over turns": [
            say(pictures[0], "a"),
            {"role": "assistant", "content": "A cat."},
            say("b", pictures[1], "\n", pictures[3], "\n\n", pictures[3], "\nc"),
        ],
        "one video": [say(clip(str(videos / "carphone_pristine.mp4")), "What's that?")],
        "all kinds": [
            {"role": "system", "content": "See."},
            say(pictures[0], "a", clip(str(videos / "bikes.mp4")), "b", pictures[1]),
            {"role": "assistant", "content": "", "reasoning_content": "hm"},
            say(clip(str(videos / "carphone_pristine.mp4")), "c", pictures[2]),
        ],
    }


def packed(prompt: Prompt, modality: str) -> torch.Tensor | None:
    """All pixels as transformers has them: `[1, 3, patch, patches * patch]`."""
    spans = [span for span in prompt.spans if span.modality == modality]
    if not spans:
        return None
    patches = torch.cat([prompt.media[span.item].patches(span.patch) for span in spans])
    side = int((patches.shape[1] / 3) ** 0.5)
    return patches.view(-1, 3, side, side).permute(1, 2, 0, 3).reshape(1, 3, side, -1)


def assert_equal(prompt: Prompt, expected: dict[str, Any], path: Path) -> None:
    """Ids, pixels, grids and positions, bit for bit."""
    assert list(prompt.token_ids) == expected["input_ids"][0].tolist()
    for modality, name, sizes in (
        ("image", "pixel_values", "target_sizes"),
        ("video", "pixel_values_videos", "target_sizes_videos"),
    ):
        pixels = packed(prompt, modality)
        assert (pixels is None) == (name not in expected)
        if pixels is not None:
            assert torch.equal(pixels, expected[name])
            grids = [list(span.grid[1:]) for span in prompt.spans if span.modality == modality]
            assert grids == expected[sizes].tolist()
    length = len(prompt.token_ids)
    positions, delta = torch.arange(length).expand(3, length), 0
    if "mm_token_type_ids" in expected and prompt.spans:
        known = {name: value for name, value in expected.items() if "pixel" not in name}
        found = oracle.model(path).model.get_rope_index(**known)
        positions, delta = found[0][:, 0], int(found[1])
    assert torch.equal(prompt.positions, positions)
    assert (prompt.positions.dtype, prompt.rope_delta) == (torch.int64, delta)


def test_a_turn_that_continues_a_known_prompt_is_prepared_as_from_nothing(
    path: Path, sliced: Preprocessor, photographs: Path, videos: Path
) -> None:
    """Pictures next to each other among the known turns and among the new ones."""
    with Image.open(photographs / "coffee.png") as image:
        known = conversations(image.convert("RGB"), videos)
    together = known["images together"][0]
    turns = [together, {"role": "assistant", "content": "Seven."}, together]
    fresh = build(path)
    try:
        whole = fresh.prepare(turns)
    finally:
        fresh.close()
    for length in (1, 3):
        continued = sliced.prepare(turns[:length])
    assert continued.token_ids == whole.token_ids and continued.spans == whole.spans
    assert torch.equal(continued.positions, whole.positions)
    assert continued.rope_delta == whole.rope_delta
    assert continued.keys.block_keys == whole.keys.block_keys
    assert continued.keys.tails == whole.keys.tails


def test_equal_to_transformers(
    path: Path, sliced: Preprocessor, photographs: Path, videos: Path
) -> None:
    with Image.open(photographs / "coffee.png") as image:
        known = conversations(image.convert("RGB"), videos)
    for messages in known.values():
        assert_equal(sliced.prepare(messages), media_reference.inputs(path, messages), path)


@pytest.mark.parametrize(
    "options", [{"downsample_mode": "4x"}, {"max_slice_nums": 3}, {"max_slice_nums": 1}]
)
def test_options_of_a_request(
    path: Path, sliced: Preprocessor, cat: Image.Image, options: dict[str, Any]
) -> None:
    messages = [say(picture(cat.resize((400, 200))), "What's that?")]
    asked = media_reference.inputs(path, messages, processor_kwargs=dict(options))
    if "downsample_mode" in options:
        asked["downsample_mode"] = options["downsample_mode"]
    for_all = sliced.prepare(messages, mm_processor_kwargs=dict(options))
    assert_equal(for_all, asked, path)
    for_one = sliced.prepare([say(picture(cat.resize((400, 200)), **options), "What's that?")])
    assert for_one.keys.block_keys == for_all.keys.block_keys


def test_low_detail_is_the_whole_picture_alone(sliced: Preprocessor, cat: Image.Image) -> None:
    prompt = sliced.prepare([say(picture(cat.resize((400, 200)), detail="low"), "?")])
    assert len(prompt.spans) == 1


def test_the_same_pixels_become_more_tokens(tmp_path: Path) -> None:
    """Neither blocks nor embeddings are shared then."""
    path = make_checkpoint(tmp_path, CheckpointSpec(family="minicpmv4_6"))
    made = build(path)
    image = Image.effect_noise((96, 96), 50)
    coarse, fine = (
        made.prepare([say(picture(image, downsample_mode=mode), "?")]) for mode in ("16x", "4x")
    )
    made.close()
    one, other = coarse.spans[0], fine.spans[0]
    assert (one.content_hash, one.grid) == (other.content_hash, other.grid)
    assert 4 * (one.end - one.start) == other.end - other.start
    keys = [embedding_key(b"r", span.content_hash, span.merge_size) for span in (one, other)]
    assert keys[0] != keys[1]
    assert coarse.keys.tails.keys() | fine.keys.tails.keys()
    assert not set(coarse.keys.tails.values()) & set(fine.keys.tails.values())


def test_slices_have_hashes_of_their_own(sliced: Preprocessor, cat: Image.Image) -> None:
    """Painting over one corner changes the whole picture and the slice there, and no other one."""
    large = cat.resize((300, 300))
    painted = large.copy()
    painted.paste((255, 0, 0), (0, 0, 20, 20))
    one, two = (sliced.prepare([say(picture(each), "?")]) for each in (large, painted))
    assert len(one.spans) > 4
    differ = [a.content_hash != b.content_hash for a, b in zip(one.spans, two.spans, strict=True)]
    assert differ == [True, True] + [False] * (len(differ) - 2)


@pytest.mark.parametrize(("kind", "alike"), [("minicpmv4_6", True), ("minicpmv4_7", False)])
def test_on_a_canvas_a_whole_picture_is_not_that_of_other_slices(
    tmp_path: Path, kind: str, alike: bool
) -> None:
    """Where its tokens lie follows from slices that come behind it."""
    made = build(make_checkpoint(tmp_path, CheckpointSpec(family=kind)))
    image = Image.effect_noise((300, 300), 50)
    few, many = (made.prepare([say(picture(image, max_slice_nums=n), "?")]) for n in (2, 9))
    made.close()
    assert few.spans[0].end == many.spans[0].end
    assert (few.spans[0].content_hash == many.spans[0].content_hash) == alike
    at = few.spans[0].end
    assert (few.keys.tails[at] == many.keys.tails[at]) == alike
    same = torch.equal(few.positions[:, :at], many.positions[:, :at])
    assert same == alike


def test_a_longer_recording_keeps_the_frames_of_a_shorter_one(sliced: Preprocessor) -> None:
    frames = torch.randint(0, 256, (48, 64, 200, 3), dtype=torch.uint8).numpy()
    options = {"sampling": "fps_grid", "sample_fps": 4.0, "fps": 24.0}
    short, long = (
        sliced.prepare([say(clip(frames[:count], **options), "?")]) for count in (24, 48)
    )
    assert len(short.spans) > 4 and 2 * len(short.spans) == len(long.spans)
    assert [span.content_hash for span in short.spans] == [
        span.content_hash for span in long.spans[: len(short.spans)]
    ]
    shared = short.spans[-1].end // 16
    assert short.keys.block_keys[:shared] == long.keys.block_keys[:shared]


def test_frames_that_a_request_counts(sliced: Preprocessor) -> None:
    frames = torch.randint(0, 256, (30, 32, 32, 3), dtype=torch.uint8).numpy()
    for options, count in (
        ({"num_frames": 5}, 5),
        ({"fps": 5.0}, 6),
        ({"fps": 5.0, "sample_fps": 0.5}, 3),
        ({"fps": 5.0, "max_frames": 4}, 4),
    ):
        assert len(sliced.prepare([say(clip(frames, **options), "?")]).spans) == count


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"max_slice_nums": 0}, r"content\[0\]: max_slice_nums must be a whole number from 1 to"),
        ({"max_slice_nums": 10}, r"max_slice_nums must be a whole number from 1 to"),
        ({"downsample_mode": "8x"}, r"downsample_mode must be 16x or 4x"),
        ({"max_pixels": 1000}, r"max_pixels is not an option for images of this model"),
    ],
)
def test_bad_options_are_named(
    sliced: Preprocessor, cat: Image.Image, options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(InvalidRequestError, match=complaint) as caught:
        sliced.prepare([say(picture(cat, **options), "?")])
    assert caught.value.param == f"messages[0].content[0].{next(iter(options))}"


def test_options_of_slices_are_none_elsewhere(preprocessor: Preprocessor, cat: Image.Image) -> None:
    with pytest.raises(
        InvalidRequestError, match="max_slice_nums is not an option for images of this"
    ):
        preprocessor.prepare([say(picture(cat, max_slice_nums=3), "?")])


@pytest.mark.parametrize(
    ("file", "change", "complaint"),
    [
        ("preprocessor_config.json", {"downsample_mode": "8x"}, "downsample_mode '8x' of the proc"),
        (
            "preprocessor_config.json",
            {"downsample_mode": "4x"},
            "is '4x', but in config.json it",
        ),
        ("preprocessor_config.json", {"do_resize": False}, "do_resize False of the processor"),
        ("preprocessor_config.json", {"max_slice_nums": 0}, "max_slice_nums of the processor"),
        (
            "preprocessor_config.json",
            {"patch_size": 14},
            "patch_size of the processor config",
        ),
        (
            "preprocessor_config.json",
            {"small_image_upsize": "adaptive"},
            "small_image_upsize 'adaptive' of the processor",
        ),
        ("video_preprocessor_config.json", {"stack_frames": 3}, "stack_frames 3 of the processor"),
        ("config.json", {"downsample_mode": "4x"}, "but in config.json it is '4x'"),
        ("config.json", {"image_token_id": 5}, "image_token_id of the checkpoint is not a special"),
        (
            "tokenizer_config.json",
            {"slice_start_token": "<cut>"},
            "'<cut>' of the checkpoint is",
        ),
    ],
)
def test_settings_that_nobody_supports_are_named(
    tmp_path: Path, file: str, change: dict[str, Any], complaint: str
) -> None:
    path = make_checkpoint(tmp_path, CheckpointSpec(family="minicpmv4_6"))
    content = json.loads((path / file).read_text()) | change
    (path / file).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=complaint):
        build(path)


def test_settings_are_in_the_fingerprint(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "a", CheckpointSpec(family="minicpmv4_6"))
    other = shutil.copytree(path, tmp_path / "b")
    content = json.loads((other / "preprocessor_config.json").read_text())
    (other / "preprocessor_config.json").write_text(json.dumps(content | {"max_slice_nums": 4}))
    assert processor_fingerprint(path) != processor_fingerprint(other)
