"""Sizes of resized pictures, and the frames sampled from a video.

Both follow transformers' `Qwen2VLImageProcessor.resize` / `smart_resize` and
`Qwen3VLVideoProcessor.resize` / `sample_frames`, number for number; with slices,
`MiniCPMV4_6ImageProcessor` and `MiniCPMV4_6VideoProcessor`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from vlm_serve.errors import MediaError

MAX_ASPECT_RATIO = 200
_FINE_SECONDS = 0.1
"""Spacing of the candidate frames in a video too long for its maximum number of frames."""


def check_ratio(height: float, width: float) -> None:
    """Check the aspect ratio. Raises MediaError if one side is over 200 times the other."""
    ratio = max(height, width) / min(height, width)
    if ratio > MAX_ASPECT_RATIO:
        raise MediaError(f"the aspect ratio must be at most {MAX_ASPECT_RATIO}, it is {ratio:.1f}")


def image_size(
    height: int, width: int, *, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Return (height, width) after the resize: multiples of `factor`, the area within bounds.

    Raises MediaError if one side is over 200 times the other.
    """
    check_ratio(height, width)
    return _fit(height, width, 1, 1, factor, min_pixels, max_pixels)


def video_size(
    height: int,
    width: int,
    *,
    num_frames: int,
    factor: int,
    temporal_factor: int,
    min_pixels: int,
    max_pixels: int,
) -> tuple[int, int]:
    """Return (height, width) of every frame; the bounds are on the area of all frames together.

    Raises MediaError if one side is over 200 times the other.
    """
    # transformers refuses a single frame. Here it is repeated to fill its temporal patch.
    num_frames = max(num_frames, temporal_factor)
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    check_ratio(height, width)
    rounded = round(num_frames / temporal_factor) * temporal_factor
    return _fit(height, width, num_frames, rounded, factor, min_pixels, max_pixels)


def _fit(
    height: int,
    width: int,
    num_frames: int,
    rounded_frames: int,
    factor: int,
    min_pixels: int,
    max_pixels: int,
) -> tuple[int, int]:
    new_height = round(height / factor) * factor
    new_width = round(width / factor) * factor
    area = rounded_frames * new_height * new_width
    if area > max_pixels:
        shrink = math.sqrt((num_frames * height * width) / max_pixels)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif area < min_pixels:
        grow = math.sqrt(min_pixels / (num_frames * height * width))
        new_height = math.ceil(height * grow / factor) * factor
        new_width = math.ceil(width * grow / factor) * factor
    return new_height, new_width


def capped_budget(
    num_frames: int, *, min_pixels: int, max_pixels: int, max_frame_pixels: int
) -> int:
    """Return the area of all frames together, with each frame's share capped.

    This is `cap_pixels_per_frame` of the config.
    """
    share = min(max_frame_pixels, max_pixels // num_frames)
    return max(share, int(min_pixels * 1.05)) * num_frames


def uniform_indices(
    total: int, fps: float, *, sample_fps: float, min_frames: int, max_frames: int
) -> list[int]:
    """Return frames spread evenly over a video of `total` frames at `fps` frames per second."""
    wanted = int(total / fps * sample_fps)
    return spread_indices(total, min(max(wanted, min_frames), max_frames, total))


def spread_indices(total: int, num_frames: int) -> list[int]:
    """Return `num_frames` frame numbers from the first to the last, evenly spaced."""
    indices: list[int] = np.linspace(0, total - 1, num_frames).round().astype(int).tolist()
    return indices


def grid_indices(times: Sequence[float], sample_fps: float, max_frames: int) -> list[int]:
    """Return the first frame at or after k / sample_fps seconds, for every k with one.

    The choice of a frame does not depend on later frames, so a longer recording keeps the frames of
    a shorter one. At most `max_frames + 1` are returned: the extra one reveals an excess.

    Args:
        times: seconds from the first frame, ascending.
    """
    indices: list[int] = []
    frame = 0
    while len(indices) <= max_frames:
        # Rounding errors may put a computed time just before its grid point.
        wanted = len(indices) / sample_fps - 1e-6
        while frame < len(times) and times[frame] < wanted:
            frame += 1
        if frame == len(times):
            break
        indices.append(frame)
    return indices


def patch_times(times: Sequence[float], temporal_patch_size: int) -> list[float]:
    """Return the seconds of every temporal patch: the mean of its first and last frames' times.

    The last frame is repeated to fill the last patch.
    """
    padded = [*times, *[times[-1]] * (-len(times) % temporal_patch_size)]
    last = temporal_patch_size - 1
    return [
        (padded[at] + padded[at + last]) / 2 for at in range(0, len(padded), temporal_patch_size)
    ]


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
