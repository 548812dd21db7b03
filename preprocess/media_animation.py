"""Reads animated GIF, WebP, PNG and AVIF pictures as videos, through Pillow."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Iterator, Sequence
from fractions import Fraction

import PIL.Image

from vlm_serve.errors import MediaError
from vlm_serve.preprocess.file_kinds import file_kind
from vlm_serve.preprocess.limits import MediaLimits, check_deadline, check_video
from vlm_serve.preprocess.media_image import Pixels, image_to_rgb
from vlm_serve.preprocess.video_times import FrameTimes, measure

_FORMATS = ("GIF", "WEBP", "PNG", "AVIF")
_KINDS = frozenset({"a GIF picture", "a WebP picture", "a PNG picture", "an AVIF picture"})
_SHORTEST_MS, _DEFAULT_MS = 11, 100
"""Browsers show a frame with a shorter duration for as long as the default."""
_MILLISECOND = Fraction(1, 1000)


def is_picture(data: bytes | memoryview) -> bool:
    """Return True for a possibly animated picture: GIF, WebP, PNG or AVIF."""
    return file_kind(data) in _KINDS


class AnimatedPicture:
    """An animated picture in memory; a `Video`.

    Args:
        data: the file.
        fps: replaces the file's durations.
        limits: limits on bytes, frames, pixels, length and decoding time.

    Raises MediaError for a still or damaged picture, and beyond a limit.
    """

    cut_short, sound = False, True
    num_decoded = 0

    def __init__(self, data: bytes | memoryview, fps: float | None, limits: MediaLimits) -> None:
        self._limits = limits
        self._deadline = time.monotonic() + limits.max_decode_seconds
        with _damage_told():
            self._image = PIL.Image.open(io.BytesIO(bytes(data)), formats=_FORMATS)
            size = self._image.height, self._image.width
            total = int(getattr(self._image, "n_frames", 1))
            check_video(total, None, size, limits)
            if total < 2:
                kind = self._image.format
                raise MediaError(f"a still {kind} picture; send it as an image")
            found = self._find_times(total, fps)
        self.times, self.fps, self.steady = found.seconds, found.fps, found.steady
        check_video(total, self.times[-1] + 1 / self.fps, size, limits)

    def _find_times(self, total: int, fps: float | None) -> FrameTimes:
        if fps is not None:
            return FrameTimes.even(total, fps)
        shown, at = [], 0
        for index in range(total):
            self._seek(index)
            shown.append(at)
            duration = round(float(self._image.info.get("duration") or 0))
            at += duration if duration >= _SHORTEST_MS else _DEFAULT_MS
        return measure(shown, total, _MILLISECOND, 0.0)

    def _seek(self, index: int) -> None:
        check_deadline(self._deadline, self._limits)
        self._image.seek(index)
        self._image.load()

    def frames(self, indices: Sequence[int]) -> Iterator[Pixels]:
        """See `Video.frames`. Raises MediaError if the file proves to be damaged."""
        self._deadline = time.monotonic() + self._limits.max_decode_seconds
        for index in indices:
            with _damage_told():
                self._seek(index)
                pixels = image_to_rgb(self._image, self._limits)
            self.num_decoded = index + 1  # a picture is made from those before it
            yield pixels


@contextlib.contextmanager
def _damage_told() -> Iterator[None]:
    """Turn the block's other errors into MediaError: Pillow's plugins raise any kind on broken
    data."""
    try:
        yield
    except MediaError:
        raise
    except Exception:
        raise MediaError("the animated picture is damaged") from None
