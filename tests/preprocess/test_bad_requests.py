"""Requests that `prepare` refuses, each with the field at fault."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
from checkpoint_parts import MIN_VOCAB_SIZE
from checkpoint_spec import CheckpointSpec
from conversation import (
    build,
    clip,
    frames,
    picture,
    png_url,
    say,
)
from make_checkpoint import make_checkpoint
from PIL import Image

from vlm_serve.errors import InvalidRequestError, MediaError, MediaFetchError
from vlm_serve.preprocess.media.limits import MediaLimits
from vlm_serve.preprocess.media.media_processors import processor_fingerprint
from vlm_serve.preprocess.prepare import Preprocessor


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        ("hello", "messages"),
        ({"role": "user"}, "messages"),
        ([1], "messages[0]"),
        ([{}], "messages[0].role"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": [3]}], "messages[0].content[0]"),
        ([say({"type": "text"})], "messages[0].content[0].text"),
        ([say({"type": "text", "text": 3})], "messages[0].content[0].text"),
        ([say({"type": "sound"})], "messages[0].content[0].type"),
        ([say({"text": "x"})], "messages[0].content[0].type"),
        ([say("a", {"type": "image_url"})], "messages[0].content[1].image_url"),
        ([say({"type": "image_url", "image_url": {}})], "messages[0].content[0].image_url.url"),
        ([say({"type": "image_url", "image_url": {"url": 3}})], None),
        ([say({"type": "image_url", "image_url": "/etc/passwd"})], None),
        ([say({"type": "image_url", "image_url": "cat.png"})], None),
        ([say(picture("data:,x", image_mean=[0] * 3))], "messages[0].content[0].image_mean"),
        ([say(clip("data:,x", do_rescale=False))], "messages[0].content[0].do_rescale"),
        ([say({"type": "image_url", "image_url": {"url": "data:,", "std": 1}})], None),
        ([say("x"), {"role": "assistant", "tool_calls": 3}], "messages[1].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0]"),
        (
            [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1"}]}],
            "messages[0].tool_calls[0].arguments",
        ),
        (
            [
                {
                    "role": "assistant",
                    "tool_calls": [
                        {"function": {"name": "f", "arguments": "{" + " " * (1 << 20) + "}"}}
                    ],
                }
            ],
            "messages[0].tool_calls[0].function.arguments",
        ),
        ([{"role": "assistant", "content": "x", "reasoning": 3}], "messages[0]"),
        ([say("x") | {"name": object()}], "messages[0].name"),
        ([say("\ud800")], "messages"),
        ([say(picture(Image.new("L", (9, 9))), role="system")], "messages"),
    ],
)
def test_bad_messages_name_the_field(
    preprocessor: Preprocessor, messages: Any, param: str | None
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        preprocessor.prepare(messages)
    assert caught.value.status == 400
    assert caught.value.param is not None
    if param is not None:
        assert caught.value.param == param


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": 3}, "tools"),
        ({"tools": [3]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [{"function": {"name": "f", "x": b"y"}}]}, "tools[0]"),
        ({"chat_template_kwargs": 3}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {str(i): i for i in range(99)}}, "chat_template_kwargs"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
    ],
)
def test_bad_options_name_the_option(
    preprocessor: Preprocessor, options: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        preprocessor.prepare([say("x")], **options)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("part", "options", "name"),
    [
        (picture, {"detail": "ultra"}, "detail"),
        (picture, {"max_pixels": 10}, "max_pixels"),
        (picture, {"max_pixels": 10**9}, "max_pixels"),
        (picture, {"max_pixels": True}, "max_pixels"),
        (picture, {"min_pixels": "many"}, "min_pixels"),
        (picture, {"min_pixels": 5000, "max_pixels": 4096}, "min_pixels"),
        (clip, {"fps": 0}, "fps"),
        (clip, {"fps": float("nan")}, "fps"),
        (clip, {"fps": "2"}, "fps"),
        (clip, {"sample_fps": -1}, "sample_fps"),
        (clip, {"max_frames": 0}, "max_frames"),
        (clip, {"max_frames": 769}, "max_frames"),
        (clip, {"num_frames": 0}, "num_frames"),
        (clip, {"num_frames": 769}, "num_frames"),
        (clip, {"num_frames": 8, "sampling": "fps_grid"}, "num_frames"),
        (clip, {"sampling": "best"}, "sampling"),
        (clip, {"max_frame_pixels": 4096}, "max_frame_pixels"),
        (clip, {"max_frame_pixels": 1, "sampling": "fps_grid"}, "max_frame_pixels"),
    ],
)
def test_bad_media_options_name_the_option(
    preprocessor: Preprocessor, cat: Image.Image, part: Any, options: dict[str, Any], name: str
) -> None:
    media = cat if part is picture else frames(8)
    with pytest.raises(InvalidRequestError) as caught:
        preprocessor.prepare([say("a", part(media, **options))])
    assert caught.value.param == f"messages[0].content[1].{name}", "beside the medium"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "video", "video": "data:,x", "grid": True},
        {"type": "video", "video": "data:,x", "max_pixels": 65536},
        {"type": "video", "video": "data:,x", "detail": "low"},
        {"type": "image", "image": "data:,x", "sample_fps": 1},
        {"type": "image", "image": "data:,x", 5: 1},
        {"type": "image_url", "image_url": {"url": "data:,x", "colour": "red"}},
        {"type": "video_url", "video_url": {"url": "data:,x"}, "x" * 9999: 1},
    ],
)
def test_unknown_keys_of_a_media_part_are_refused(
    preprocessor: Preprocessor, part: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequestError, match="is not an option for (image|video)s") as caught:
        preprocessor.prepare([say("a", part)])
    assert caught.value.param == "messages[0].content[1]"
    assert len(caught.value.message) < 300


def test_keys_that_say_nothing_here_pass(preprocessor: Preprocessor, cat: Image.Image) -> None:
    """Null is no value, and clients of other services mark parts for those."""
    idle = {"grid": None, "uuid": "a", "cache_control": {"type": "ephemeral"}}
    assert preprocessor.prepare([say(picture(cat, **idle))]).spans
    url = {"url": png_url(cat), "format": "image/png", "detail": None}
    assert preprocessor.prepare([say({"type": "image_url", "image_url": url})]).spans


def test_media_options_have_effects(preprocessor: Preprocessor, cat: Image.Image) -> None:
    big = cat.resize((1200, 900))

    def tokens(part: dict[str, Any]) -> int:
        return sum(span.end - span.start for span in preprocessor.prepare([say(part)]).spans)

    assert tokens(picture(big, detail="low")) * 256 <= 512 * 512
    assert tokens(picture(big, detail="low")) < tokens(picture(big, detail="high"))
    assert tokens(picture(big, detail="auto")) == tokens(picture(big))
    assert tokens(picture(big, max_pixels=10_000)) * 256 <= 10_000
    assert tokens(picture(cat, min_pixels=200_000)) * 256 >= 200_000
    video = frames(100)
    assert len(preprocessor.prepare([say(clip(video, max_frames=4))]).spans) == 2
    assert len(preprocessor.prepare([say(clip(video, sample_fps=5))]).spans) == 10
    assert len(preprocessor.prepare([say(clip(video, num_frames=20))]).spans) == 10
    assert len(preprocessor.prepare([say(clip(video))]).spans) == 4


def test_bad_media_are_typed_errors(preprocessor: Preprocessor, tmp_path: Path) -> None:
    (tmp_path / "empty.png").write_bytes(b"")
    cases: list[tuple[Any, type[InvalidRequestError], int]] = [
        (picture(tmp_path / "empty.png"), MediaError, 400),
        (picture(str(tmp_path / "missing.png")), MediaFetchError, 422),
        (picture(tmp_path), MediaFetchError, 422),
        (picture(b"not an image"), MediaError, 400),
        (picture(Image.new("L", (2010, 10))), MediaError, 400),
        (picture(3), MediaError, 400),
        (picture(np.zeros((2, 2, 7), dtype=np.uint8)), MediaError, 400),
        (picture("http://127.0.0.1:1/x.png"), MediaFetchError, 422),
        (picture(f"file://{tmp_path}/empty.png"), InvalidRequestError, 400),
        (clip(tmp_path / "empty.png"), MediaError, 400),
        (clip(b"not a video"), MediaError, 400),
        (clip(np.zeros((0, 4, 4, 3), dtype=np.uint8)), MediaError, 400),
        (clip(frames(4, 1, 300)), MediaError, 400),
        (clip(3), MediaError, 400),
    ]
    for part, kind, status in cases:
        with pytest.raises(InvalidRequestError) as caught:
            preprocessor.prepare([say("a", part)])
        assert type(caught.value) is kind
        assert caught.value.status == status
        assert caught.value.param is not None
        assert caught.value.param.startswith("messages[0].content[1]")
        assert str(tmp_path) not in caught.value.message


def test_numbers_of_media_are_bounded(checkpoint: Path, cat: Image.Image) -> None:
    made = build(checkpoint, limits=MediaLimits(max_images=1, max_videos=0))
    made.prepare([say(picture(cat))])
    with pytest.raises(InvalidRequestError, match="1 images") as caught:
        made.prepare([say(picture(cat)), say("a", picture(cat))])
    assert caught.value.param == "messages[1].content[1].image"
    with pytest.raises(InvalidRequestError, match="0 videos"):
        made.prepare([say(clip(frames(4)))])


def test_a_text_only_checkpoint_takes_no_media(tmp_path: Path, cat: Image.Image) -> None:
    path = make_checkpoint(tmp_path / "c", CheckpointSpec(vision_depth=0))
    made = build(path)
    prompt = made.prepare([say("hello")])
    assert list(prompt.token_ids) == oracle.tokenizer(path)(prompt.text)["input_ids"]
    for part in (picture(cat), clip(frames(4))):
        with pytest.raises(InvalidRequestError, match="takes no") as caught:
            made.prepare([say("a", part)])
        assert caught.value.param == f"messages[0].content[1].{part['type']}"
    assert processor_fingerprint(path) != b""


def test_a_template_that_drops_media_is_found_out(
    checkpoint: Path, tmp_path: Path, cat: Image.Image
) -> None:
    shutil.copytree(checkpoint, tmp_path / "c")
    for template in ("x", "<|vision_start|><|video_pad|><|vision_end|>", "<|image_pad|>" * 2):
        (tmp_path / "c" / "chat_template.jinja").write_text(template)
        with pytest.raises(InvalidRequestError, match="does not place"):
            build(tmp_path / "c").prepare([say(picture(cat))])


def test_vocabulary_of_the_model_bounds_raw_ids(checkpoint: Path) -> None:
    made = build(checkpoint)
    size = json.loads((checkpoint / "config.json").read_text())["text_config"]["vocab_size"]
    assert size >= MIN_VOCAB_SIZE
    made.prepare_tokens([size - 1])
    with pytest.raises(InvalidRequestError):
        made.prepare_tokens([size])
