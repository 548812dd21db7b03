"""Sizes of pictures seen in slices, and the frames sampled from a video.

Both follow transformers' `MiniCPMV4_6ImageProcessor` and `MiniCPMV4_6VideoProcessor`, number for
number.
"""

from __future__ import annotations

import math

import numpy as np

_FINE_SECONDS = 0.1
"""Spacing of the candidate frames in a video too long for its maximum number of frames."""


def slice_grid(height: int, width: int, *, max_slices: int, side: int) -> tuple[int, int] | None:
    """Return (rows, columns) of slices, None for a picture that is seen whole.

    There are about as many slices as squares of that side fit into the picture's area, in the
    layout closest to its shape.
    """
    multiple = min(math.ceil(height * width / side**2), max_slices)
    if multiple <= 1:
        return None
    shape, best, least = math.log(width / height), (1, 1), math.inf
    for count in (multiple - 1, multiple, multiple + 1):
        if count == 1 or count > max_slices:
            continue
        for rows in range(1, count + 1):
            if count % rows:
                continue
            error = abs(shape - math.log(count // rows / rows))
            if error < least or (error == least and rows > best[0]):
                best, least = (rows, count // rows), error
    return best


def whole_size(
    height: float, width: float, *, side: int, factor: int, enlarge: bool
) -> tuple[int, int]:
    """Return (height, width) of a resized picture, as multiples of `factor`.

    A picture larger than a square of that side is reduced to about its area. A smaller one is
    enlarged to it if `enlarge` is set.
    """
    if enlarge or height * width > side * side:
        ratio = width / height
        height = int(side / math.sqrt(ratio))
        width = int(height * ratio)
    return _round(height, factor), _round(width, factor)


def slice_size(
    height: int, width: int, grid: tuple[int, int], *, side: int, factor: int
) -> tuple[int, int]:
    """Return (height, width) of each slice of a picture."""
    rows, columns = grid
    return whole_size(
        _round(height, rows) / rows,
        _round(width, columns) / columns,
        side=side,
        factor=factor,
        enlarge=True,
    )


def _round(length: float, divisor: int) -> int:
    return max(round(length / divisor) * divisor, divisor)


def second_indices(total: int, fps: float, *, sample_fps: float, max_frames: int) -> list[int]:
    """Return a frame for every `1 / sample_fps` seconds of a video of `total` frames.

    If those are more than `max_frames`, spread `max_frames` over the whole length.
    """
    duration = total / fps
    if duration * sample_fps <= max_frames:
        count = math.ceil(duration * sample_fps)
        return [min(int(index * fps / sample_fps), total - 1) for index in range(count)]
    times = [round(index * _FINE_SECONDS, 1) for index in range(int(duration / _FINE_SECONDS))]
    indices = [min(int(seconds * fps), total - 1) for seconds in times]
    if len(indices) > max_frames:
        chosen = np.linspace(0, len(indices) - 1, max_frames, dtype=int)
        indices = [indices[place] for place in chosen]
    return indices
