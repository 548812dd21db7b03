"""Prompts with pictures and videos equal transformers', through its own processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from checkpoint_spec import CheckpointSpec
from families import SPECS as FAMILIES
from make_checkpoint import make_checkpoint
from model_driver import Driver, Sequence_
from PIL import Image

from vlm_serve.models import Model, load_model

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def picture(width: int, height: int, seed: int) -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def frames(count: int, seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (count, 32, 48, 3), dtype=np.uint8)


CONTENTS: dict[str, list[dict[str, Any]]] = {
    "one image": [
        {"type": "image", "image": picture(70, 45, 1)},
        {"type": "text", "text": "What is the red circle?"},
    ],
    "four images": [
        {"type": "image", "image": picture(40, 40, 2)},
        {"type": "image", "image": picture(40, 40, 3)},
        {"type": "text", "text": "or"},
        {"type": "image", "image": picture(64, 32, 4)},
        {"type": "image", "image": picture(40, 40, 2)},
    ],
    "video": [
        {"type": "video", "video": frames(8, 5)},
        {"type": "text", "text": "Describe the street."},
    ],
    "mixed": [
        {"type": "text", "text": "Compare"},
        {"type": "video", "video": frames(6, 6)},
        {"type": "image", "image": picture(33, 90, 7)},
        {"type": "video", "video": frames(4, 8)},
        {"type": "text", "text": "please."},
    ],
}


SPECS = {
    "dense": CheckpointSpec(num_layers=4),
    "moe": CheckpointSpec(num_layers=4, num_experts=4),
    "vl": FAMILIES["vl"],
    "vl moe": FAMILIES["vl moe, every second layer dense"],
}


@pytest.fixture(scope="module", params=SPECS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("media"), SPECS[request.param])


def processed(path: Path, content: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    messages = [{"role": "user", "content": content}]
    return dict(
        oracle.processor(path).apply_chat_template(
            messages,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
    )


def sequence(path: Path, model: Model, inputs: dict[str, torch.Tensor]) -> Sequence_:
    """The prompt with M-RoPE positions from transformers and embeddings from our tower."""
    keys = ("input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw")
    known = {key: inputs[key] for key in keys if key in inputs}
    positions, _ = oracle.model(path).model.get_rope_index(**known)
    tokens = inputs["input_ids"][0]
    config, media = json.loads((path / "config.json").read_text()), []
    for kind, token, name in (
        ("pixel_values", config["image_token_id"], "image_grid_thw"),
        ("pixel_values_videos", config["video_token_id"], "video_grid_thw"),
    ):
        if kind in inputs:
            grids = [(1, h, w) for t, h, w in inputs[name].tolist() for _ in range(t)]
            embeddings = torch.cat(model.encode_media(inputs[kind], grids))
            places = [at for at, one in enumerate(tokens.tolist()) if one == token]
            media += [(at, embeddings[i : i + 1]) for i, at in enumerate(places)]
    return Sequence_(tokens.tolist(), positions[:, 0], sorted(media, key=lambda pair: pair[0]))


@pytest.mark.parametrize("kind", CONTENTS)
def test_logits_and_greedy_tokens(path: Path, kind: str) -> None:
    inputs = processed(path, CONTENTS[kind])
    model = load_model(path, torch.float32, "cpu")
    expected = oracle.logits(path, inputs)
    one = sequence(path, model, inputs)
    torch.testing.assert_close(Driver(model).prefill(one), expected, atol=1e-4, rtol=0)
    continued = sequence(path, model, inputs)
    assert Driver(model).generate(continued, 32) == oracle.greedy(path, inputs, 32)


def test_prompts_of_all_kinds_in_one_batch_cut_inside_media(path: Path) -> None:
    model = load_model(path, torch.float32, "cpu")
    driver = Driver(model)
    inputs = [processed(path, content) for content in CONTENTS.values()]
    prompts = [sequence(path, model, one) for one in inputs]
    for one in prompts:
        one.cuts = (29,)
    first = driver.step(prefills=[(one, 0, 29) for one in prompts]).logits
    rest = driver.step(
        prefills=[(one, 29, len(one.tokens)) for one in prompts], all_logits=False
    ).logits
    for raw, start, end in zip(inputs, first.view(len(inputs), 29, -1), rest, strict=True):
        expected = oracle.logits(path, raw)
        torch.testing.assert_close(start, expected[:29], atol=1e-4, rtol=0)
        torch.testing.assert_close(end, expected[-1], atol=1e-4, rtol=0)
