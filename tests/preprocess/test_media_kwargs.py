"""Options for all media of a request, in vLLM's two fields, against transformers' processor."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import media_reference
import numpy as np
import pytest
import torch
from conversation import Messages, clip, frames, picture, say
from PIL import Image

from vlm_serve.errors import InvalidRequestError, MediaError
from vlm_serve.preprocess.identity.prompt import Prompt
from vlm_serve.preprocess.prepare import Preprocessor


def assert_equal(prompt: Prompt, expected: dict[str, Any]) -> None:
    """Ids and pixels, bit for bit."""
    assert list(prompt.token_ids) == expected["input_ids"][0].tolist()
    for modality, name in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        items = [item for item in prompt.media if item.modality == modality]
        if items:
            pixels = [item.patches(patch) for item in items for patch in range(item.grid[0])]
            assert torch.equal(torch.cat(pixels), expected[name])


def film(image: Image.Image) -> Messages:
    return [say(clip(frames(60, 80, 120)), picture(image), "?")]


@pytest.mark.parametrize(
    "kwargs",
    [
        {"num_frames": 6, "fps": None},
        {"num_frames": 7, "fps": None},
        {"fps": 5},
        {"images_kwargs": {"size": {"shortest_edge": 4096, "longest_edge": 8192}}},
        {"videos_kwargs": {"size": {"shortest_edge": 4096, "longest_edge": 40_000}}},
        {"size": {"shortest_edge": 4096, "longest_edge": 30_000}},
        {
            "videos_kwargs": {"num_frames": 4, "fps": None},
            "images_kwargs": {"size": {"shortest_edge": 60_000, "longest_edge": 80_000}},
        },
        {"do_sample_frames": True},
    ],
)
def test_processor_kwargs_are_those_of_transformers(
    preprocessor: Preprocessor, checkpoint: Path, cat: Image.Image, kwargs: dict[str, Any]
) -> None:
    messages = film(cat)
    expected = media_reference.inputs(checkpoint, messages, processor_kwargs=deepcopy(kwargs))
    assert_equal(preprocessor.prepare(messages, mm_processor_kwargs=kwargs), expected)


def test_pixel_bounds_by_either_name(preprocessor: Preprocessor, cat: Image.Image) -> None:
    named = {"min_pixels": 4096, "max_pixels": 30_000}
    size = {"size": {"shortest_edge": 4096, "longest_edge": 30_000}}
    assert (
        preprocessor.prepare(film(cat), mm_processor_kwargs=named).token_ids
        == preprocessor.prepare(film(cat), mm_processor_kwargs=size).token_ids
    )


def hashes(prompt: Prompt) -> list[bytes]:
    return [span.content_hash for span in prompt.spans]


def video_prompt(preprocessor: Preprocessor, video: Any, io: dict[str, Any], **part: Any) -> Prompt:
    return preprocessor.prepare([say(clip(video, **part))], media_io_kwargs={"video": io})


def test_frames_by_number_and_rate(preprocessor: Preprocessor) -> None:
    """60 frames at 24 a second; two make one temporal patch."""
    video = frames(60)

    def count(io: dict[str, Any], **part: Any) -> int:
        return 2 * len(video_prompt(preprocessor, video, io, **part).spans)

    assert count({"num_frames": 8}) == 8
    assert count({"num_frames": 8, "fps": 2}) == 6  # 5 frames, the last one twice
    assert count({"num_frames": 4, "fps": 20}) == 4
    assert count({"fps": 4}) == 10
    assert count({"num_frames": 400}) == count({"num_frames": -1}) == 60
    assert count({"num_frames": -1, "fps": -1}) == 60
    assert count({"num_frames": -1, "fps": 4}) == 10
    assert count({"num_frames": 8}, num_frames=20) == 20  # a part's own comes first
    assert count({"num_frames": None}) == count({}) == 6
    with pytest.raises(MediaError, match="over the limit of 20"):
        count({"num_frames": -1}, max_frames=20)


def test_they_are_part_of_the_identity(preprocessor: Preprocessor, videos: Path) -> None:
    """The same upload with other options is another medium, and is not taken for the first."""
    data = (videos / "bikes.mp4").read_bytes()
    eight = video_prompt(preprocessor, data, {"num_frames": 8})
    four = video_prompt(preprocessor, data, {"num_frames": 4})
    again = video_prompt(preprocessor, data, {"num_frames": 8})
    part = preprocessor.prepare([say(clip(data, num_frames=8))])
    assert hashes(eight) == hashes(again) == hashes(part)
    assert len(eight.spans) == 4 and len(four.spans) == 2
    assert eight.keys.block_keys == again.keys.block_keys
    assert not again.media[0].decoded and four.media[0].decoded


def test_what_a_reader_gives_is_not_sampled_again(preprocessor: Preprocessor) -> None:
    messages, io = [say(clip(frames(60)))], {"video": {"num_frames": 8}}
    plain = preprocessor.prepare(messages, media_io_kwargs=io)
    kept = preprocessor.prepare(
        messages, media_io_kwargs=io, mm_processor_kwargs={"do_sample_frames": False}
    )
    assert hashes(kept) == hashes(plain)


def test_what_is_done_anyway_may_be_asked_for(preprocessor: Preprocessor, cat: Image.Image) -> None:
    io = {"image": {"image_mode": "RGB", "rgba_background_color": (255, 255, 255)}}
    assert preprocessor.prepare([say(picture(cat))], media_io_kwargs=io).spans
    none: dict[str, Any] = {"media_io_kwargs": {}, "mm_processor_kwargs": {"size": None}}
    assert preprocessor.prepare([say(picture(cat))], **none).spans


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("media_io_kwargs", 3, ""),
        ("media_io_kwargs", {5: {}}, ""),
        ("media_io_kwargs", {"audio": {}}, ".audio"),
        ("media_io_kwargs", {"video": 3}, ".video"),
        ("media_io_kwargs", {"video": {"num_frames": 0}}, ".video.num_frames"),
        ("media_io_kwargs", {"video": {"num_frames": 10**9}}, ".video.num_frames"),
        ("media_io_kwargs", {"video": {"num_frames": 1.5}}, ".video.num_frames"),
        ("media_io_kwargs", {"video": {"num_frames": True}}, ".video.num_frames"),
        ("media_io_kwargs", {"video": {"fps": 0}}, ".video.fps"),
        ("media_io_kwargs", {"video": {"fps": "2"}}, ".video.fps"),
        ("media_io_kwargs", {"video": {"video_backend": "x"}}, ".video.video_backend"),
        ("media_io_kwargs", {"image": {"num_frames": 2}}, ".image.num_frames"),
        ("media_io_kwargs", {"image": {"image_mode": "RGBA"}}, ".image.image_mode"),
        ("mm_processor_kwargs", [], ""),
        ("mm_processor_kwargs", {"max_pixels": 10**12}, ".max_pixels"),
        ("mm_processor_kwargs", {"min_pixels": 0}, ".min_pixels"),
        ("mm_processor_kwargs", {"size": 3}, ".size"),
        ("mm_processor_kwargs", {"size": {"height": 3}}, ".size.height"),
        ("mm_processor_kwargs", {"size": {"longest_edge": "a"}}, ".size.longest_edge"),
        (
            "mm_processor_kwargs",
            {"max_pixels": 9999, "size": {"longest_edge": 9999}},
            ".size.longest_edge",
        ),
        ("mm_processor_kwargs", {"do_resize": False}, ".do_resize"),
        ("mm_processor_kwargs", {"do_sample_frames": False}, ".do_sample_frames"),
        ("mm_processor_kwargs", {"fps": 2, "do_sample_frames": False}, ".do_sample_frames"),
        ("mm_processor_kwargs", {"do_sample_frames": 1}, ".do_sample_frames"),
        ("mm_processor_kwargs", {"images_kwargs": {"fps": 2}}, ".images_kwargs.fps"),
        (
            "mm_processor_kwargs",
            {"images_kwargs": {"images_kwargs": {}}},
            ".images_kwargs.images_kwargs",
        ),
        ("mm_processor_kwargs", {"videos_kwargs": {"image_mean": 2}}, ".videos_kwargs.image_mean"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    preprocessor: Preprocessor, cat: Image.Image, field: str, value: Any, param: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        preprocessor.prepare(film(cat), **{field: value})
    assert caught.value.param == field + param
    assert field + param in caught.value.message
    assert not isinstance(caught.value, MediaError)


def test_options_are_checked_without_media(preprocessor: Preprocessor) -> None:
    for kwargs in ({"max_pixels": 10**12}, {"num_frames": 10**9}):
        with pytest.raises(InvalidRequestError, match="whole number"):
            preprocessor.prepare([say("hello")], mm_processor_kwargs=kwargs)


def test_the_same_twice_is_refused(preprocessor: Preprocessor) -> None:
    with pytest.raises(
        InvalidRequestError, match="sets the same option as media_io_kwargs.video.fps"
    ):
        preprocessor.prepare(
            [say(clip(np.zeros((4, 64, 64, 3), np.uint8)))],
            media_io_kwargs={"video": {"fps": 2}},
            mm_processor_kwargs={"fps": 1},
        )
