"""Videos given as a list of pictures: frames chosen by the client."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlm_serve.errors import MediaError
from vlm_serve.preprocess.limits import MediaLimits, check_video
from vlm_serve.preprocess.media_image import Pixels
from vlm_serve.preprocess.reading.conversation import MediaPart
from vlm_serve.preprocess.video_times import FrameTimes

MAX_FRAME_FILES = 4096
LISTED_FPS = 2.0
"""Frames a second of a list without a rate, as Qwen's own reader assumes."""
_LISTED = re.compile(r"data:video/(?:jpeg|jpg|png|webp)(?:;[^,;]*)*,", re.IGNORECASE)
_DOMAIN = b"vlm-serve frames 1"
_CHOICES = frozenset({"sampling", "sample_fps", "num_frames"})


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
        files = all(isinstance(each, str | bytes | Path) for each in source)
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
