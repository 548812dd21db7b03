"""Pictures in tiles: tokens, pixels, positions and the model's logits are those of transformers."""

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
from conversation import Messages, build, picture, say
from families import FAMILIES
from make_checkpoint import make_checkpoint
from model_driver import Driver, Sequence_
from PIL import Image

from vlm_serve.errors import CheckpointError, InvalidRequestError
from vlm_serve.models import load_model
from vlm_serve.preprocess.identity.prompt import Prompt
from vlm_serve.preprocess.media.media_processors import processor_fingerprint
from vlm_serve.preprocess.media.processing import image_size, tile_grid
from vlm_serve.preprocess.prepare import Preprocessor

# transformers' processor counts a tensor's numbers with numpy.
pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")
SIZES = [(150, 100), (40, 190), (500, 60), (30, 31), (96, 86), (97, 96), (333, 250)]
"""Width and height: the odd ones of them are seen whole or in up to four tiles."""


@pytest.fixture(scope="module", params=FAMILIES["lfm2_vl"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = FAMILIES["lfm2_vl"][request.param]
    return make_checkpoint(tmp_path_factory.mktemp("tiles"), spec)


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
    }


def assert_equal(prompt: Prompt, expected: dict[str, Any]) -> None:
    """Ids, pixels and grids, bit for bit; positions count."""
    assert list(prompt.token_ids) == expected["input_ids"][0].tolist()
    grids = [list(span.grid[1:]) for span in prompt.spans]
    assert grids == (expected["spatial_shapes"].tolist() if prompt.spans else [])
    for index, span in enumerate(prompt.spans):
        patches = prompt.media[span.item].patches(span.patch)
        side = int((patches.shape[1] / 3) ** 0.5)
        last = patches.view(-1, 3, side, side).permute(0, 2, 3, 1).flatten(1)
        assert torch.equal(last, expected["pixel_values"][index, : len(last)])
        assert span.end - span.start == len(patches) // 4
    length = len(prompt.token_ids)
    assert torch.equal(prompt.positions, torch.arange(length).expand(3, length))
    assert prompt.rope_delta == 0


def test_equal_to_transformers(path: Path, tiled: Preprocessor, photographs: Path) -> None:
    found = set()
    for messages in conversations(photographs).values():
        prompt = tiled.prepare(messages)
        assert_equal(prompt, media_reference.inputs(path, messages))
        found.add(tuple(span.grid for span in prompt.spans))
    lengths = set(map(len, found))
    assert {1, 5} <= lengths and len(found) >= 5, "some are seen whole, others cut"


def test_logits_and_greedy_tokens(path: Path, tiled: Preprocessor, photographs: Path) -> None:
    model = load_model(path, torch.float32, "cpu")
    for name in (str(SIZES[0]), "two pictures"):
        messages = conversations(photographs)[name]
        inputs, prompt = media_reference.inputs(path, messages), tiled.prepare(messages)
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


@pytest.mark.parametrize("options", [{"detail": "low"}, {"max_slice_nums": 1}])
def test_one_request_may_leave_out_tiles(
    path: Path, tiled: Preprocessor, photographs: Path, options: dict[str, Any]
) -> None:
    messages = conversations(photographs)[str(SIZES[0])]
    expected = media_reference.inputs(
        path, messages, processor_kwargs={"do_image_splitting": False}
    )
    part = next(part for part in messages[0]["content"] if part["type"] != "text")
    changed = [{**messages[0], "content": [{**part, **options}, *messages[0]["content"][1:]]}]
    assert_equal(tiled.prepare(changed), expected)


def test_options_of_other_models_are_refused(tiled: Preprocessor, photographs: Path) -> None:
    messages = conversations(photographs)[str(SIZES[0])]
    part = next(part for part in messages[0]["content"] if part["type"] != "text")
    for name in ("max_pixels", "downsample_mode"):
        with pytest.raises(InvalidRequestError, match=f"{name} is not an option for images"):
            tiled.prepare([{**messages[0], "content": [{**part, name: 4}]}])


def test_cuts_are_those_of_transformers(path: Path) -> None:
    processor, draw = oracle.processor(path).image_processor, random.Random(0)
    sizes = [(64, 64), (100, 80), (80, 100), (1000, 1250)]
    sizes += [(draw.randint(1, 3000), draw.randint(1, 3000)) for _ in range(300)]
    for height, width in sizes:
        for most in (2, 4, 10):
            wanted = processor._get_grid_layout(height, width, 2, most, 512)[:2]
            assert tile_grid(height, width, 2, most, side=512) == wanted[::-1]


def test_a_side_below_half_a_token_counts_as_one(path: Path) -> None:
    """Rounded to nothing, it would make the picture too small, and enlarge it."""
    processor, bounds = oracle.processor(path).image_processor, {"min_pixels": 1024}
    tokens = {"min_image_tokens": 4, "max_image_tokens": 16}
    for height, width in [(1, 199), (199, 1), (7, 300), (1, 1), (3, 90), (600, 5)]:
        wanted = processor.smart_resize(height, width, 2, **tokens, encoder_patch_size=8)
        sides = image_size(height, width, factor=16, max_pixels=4096, least=16, **bounds)
        assert sides == wanted[::-1]


@pytest.mark.parametrize("size", [(1, 199), (199, 1), (3, 90)])
def test_thin_pictures_are_as_in_transformers(
    path: Path, tiled: Preprocessor, size: tuple[int, int]
) -> None:
    messages = [say(picture(Image.effect_noise(size, 90).convert("RGB")), "What?")]
    assert_equal(tiled.prepare(messages), media_reference.inputs(path, messages))


NO_NUMBERS: tuple[Any, ...] = ("x", None, [], True)


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("min_tiles", 1, "min_tiles 1 of the processor config is not supported"),
        ("tile_size", 0, "tile_size of the processor config must be a positive integer"),
        ("encoder_patch_size", 4, "patch_size of the processor config is 4, but patch_size in"),
        ("downsample_factor", 4, "downsample_factor of the processor config is 4, but"),
        *(
            ("max_pixels_tolerance", bad, "max_pixels_tolerance of the processor config must be a")
            for bad in (*NO_NUMBERS, 0, -1, float("nan"))
        ),
        *(("resample", bad, "resample .* is not supported") for bad in (*NO_NUMBERS, 2.5)),
    ],
)
def test_settings_that_do_not_fit_are_named(
    path: Path, tmp_path: Path, name: str, value: Any, complaint: str
) -> None:
    for file in ("config.json", "preprocessor_config.json"):
        (tmp_path / file).write_bytes((path / file).read_bytes())
    changed = tmp_path / "preprocessor_config.json"
    before = processor_fingerprint(tmp_path)
    changed.write_text(json.dumps(json.loads(changed.read_text()) | {"max_tiles": 3}))
    assert processor_fingerprint(tmp_path) != before
    changed.write_text(json.dumps(json.loads(changed.read_text()) | {name: value}))
    with pytest.raises(CheckpointError, match=complaint):
        processor_fingerprint(tmp_path)
