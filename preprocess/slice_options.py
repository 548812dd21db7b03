"""Per-part options of media seen in slices, checked against the checkpoint's limits."""

from __future__ import annotations

from dataclasses import dataclass

from vlm_serve.preprocess.media_options import (
    Sampling,
    check_known,
    detail_of,
    frame_count,
    integer,
    invalid,
    number,
    sampling_of,
)
from vlm_serve.preprocess.reading.conversation import MediaPart
from vlm_serve.preprocess.slice_config import MERGES, SliceConfig, SliceVideoConfig

_IMAGE_OPTIONS = ("detail", "downsample_mode", "max_slice_nums")
_VIDEO_OPTIONS = (
    "downsample_mode",
    "fps",
    "max_frames",
    "max_slice_nums",
    "num_frames",
    "sample_fps",
    "sampling",
)


@dataclass(frozen=True, slots=True)
class SliceOptions:
    """How one image is sliced.

    Attributes:
        max_slices: maximum number of slices; 1: none.
        merge_size: patches per side that become one token.
    """

    max_slices: int
    merge_size: int


@dataclass(frozen=True, slots=True)
class SliceVideoOptions(SliceOptions):
    """How one video is sampled and its frames are sliced. Attributes as of `VideoOptions`."""

    fps: float | None
    sampling: Sampling
    sample_fps: float | None
    num_frames: int | None
    max_frames: int


def slice_image_options(part: MediaPart, config: SliceConfig) -> SliceOptions:
    """Read an image's options. Raises InvalidRequestError, naming the option at fault."""
    check_known(part, _IMAGE_OPTIONS)
    low = detail_of(part) == "low"
    return SliceOptions(1 if low else _max_slices(part, config), _merge_size(part, config))


def slice_video_options(part: MediaPart, config: SliceVideoConfig) -> SliceVideoOptions:
    """Read a video's options. Raises InvalidRequestError, naming the option at fault."""
    check_known(part, _VIDEO_OPTIONS)
    sampling, num_frames = sampling_of(part), frame_count(part, config.max_frames)
    sample_fps = number(part, "sample_fps")
    if sampling == "fps_grid" and num_frames is not None:
        raise invalid(part, "num_frames", "needs sampling uniform")
    if (
        sample_fps is None
        and num_frames is None
        and (sampling == "fps_grid" or config.do_sample_frames)
    ):
        sample_fps = 1.0
    return SliceVideoOptions(
        max_slices=_max_slices(part, config),
        merge_size=_merge_size(part, config),
        fps=number(part, "fps"),
        sampling=sampling,
        sample_fps=sample_fps,
        num_frames=num_frames,
        max_frames=integer(part, "max_frames", 1, config.max_frames, config.max_frames),
    )


def _max_slices(part: MediaPart, config: SliceConfig) -> int:
    return integer(part, "max_slice_nums", 1, config.max_slices, config.max_slices)


def _merge_size(part: MediaPart, config: SliceConfig) -> int:
    mode = part.options.get("downsample_mode")
    if mode is None:
        return config.downsample
    if not isinstance(mode, str) or mode not in MERGES:
        raise invalid(part, "downsample_mode", f"must be {' or '.join(MERGES)}")
    return MERGES[mode]
