"""The interface of videos as numbered frames, and videos given as arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import PIL.Image
import torch

from vlm_serve.errors import MediaError
from vlm_serve.preprocess.limits import DEFAULT_FPS, MediaLimits, check_video
from vlm_serve.preprocess.media_image import Pixels, image_to_rgb
from vlm_serve.preprocess.video_times import FrameTimes


class Video(Protocol):
    """A video with random access to its frames."""

    fps: float
    """Average frames per second."""

    times: Sequence[float]
    """Seconds of every frame since the first one, ascending."""

    steady: bool
    """The frames are `1 / fps` apart, as precisely as `times` can say it."""

    cut_short: bool
    """The file ends before its own end, or cannot be read further."""

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
