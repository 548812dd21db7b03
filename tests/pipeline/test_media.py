"""Pictures and videos as Python programs hold them."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

from vlm_serve import EngineConfig, Pipeline, SamplingParams
from vlm_serve.errors import MediaError
from vlm_serve.pipeline.media import plain

MEDIA = Path(__file__).parents[2] / "examples" / "media"
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
PIXELS = np.asarray(PIL.Image.open(MEDIA / "shapes.png").convert("RGB"))
FORMS: dict[str, Callable[[np.ndarray[Any, Any]], Any]] = {
    "tensor": lambda pixels: torch.from_numpy(pixels.copy()),
    "tensor, channels first": lambda pixels: torch.from_numpy(pixels.copy()).movedim(-1, -3),
    "float tensor": lambda pixels: torch.from_numpy(pixels.copy()).movedim(-1, -3) / 255,
    "float64": lambda pixels: pixels / 255.0,
    "channels first": lambda pixels: np.moveaxis(pixels, -1, -3),
    "int64": lambda pixels: pixels.astype(np.int64),
    "gradient": lambda pixels: (torch.from_numpy(pixels.copy()) / 255).requires_grad_(),
}


@pytest.fixture(scope="module")
def pipe() -> Iterator[Pipeline]:
    with Pipeline("demo", EngineConfig(cache_memory="64MiB", threads=1)) as made:
        yield made


@pytest.mark.parametrize("form", FORMS)
def test_a_picture_is_the_same_in_every_form(form: str) -> None:
    assert np.array_equal(plain(FORMS[form](PIXELS)), PIXELS)
    frames = np.stack([PIXELS, PIXELS[::-1]])
    assert np.array_equal(plain(FORMS[form](frames)), frames)


def test_pictures_of_one_channel_and_of_two_values() -> None:
    grey = PIXELS[..., 0]
    for form in (grey[..., None], grey[None], torch.from_numpy(grey.copy())[None] / 255.0):
        assert np.array_equal(plain(form), grey)
    assert np.array_equal(plain(grey > 9), (grey > 9) * 255)
    deep = grey.astype(np.uint16) << 8
    assert plain(deep) is deep


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (PIXELS.astype(np.float32), "floating-point pixels must be from 0 to 1"),
        (PIXELS / 255.0 - 1, "from 0 to 1"),
        (np.full((4, 4, 3), np.nan), "from 0 to 1"),
        (PIXELS.astype(np.int64) + 100, "from 0 to 255"),
        (np.array([["a"]]), "pixels must be numbers"),
        (io.StringIO("text"), "binary mode"),
    ],
)
def test_what_is_no_picture_is_refused_by_place(pipe: Pipeline, source: Any, said: str) -> None:
    part = {"type": "image", "image": source}
    with pytest.raises(MediaError, match=said) as caught:
        pipe.chat([{"role": "user", "content": [{"type": "text", "text": "?"}, part]}])
    assert caught.value.param == "messages[0].content[1]"
    with pytest.raises(MediaError, match=said):
        pipe(("?", source))


class _Pipe(io.RawIOBase):
    """A stream that can be read once, such as the answer of a web server."""

    def __init__(self, data: bytes) -> None:
        self._data = io.BytesIO(data)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._data.readinto(buffer)


def test_open_files_are_read_from_their_start(pipe: Pipeline) -> None:
    data = (MEDIA / "shapes.png").read_bytes()
    written = io.BytesIO()
    written.write(data)  # It stands at its end, as after PIL's save.
    with (MEDIA / "shapes.png").open("rb") as opened:
        for source in (written, opened, _Pipe(data), opened):
            assert pipe(("What color is the star?", source), GREEDY).text == "The star is red."


def test_an_open_video_is_a_video(pipe: Pipeline) -> None:
    clip = MEDIA / "change.mp4"
    with clip.open("rb") as opened:
        answers = [pipe(("What changes?", source), GREEDY) for source in (clip, opened)]
    assert answers[0].prompt_token_ids == answers[1].prompt_token_ids
    assert answers[0].text == answers[1].text


def test_frames_may_be_tensors(pipe: Pipeline) -> None:
    frames = [torch.from_numpy(PIXELS.copy()).movedim(-1, 0) / 255] * 4
    parts = [{"type": "video", "video": frames}, {"type": "text", "text": "What is it?"}]
    listed = pipe.chat([{"role": "user", "content": parts}], GREEDY)
    stacked = pipe(("What is it?", torch.stack(frames)), GREEDY)
    assert listed.prompt_token_ids == stacked.prompt_token_ids
    assert listed.text == stacked.text
