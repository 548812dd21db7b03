"""`prepare` end to end against transformers' processor and model."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import media_reference
import numpy as np
import oracle
import pytest
import torch
from checkpoint_spec import CheckpointSpec
from conversation import (
    TOOLS,
    Messages,
    build,
    clip,
    frames,
    picture,
    png_url,
    say,
    tool_conversation,
)
from make_checkpoint import make_checkpoint
from PIL import Image

from vlm_serve.preprocess.identity.prompt import Prompt
from vlm_serve.preprocess.prepare import Preprocessor


def assert_equal(prompt: Prompt, expected: dict[str, Any], checkpoint: Path) -> None:
    """Ids, positions and pixels of a prompt, bit for bit."""
    assert list(prompt.token_ids) == expected["input_ids"][0].tolist()
    for modality, name, grid in (
        ("image", "pixel_values", "image_grid_thw"),
        ("video", "pixel_values_videos", "video_grid_thw"),
    ):
        items = [item for item in prompt.media if item.modality == modality]
        assert [list(item.grid) for item in items] == expected.get(grid, torch.empty(0)).tolist()
        pixels = [item.patches(patch) for item in items for patch in range(item.grid[0])]
        if items:
            assert torch.equal(torch.cat(pixels), expected[name])
    rope_index = oracle.model(checkpoint).model.get_rope_index
    positions, delta = rope_index(
        input_ids=expected["input_ids"],
        mm_token_type_ids=expected["mm_token_type_ids"],
        image_grid_thw=expected.get("image_grid_thw"),
        video_grid_thw=expected.get("video_grid_thw"),
    )
    assert torch.equal(prompt.positions, positions[:, 0])
    assert prompt.positions.dtype == torch.int64
    assert prompt.rope_delta == int(delta[0, 0])


def conversations(image: Image.Image) -> dict[str, Messages]:
    tall = image.resize((40, 190))
    return {
        "text": [say("hello")],
        "system": [{"role": "system", "content": "Be brief."}, say("hello ", "there")],
        "one image": [say(picture(image), "What's that?")],
        "image last": [say("What's that?", picture(tall))],
        "images together": [say(picture(image), picture(tall), picture(image), "?")],
        "images over turns": [
            say(picture(image), "a"),
            {"role": "assistant", "content": "A cat."},
            say("b", picture(tall), "c", picture(image)),
        ],
        "one video": [say(clip(frames(30)), "What's that?")],
        "odd video": [say("x", clip(frames(62, 40, 200)), "y")],
        "all kinds": [
            {"role": "system", "content": "See."},
            say(picture(image), "a", clip(frames(50)), "b", picture(tall)),
            {"role": "assistant", "content": "", "reasoning_content": "hm"},
            say(clip(frames(13, seed=1)), clip(frames(40, seed=2)), "c"),
        ],
    }


@pytest.mark.parametrize("name", conversations(Image.new("RGB", (4, 4))))
def test_prompts_equal_transformers(
    name: str, preprocessor: Preprocessor, checkpoint: Path, cat: Image.Image
) -> None:
    messages = conversations(cat)[name]
    prompt = preprocessor.prepare(messages)
    assert_equal(prompt, media_reference.inputs(checkpoint, messages), checkpoint)


@pytest.mark.parametrize("name", ["bikes.mp4", "carphone_pristine.mp4"])
def test_real_videos_equal_transformers(
    name: str, preprocessor: Preprocessor, checkpoint: Path, videos: Path
) -> None:
    messages = [say(clip(str(videos / name)), "What happens?")]
    prompt = preprocessor.prepare(messages)
    assert_equal(prompt, media_reference.inputs(checkpoint, messages), checkpoint)


def test_frames_with_a_rate_equal_transformers(
    preprocessor: Preprocessor, checkpoint: Path
) -> None:
    video = frames(45)
    metadata = {"total_num_frames": 45, "fps": 5.0, "frames_indices": list(range(45))}
    expected = media_reference.inputs(
        checkpoint, [say(clip(video))], processor_kwargs={"video_metadata": [metadata]}
    )
    prompt = preprocessor.prepare([say(clip(video, fps=5))])
    assert_equal(prompt, expected, checkpoint)
    assert prompt.token_ids != preprocessor.prepare([say(clip(video))]).token_ids


def test_the_same_with_other_processors(tmp_path: Path, cat: Image.Image) -> None:
    """A Qwen2-VL-like budget, three frames to a patch, one config file, a cap per frame."""
    spec = CheckpointSpec(patch_size=8, temporal_patch_size=3)
    path = make_checkpoint(tmp_path / "c", spec)
    images = json.loads((path / "preprocessor_config.json").read_text())
    video = json.loads((path / "video_preprocessor_config.json").read_text())
    images |= {"size": None, "min_pixels": 2500, "max_pixels": 20_000}
    images |= {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}
    video |= {"fps": 4, "cap_pixels_per_frame": True, "max_video_tokens": 20}
    nested = {"processor_class": "Qwen3VLProcessor", "image_processor": images}
    (path / "processor_config.json").write_text(json.dumps(nested | {"video_processor": video}))
    made = build(path)
    messages = [say(picture(cat), clip(frames(31)), "?")]
    assert_equal(made.prepare(messages), media_reference.inputs(path, messages), path)
    made.close()


@pytest.mark.parametrize(
    "options",
    [
        {"tools": TOOLS},
        {"tools": TOOLS, "add_generation_prompt": False},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ],
)
def test_tools_and_kwargs_equal_transformers(
    preprocessor: Preprocessor, checkpoint: Path, options: dict[str, Any]
) -> None:
    prompt = preprocessor.prepare(tool_conversation(), **options)
    given = {**options, **options.get("chat_template_kwargs", {})}
    given.pop("chat_template_kwargs", None)
    expected = media_reference.inputs(checkpoint, tool_conversation(), **given)
    assert_equal(prompt, expected, checkpoint)


def test_openai_forms_mean_the_same(preprocessor: Preprocessor, cat: Image.Image) -> None:
    call = {"function": {"name": "look", "arguments": '{"at": "é"}'}, "type": "function"}
    openai = tool_conversation()
    openai[1] = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "hm"}
    plain = preprocessor.prepare(tool_conversation(), tools=TOOLS)
    assert preprocessor.prepare(openai, tools=TOOLS).token_ids == plain.token_ids
    developer = preprocessor.prepare([{"role": "developer", "content": "x"}, say("y")])
    assert (
        developer.token_ids == preprocessor.prepare([say("x", role="system"), say("y")]).token_ids
    )
    url = png_url(cat)
    by_object = preprocessor.prepare([say(picture(cat), "?")])
    for part in (
        {"type": "image_url", "image_url": {"url": url, "detail": "high"}},
        {"type": "image_url", "image_url": url},
        {"type": "input_image", "image_url": url},
        picture(url),
        picture(base64.b64decode(url.partition(",")[2])),
        picture(np.asarray(cat)),
    ):
        prompt = preprocessor.prepare([say(part, "?")])
        assert prompt.keys.block_keys == by_object.keys.block_keys


@pytest.mark.parametrize("end", ["", " ", "\n\n"])
def test_continued_messages_equal_transformers(
    preprocessor: Preprocessor, checkpoint: Path, end: str
) -> None:
    for content in ("It is" + end, [{"type": "text", "text": "It is" + end}]):
        messages = [say("what?"), {"role": "assistant", "content": content}]
        expected = media_reference.inputs(
            checkpoint, messages, add_generation_prompt=False, continue_final_message=True
        )
        prompt = preprocessor.prepare(
            messages, add_generation_prompt=False, continue_final_message=True
        )
        assert_equal(prompt, expected, checkpoint)
        assert prompt.token_ids[-1] not in preprocessor.tokenizer.end_of_turn_ids


def test_a_tiny_image_is_fine(preprocessor: Preprocessor, checkpoint: Path) -> None:
    messages = [say(picture(Image.new("RGB", (1, 1), (9, 9, 9))))]
    prompt = preprocessor.prepare(messages)
    assert_equal(prompt, media_reference.inputs(checkpoint, messages), checkpoint)


def test_token_ids_that_config_json_leaves_out_are_the_familys(
    preprocessor: Preprocessor, checkpoint: Path, tmp_path: Path, cat: Image.Image
) -> None:
    """transformers writes null where its class has no default."""
    config = json.loads((checkpoint / "config.json").read_text())
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    expected = preprocessor.prepare([say(picture(cat), clip(frames(8)))]).token_ids
    nulls: tuple[dict[str, None], ...] = (dict.fromkeys(names), {})
    for index, given in enumerate(nulls):
        path = tmp_path / str(index)
        shutil.copytree(checkpoint, path)
        kept = {name: value for name, value in config.items() if name not in names}
        (path / "config.json").write_text(json.dumps(kept | given))
        made = build(path)
        assert made.prepare([say(picture(cat), clip(frames(8)))]).token_ids == expected
        made.close()
