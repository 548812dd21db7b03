"""Which frames of a video are taken.

They are those of transformers' `Qwen3VLVideoProcessor.sample_frames`, number for number, of
`Qwen2VLVideoProcessor`, `MiniCPMV4_6VideoProcessor` or `InternVLVideoProcessor`; or, on the grid,
frames that do not depend on later ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from vlm_serve.errors import MediaError
from vlm_serve.preprocess.media.frames import Video
from vlm_serve.preprocess.media.part_options import SliceVideoOptions, VideoOptions
from vlm_serve.preprocess.media.processors import (
    FrameVideoConfig,
    PictureConfig,
    SquareVideoConfig,
    VideoConfig,
)

_FINE_SECONDS = 0.1
"""Spacing of the candidate frames in a video too long for its maximum number of frames."""


def sampled(
    video: Video, options: VideoOptions | SliceVideoOptions, config: PictureConfig
) -> tuple[Sequence[int], Sequence[float]]:
    """Return the frames to take, and the seconds of every temporal patch if prompts or positions
    tell them.

    Raises MediaError for more frames than are allowed.
    """
    sliced = isinstance(options, SliceVideoOptions)
    if options.sampling == "fps_grid":
        assert options.sample_fps is not None
        rate, most = options.sample_fps, options.max_frames
        indices: Sequence[int] = grid_indices(video.times, rate, most)
        if len(indices) > most:
            raise MediaError(
                f"the video has over {most} frames at {rate:g} a second; lower sample_fps"
            )
        times = [index / rate for index in range(len(indices))]
    else:
        indices = _uniform(len(video.times), video.fps, options, config)
        rate = len(indices) / len(video.times) * video.fps
        # Multiples of the exact rate, if the video keeps it.
        times = [index / video.fps if video.steady else video.times[index] for index in indices]
    if isinstance(config, FrameVideoConfig):
        step = config.temporal_patch_size / rate
        patches = -(-len(indices) // config.temporal_patch_size)
        return indices, [patch * step for patch in range(patches)]
    return indices, () if sliced else patch_times(times, config.temporal_patch_size)


def _uniform(
    total: int, fps: float, options: VideoOptions | SliceVideoOptions, config: PictureConfig
) -> Sequence[int]:
    sample_fps, most = options.sample_fps, options.max_frames
    if isinstance(config, SquareVideoConfig):
        wanted = -1 if options.num_frames is None else options.num_frames
        return middle_indices(total, _counted(total, fps, wanted, sample_fps, most))
    if options.num_frames is not None:
        return counted_indices(total, fps, options.num_frames, sample_fps, most)
    if isinstance(options, SliceVideoOptions):
        if sample_fps is None:
            return counted_indices(total, fps, -1, None, most)
        return second_indices(total, fps, sample_fps=sample_fps, max_frames=most)
    assert isinstance(config, VideoConfig)
    if isinstance(config, FrameVideoConfig):
        return _in_patches(total, fps, sample_fps, most, config)
    if not config.do_sample_frames:
        return range(min(total, most))
    if sample_fps is not None:
        least = config.min_frames
        return uniform_indices(total, fps, sample_fps=sample_fps, min_frames=least, max_frames=most)
    assert config.num_frames is not None
    return spread_indices(total, min(config.num_frames, most))


def _in_patches(
    total: int, fps: float, sample_fps: float | None, most: int, config: FrameVideoConfig
) -> Sequence[int]:
    together, least = config.temporal_patch_size, config.min_frames
    if sample_fps is not None:
        return patch_indices(total, max(total / fps * sample_fps, least), most, together)
    if config.num_frames is not None and config.do_sample_frames:
        wanted = round(config.num_frames / together) * together
        return patch_indices(total, wanted, most, together)
    return counted_indices(total, fps, -1, None, most)


def counted_indices(
    total: int, fps: float, wanted: int, sample_fps: float | None, max_frames: int
) -> Sequence[int]:
    """Return `wanted` evenly spaced frames, -1 for all, but no more than `sample_fps` gives.

    Raises MediaError for more frames than are allowed.
    """
    return spread_indices(total, _counted(total, fps, wanted, sample_fps, max_frames))


def _counted(total: int, fps: float, wanted: int, sample_fps: float | None, max_frames: int) -> int:
    count = total if wanted < 0 else min(wanted, total)
    if sample_fps is not None:
        count = min(count, max(1, int(total / fps * sample_fps)))
    if count > max_frames:
        raise MediaError(
            f"{count} frames of the video are over the limit of {max_frames}; set num_frames or a "
            "lower fps"
        )
    return count


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


def middle_indices(total: int, num_frames: int) -> list[int]:
    """Return the frames in the middle of equal parts of a video of `total` frames."""
    part = total / num_frames
    # As the reference rounds; its last one may be none of the video.
    found: list[int] = torch.arange(part / 2, total, part).int().clamp(max=total - 1).tolist()
    return found[:num_frames]


def patch_indices(total: int, wanted: float, max_frames: int, together: int) -> list[int]:
    """Return evenly spaced frames of a video of `total` frames that fill whole temporal patches of
    `together` frames, beginning with the first; all of a video with fewer."""
    whole = min(max_frames, total) // together * together
    if not whole:
        return list(range(total))
    count = max(int(min(wanted, whole) // together * together), together)
    # As the reference rounds; it may have one more, which is none of the video.
    indices: list[int] = torch.arange(0, total, total / count).int().tolist()
    return indices[:count]


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
