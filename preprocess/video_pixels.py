"""Turns decoded video frames into upright RGB with square pixels."""

from __future__ import annotations

import struct
from fractions import Fraction
from typing import Any

import numpy as np
import PIL.Image
from av.sidedata.sidedata import SideDataContainer, Type
from av.video.reformatter import VideoReformatter

from vlm_serve.errors import MediaError
from vlm_serve.preprocess.limits import MediaLimits
from vlm_serve.preprocess.media_image import Pixels

MAX_PIXEL_ASPECT = 8
"""Larger ratios of a pixel's sides come from a broken header."""
_MATRIX = struct.Struct("=9i")
_WHITE = 255.0


def upright(
    frame: Any,
    aspect: Fraction | None,
    limits: MediaLimits,
    *,
    converter: VideoReformatter,
) -> Pixels:
    """Return a frame as players show it.

    Non-square pixels are stretched horizontally, transparency is composed over white, and the
    container's display matrix turns and mirrors.

    Args:
        frame: `av.VideoFrame`.
        aspect: width over height of a pixel; None: square.
        converter: one for all frames of a video. A frame's own would start threads for each frame,
            and these live as long as the video.

    Returns:
        uint8 `[height, width, 3]`, C-contiguous.

    Raises MediaError for frames over the pixel limit.
    """
    width = shown_width(frame, aspect)
    if max(width, frame.width) * frame.height > limits.max_video_pixels:
        raise MediaError(f"the video is over {limits.max_video_pixels} pixels")
    alpha = _has_alpha(frame)
    pixels: Any = converter.reformat(frame, format="rgba" if alpha else "rgb24").to_ndarray()
    if alpha:
        pixels = _over_white(pixels)
    return np.ascontiguousarray(_turned(stretched(pixels, width), _matrix(frame)))


def shown_width(frame: Any, aspect: Fraction | None) -> int:
    """Return the width of a frame with square pixels, in pixels."""
    if not aspect or not Fraction(1, MAX_PIXEL_ASPECT) <= aspect <= MAX_PIXEL_ASPECT:
        return int(frame.width)
    return max(1, int(frame.width * aspect))


def stretched(pixels: Pixels, width: int) -> Pixels:
    """Return a picture of another width, in pixels; by Pillow, with the same bits anywhere."""
    if width == pixels.shape[1]:
        return pixels
    picture = PIL.Image.fromarray(pixels)
    resized = picture.resize((width, picture.height), PIL.Image.Resampling.BICUBIC)
    return np.asarray(resized)


def _has_alpha(frame: Any) -> bool:
    return any(component.is_alpha for component in frame.format.components)


def _over_white(rgba: Pixels) -> Pixels:
    pixels = rgba.astype(np.float32)
    share = pixels[:, :, 3:] / _WHITE
    composed: Pixels = np.rint(pixels[:, :, :3] * share + _WHITE * (1 - share)).astype(np.uint8)
    return composed


def _matrix(frame: Any) -> tuple[int, int, int, int] | None:
    """Return (a, b, c, d) of a frame's display matrix, None if it has none.

    A pixel at (x, y) is shown at (a x + c y, b x + d y), with y pointing down.
    """
    # A frame and its `side_data` refer to each other, so shown frames would pile up.
    container: Any = SideDataContainer
    data = container(frame).get(Type.DISPLAYMATRIX)
    if data is None:
        return None
    raw = bytes(data)
    if len(raw) != _MATRIX.size:
        return None
    a, b, _, c, d, *_ = _MATRIX.unpack(raw)
    return a, b, c, d


def _turned(pixels: Pixels, matrix: tuple[int, int, int, int] | None) -> Pixels:
    """Apply the nearest of the eight turns and mirrorings."""
    if matrix is None:
        return pixels
    a, b, c, d = matrix
    if abs(b) + abs(c) > abs(a) + abs(d):
        # What was a column becomes a row.
        pixels, a, d = pixels.swapaxes(0, 1), c, b
    if a < 0:
        pixels = pixels[:, ::-1]
    if d < 0:
        pixels = pixels[::-1]
    return pixels
