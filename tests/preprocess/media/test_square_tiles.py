"""Pictures in squares without tokens around them, and videos whose frames are one square each:
tokens, pixels, positions, the model's logits and its answers are those of transformers."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import media_reference
import oracle
import pytest
import torch
from conversation import Messages, build, clip, frames, picture, record, say
from families import FAMILIES
from make_checkpoint import make_checkpoint
from model_driver import Driver, Sequence_
from PIL import Image
from safetensors.torch import load_file, save_file

from vlm_serve.errors import CheckpointError, InvalidRequestError
from vlm_serve.models import load_model
from vlm_serve.preprocess.identity.prompt import Prompt
from vlm_serve.preprocess.media.media_processors import processor_fingerprint
from vlm_serve.preprocess.media.processing import tile_grid
from vlm_serve.preprocess.prepare import Preprocessor

SIZES = [(150, 100), (40, 190), (500, 2), (30, 31), (96, 86), (97, 196), (333, 250), (1, 1)]
"""Width and height: the odd ones of them are seen whole or in up to four tiles."""


@pytest.fixture(scope="module", params=FAMILIES["internvl"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = FAMILIES["internvl"][request.param]
    return make_checkpoint(tmp_path_factory.mktemp("squares"), spec)


@pytest.fixture(scope="module")
def tiled(path: Path) -> Iterator[Preprocessor]:
    made = build(path)
    yield made
    made.close()


def conversations(photographs: Path) -> dict[str, Messages]:
    with Image.open(photographs / "coffee.png") as opened:
        image = opened.convert("RGB")
    pictures = [picture(image.resize(size)) for size in SIZES]
    return {
        "text": [say("hello")],
        **{str(size): [say(one, "What?")] for size, one in zip(SIZES, pictures, strict=True)},
        "two pictures": [
            say(pictures[0], "a", pictures[3], "b"),
            {"role": "assistant", "content": "A cat."},
            say("c", pictures[2]),
        ],
        "video": [say("This is a recording: ", clip(frames(5, 37, 90)), "What?")],
        "videos and pictures": [
            say(clip(frames(1, 5, 500)), pictures[0], clip(frames(1, 64, 64)), "a", pictures[3]),
        ],
    }


def assert_equal(prompt: Prompt, expected: dict[str, Any]) -> None:
    """Ids and pixels, bit for bit; positions count."""
    assert list(prompt.token_ids) == expected["input_ids"][0].tolist()
    assert len(prompt.spans) == len(expected.get("pixel_values", ()))
    # A picture's tiles come first, and the whole of it last.
    for index, span in enumerate(prompt.spans):
        _, rows, columns = span.grid
        side = expected["pixel_values"].shape[-1] // rows
        patches = prompt.media[span.item].patches(span.patch).view(rows, columns, 3, side, side)
        pixels = patches.permute(2, 0, 3, 1, 4).reshape(3, rows * side, columns * side)
        assert torch.equal(pixels, expected["pixel_values"][index])
        assert span.end - span.start == rows * columns // 4
    length = len(prompt.token_ids)
    assert torch.equal(prompt.positions, torch.arange(length).expand(3, length))
    assert prompt.rope_delta == 0


def test_equal_to_transformers(path: Path, tiled: Preprocessor, photographs: Path) -> None:
    found = set()
    for messages in conversations(photographs).values():
        prompt = tiled.prepare(messages)
        assert_equal(prompt, media_reference.inputs(path, messages))
        found.add(len(prompt.spans))
    assert {0, 1, 3, 5} <= found, "some are seen whole, others cut"


@pytest.mark.parametrize("count", [1, 7, 24])
@pytest.mark.parametrize("option", ["num_frames", "fps"])
def test_sampled_videos(
    path: Path, tiled: Preprocessor, tmp_path: Path, option: str, count: int
) -> None:
    file = tmp_path / "clip.mp4"
    record(file, frames(24, 30, 50), 8)
    kwargs: dict[str, Any] = {option: count if option == "num_frames" else count / 3}
    messages = [say("x", clip(str(file)), "What?")]
    expected = media_reference.inputs(
        path, messages, processor_kwargs={"do_sample_frames": True, **kwargs}
    )
    prompt = tiled.prepare(messages, mm_processor_kwargs=kwargs)
    assert_equal(prompt, expected)
    assert len(prompt.spans) == count


@pytest.mark.parametrize("kind", [{"num_frames": 6}, {"fps": 2.0}])
def test_a_files_own_sampling(path: Path, tmp_path: Path, kind: dict[str, Any]) -> None:
    """Frames are sampled if the file says so."""
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = tmp_path / "video_preprocessor_config.json"
    fields = json.loads(config.read_text()) | {"do_sample_frames": True, **kind}
    config.write_text(json.dumps(fields))
    video = tmp_path / "clip.mp4"
    record(video, frames(24, 30, 50), 8)
    messages = [say("x", clip(str(video)), "What?")]
    made = build(tmp_path)
    assert_equal(made.prepare(messages), media_reference.inputs(tmp_path, messages))
    made.close()
    assert processor_fingerprint(tmp_path) != processor_fingerprint(path)


def test_options_of_slices_are_none_of_videos(tiled: Preprocessor) -> None:
    with pytest.raises(InvalidRequestError, match="max_slice_nums is not an option for videos"):
        tiled.prepare([say(clip(frames(3), max_slice_nums=2))])
    with pytest.raises(InvalidRequestError, match="800 frames of the video are over the limit"):
        tiled.prepare([say(clip(frames(800, 4, 4)))])
    assert len(tiled.prepare([say(clip(frames(800, 4, 4), num_frames=6))]).spans) == 6


def test_without_a_token_for_videos(path: Path, tmp_path: Path) -> None:
    """Pictures are taken all the same."""
    for file in path.iterdir():
        text = file.read_bytes().replace(b"<video>", b"<other>")
        (tmp_path / file.name).write_bytes(text if file.suffix == ".json" else file.read_bytes())
    made = build(tmp_path)
    assert len(made.prepare([say(picture(Image.new("RGB", (32, 32))))]).spans) == 1
    with pytest.raises(InvalidRequestError, match="does not place the images and videos"):
        made.prepare([say(clip(frames(3)))])
    made.close()


def test_logits_and_greedy_tokens(path: Path, tiled: Preprocessor, photographs: Path) -> None:
    model = load_model(path, torch.float32, "cpu")
    for name in ("text", str(SIZES[0]), "two pictures", "video", "videos and pictures"):
        messages = conversations(photographs)[name]
        inputs, prompt = media_reference.inputs(path, messages), tiled.prepare(messages)
        media = []
        if prompt.spans:
            patches = [prompt.media[span.item].patches(span.patch) for span in prompt.spans]
            grids, merges = zip(*((s.grid, s.merge_size) for s in prompt.spans), strict=True)
            embedded = model.encode_media(torch.cat(patches), grids, merges)
            media = [(s.start, rows) for s, rows in zip(prompt.spans, embedded, strict=True)]
        tokens = list(prompt.token_ids)
        one = Sequence_(tokens, prompt.positions, media)
        got = Driver(model, block_size=64).prefill(one)
        torch.testing.assert_close(got, oracle.logits(path, inputs), atol=1e-4, rtol=0)
        again = Sequence_(list(tokens), prompt.positions, media)
        expected = oracle.greedy(path, inputs, 24)
        assert Driver(model, block_size=64).generate(again, 24) == expected


def test_names_of_older_files(path: Path, tmp_path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    older = {
        name.replace("model.language_model.", "language_model.model.")
        .replace("lm_head.", "language_model.lm_head.")
        .removeprefix("model."): tensor
        for name, tensor in tensors.items()
    }
    assert {name.partition(".")[0] for name in older} == {
        *("language_model", "vision_tower", "multi_modal_projector")
    }
    (tmp_path / "config.json").write_bytes((path / "config.json").read_bytes())
    save_file(older, tmp_path / "model.safetensors")
    patches = torch.rand(64, 3 * 8 * 8, generator=torch.Generator().manual_seed(0))
    found = []
    for each in (path, tmp_path):
        model = load_model(each, torch.float32, "cpu")
        rows = model.encode_media(patches, [(1, 8, 8)], [2])[0]
        one = Sequence_(list(range(20)), torch.arange(20).expand(3, 20), [(2, rows)])
        found.append(Driver(model, block_size=64).prefill(one))
    assert torch.equal(*found)


@pytest.mark.parametrize("options", [{"detail": "low"}, {"max_slice_nums": 1}])
def test_one_request_may_leave_out_tiles(
    path: Path, tiled: Preprocessor, photographs: Path, options: dict[str, Any]
) -> None:
    messages = conversations(photographs)[str(SIZES[0])]
    expected = media_reference.inputs(path, messages, processor_kwargs={"crop_to_patches": False})
    part = next(part for part in messages[0]["content"] if part["type"] != "text")
    changed = [{**messages[0], "content": [{**part, **options}, *messages[0]["content"][1:]]}]
    assert_equal(tiled.prepare(changed), expected)


def test_cuts_are_those_of_transformers() -> None:
    from transformers.models.got_ocr2.image_processing_got_ocr2 import get_optimal_tiled_canvas

    draw = random.Random(0)
    sizes = [(64, 64), (100, 80), (80, 100), (1000, 1250), (400, 500), (1, 3000)]
    sizes += [(draw.randint(1, 3000), draw.randint(1, 3000)) for _ in range(300)]
    for size in sizes:
        for least, most in ((1, 1), (1, 4), (2, 12), (1, 12)):
            wanted = get_optimal_tiled_canvas(size, (448, 448), least, most)
            assert tile_grid(*size, least, most, side=448, ordered=True) == wanted[::-1]


@pytest.mark.parametrize(
    ("file", "changes", "complaint"),
    [
        (
            "preprocessor",
            {"size": {"height": 64, "width": 32}},
            "size must be the side of a square",
        ),
        ("preprocessor", {"size": {"height": 40, "width": 40}}, "size 40 is no multiple of a"),
        ("preprocessor", {"max_patches": 0}, "max_patches of the processor config must be a posi"),
        ("processor", {"image_seq_length": 8}, "image_seq_length 8 of the processor config"),
        ("video_preprocessor", {"initial_shift": 0}, "initial_shift 0 of the processor config"),
        ("video_preprocessor", {"do_resize": False}, "do_resize False of the processor config"),
    ],
)
def test_settings_that_do_not_fit_are_named(
    path: Path, tmp_path: Path, file: str, changes: dict[str, Any], complaint: str
) -> None:
    names = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
    for name in ("config.json", *names):
        (tmp_path / name).write_bytes((path / name).read_bytes())
    before = processor_fingerprint(tmp_path)
    changed = tmp_path / "preprocessor_config.json"
    changed.write_text(json.dumps(json.loads(changed.read_text()) | {"max_patches": 3}))
    assert processor_fingerprint(tmp_path) != before
    broken = tmp_path / f"{file}_config.json"
    broken.write_text(json.dumps(json.loads(broken.read_text()) | changes))
    with pytest.raises(CheckpointError, match=complaint):
        processor_fingerprint(tmp_path)
