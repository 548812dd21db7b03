"""The interface of numbered frames, and videos given as arrays or as lists of pictures."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import PIL.Image
import torch

from vlm_serve.errors import MediaError
from vlm_serve.preprocess.media.images import Pixels, image_to_rgb
from vlm_serve.preprocess.media.limits import DEFAULT_FPS, MediaLimits, check_video
from vlm_serve.preprocess.media.video_times import FrameTimes
from vlm_serve.preprocess.reading.conversation import MediaPart

MAX_FRAME_FILES = 4096
LISTED_FPS = 2.0
"""Frames a second of a list without a rate, as Qwen's own reader assumes."""
_LISTED = re.compile(r"data:video/(?:jpeg|jpg|png|webp)(?:;[^,;]*)*,", re.IGNORECASE)
_DOMAIN = b"vlm-serve frames 1"
_CHOICES = frozenset({"sampling", "sample_fps", "num_frames"})


class Video(Protocol):
    """A video with random access to its frames."""

    fps: float
    """Average frames per second."""

    times: Sequence[float]
    """Seconds of every frame since the first one, ascending."""

    steady: bool
    """The frames are `1 / fps` apart, as precisely as `times` can say it."""

    cut_short: bool
    """A part of the file is missing, or does not decode."""

    sound: bool
    """So far nothing shows damage, so a frame has the same pixels whatever else is decoded."""

    def frames(self, indices: Sequence[int]) -> Iterator[Pixels]:
        """Yield uint8 `[height, width, 3]` for each index; ascending, repetitions allowed."""
        ...


class ArrayVideo:
    """A video of already decoded frames.

    Args:
        frames: uint8 `[T, height, width, 3]`, or a sequence of PIL images or of `[height, width,
            3]` arrays of one size.
        fps: frames per second; None: 24, as transformers assumes.
        limits: limits on frames, pixels and length.

    Raises MediaError if the frames are of another form, there are none, or a limit is exceeded.
    """

    def __init__(self, frames: Any, fps: float | None, limits: MediaLimits) -> None:
        if isinstance(frames, torch.Tensor):
            frames = frames.detach().cpu().numpy()
        if not isinstance(frames, np.ndarray):
            frames = _stack(frames, limits)
        if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[-1] != 3:
            raise MediaError(
                "video frames must be uint8 [frames, height, width, 3], not "
                f"{frames.dtype} {list(frames.shape)}"
            )
        if frames.size == 0:
            raise MediaError("the video has no frames")
        self._frames = frames
        self.fps = DEFAULT_FPS if fps is None else fps
        self.steady, self.cut_short, self.sound = True, False, True
        check_video(len(frames), len(frames) / self.fps, frames.shape[1:3], limits)
        self.times = FrameTimes.even(len(frames), self.fps).seconds

    def frames(self, indices: Sequence[int]) -> Iterator[Pixels]:
        for index in indices:
            # torch accepts neither read-only arrays nor negative strides.
            yield np.array(self._frames[index], order="C")


def _stack(frames: Any, limits: MediaLimits) -> Any:
    if not isinstance(frames, list | tuple) or not frames:
        raise MediaError("a video must be a file, frames or a list of images")
    if len(frames) > limits.max_video_frames:
        raise MediaError(f"the video is over {limits.max_video_frames} frames")
    arrays = [
        image_to_rgb(frame, limits) if isinstance(frame, PIL.Image.Image) else frame
        for frame in frames
    ]
    if any(not isinstance(array, np.ndarray) for array in arrays):
        raise MediaError("the frames of a video must be images or arrays")
    if any(array.shape != arrays[0].shape for array in arrays):
        raise MediaError("the frames of a video must be of one size")
    return np.stack(arrays)


@dataclass(frozen=True, slots=True)
class FrameFiles:
    """The files of a video's frames, in order."""

    files: tuple[bytes, ...]

    @property
    def packed(self) -> bytes:
        """All bytes, with lengths, for a key."""
        return _DOMAIN + b"".join(len(file).to_bytes(8, "little") + file for file in self.files)


class ListedVideo:
    """A `Video` of files, decoded one after the other.

    Args:
        decode: returns a context with the pixels of a frame.
        count: number of frames.
        fps: frames a second.
        param: the request field to name in errors.
    """

    steady, cut_short, sound = True, False, True

    def __init__(
        self,
        decode: Callable[[int], AbstractContextManager[Pixels]],
        count: int,
        fps: float,
        limits: MediaLimits,
        param: str,
    ) -> None:
        self._decode, self._param, self.fps = decode, param, fps
        check_video(count, count / fps, (0, 0), limits)
        self.times = FrameTimes.even(count, fps).seconds

    def frames(self, indices: Sequence[int]) -> Iterator[Pixels]:
        """See `Video.frames`. Raises MediaError, also for frames of several sizes."""
        size: tuple[int, ...] | None = None
        for index in indices:
            with self._decode(index) as pixels:
                if size is not None and pixels.shape != size:
                    raise MediaError("the frames of a video must be of one size", param=self._param)
                size = pixels.shape
                yield pixels


def frame_sources(source: Any) -> Sequence[str | bytes | Path] | None:
    """Return the sources of a video's frames, if it is a list of pictures.

    A data: URL of the type video/jpeg has their base64 in one text, with commas between them, as
    vLLM reads it.
    """
    if isinstance(source, list | tuple):
        files = all(isinstance(picture, str | bytes | Path) for picture in source)
        return source if source and files else None
    if isinstance(source, str) and (head := _LISTED.match(source[:256])):
        frames = source[head.end() :].split(",")
        image = head.group().replace("video/", "image/", 1)
        return [image + frame for frame in frames]
    return None


def check_frame_count(sources: Sequence[Any]) -> None:
    """Raise MediaError for more files than a video may have."""
    if len(sources) > MAX_FRAME_FILES:
        raise MediaError(
            f"a video may have at most {MAX_FRAME_FILES} frames as pictures, not {len(sources)}"
        )


def places(part: MediaPart, sources: Sequence[Any]) -> Iterator[MediaPart]:
    """Yield the frames as images, each with its place in the request."""
    for index, source in enumerate(sources):
        yield MediaPart("image", source, {}, f"{part.param}[{index}]", url_only=part.url_only)


def listed_options(part: MediaPart, options: Any) -> Any:
    """Return the options of a video of chosen frames: all are taken, unless the request samples
    them itself."""
    if options.fps is None:
        options = dataclasses.replace(options, fps=LISTED_FPS)
    if not part.options.keys() & _CHOICES:
        options = dataclasses.replace(options, num_frames=-1, sample_fps=None)
    return options
