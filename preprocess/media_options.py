"""Per-part options of images and videos, checked against the checkpoint's limits."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.processors import PixelConfig, VideoConfig
from vlm_serve.preprocess.reading.conversation import MediaPart

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Sampling = Literal["uniform", "fps_grid"]

_LOW_DETAIL_PIXELS = 512 * 512
_IMAGE_OPTIONS = ("detail", "max_pixels", "min_pixels")
_VIDEO_OPTIONS = (
    "fps",
    "max_frame_pixels",
    "max_frames",
    "max_pixels",
    "min_pixels",
    "num_frames",
    "sample_fps",
    "sampling",
)
_MAX_FPS = 1000.0
# The default cap of a grid frame is a video's pixel budget divided by this.
_GRID_FRAMES = 192


@dataclass(frozen=True, slots=True)
class ImageOptions:
    """Bounds on the area of one image after the resize."""

    min_pixels: int
    max_pixels: int


@dataclass(frozen=True, slots=True)
class VideoOptions:
    """Sampling of one video.

    Attributes:
        fps: frame rate of the source if the request gives it, else None.
        sampling: "uniform" spreads frames over the whole length, as the checkpoint's processor
            does. "fps_grid" takes the first frame at or after k / sample_fps seconds and sizes it
            by `max_frame_pixels` alone, so a longer recording keeps the frames of a shorter one.
        sample_fps: frames taken per second of video; None: the config's `num_frames` decides.
        num_frames: maximum number of frames, further limited by the video's length and
            `sample_fps`; -1: every frame at `sample_fps`, or all frames; None: see `sample_fps`.
        max_frames: maximum number of frames. Uniform sampling at a rate is capped there; a grid or
            an explicit number of frames beyond it is an error.
        max_frame_pixels: area of a frame on the grid; 0 for uniform sampling.
        min_pixels, max_pixels: bounds on the area of all frames together.
    """

    fps: float | None
    sampling: Sampling
    sample_fps: float | None
    num_frames: int | None
    max_frames: int
    max_frame_pixels: int
    min_pixels: int
    max_pixels: int


def options_key(options: DataclassInstance) -> bytes:
    """Encode all effective options as bytes, for the raw index."""
    return json.dumps([type(options).__name__, dataclasses.asdict(options)]).encode()


def image_options(part: MediaPart, config: PixelConfig) -> ImageOptions:
    """Read an image's options. Raises InvalidRequestError, naming the option at fault."""
    check_known(part, _IMAGE_OPTIONS)
    smallest = config.factor**2
    high = integer(part, "max_pixels", smallest, config.max_pixels, config.max_pixels)
    low = integer(part, "min_pixels", 1, high, min(config.min_pixels, high))
    if detail_of(part) == "low":
        high = max(smallest, min(high, _LOW_DETAIL_PIXELS))
        low = min(low, high)
    return ImageOptions(low, high)


def video_options(part: MediaPart, config: VideoConfig) -> VideoOptions:
    """Read a video's options. Raises InvalidRequestError, naming the option at fault."""
    check_known(part, _VIDEO_OPTIONS)
    sampling = sampling_of(part)
    on_grid = sampling == "fps_grid"
    sample_fps = number(part, "sample_fps")
    if not on_grid and "max_frame_pixels" in part.options:
        raise invalid(part, "max_frame_pixels", "needs sampling fps_grid")
    num_frames = frame_count(part, config.max_frames)
    if on_grid and num_frames is not None:
        raise invalid(part, "num_frames", "needs sampling uniform")
    if sample_fps is None and num_frames is None:
        sample_fps = config.sample_fps or (2.0 if on_grid else None)
    smallest = config.factor**2
    high = integer(part, "max_pixels", smallest, config.max_pixels, config.max_pixels)
    largest = max(smallest, config.max_video_tokens * smallest)
    default = min(max(config.max_pixels // _GRID_FRAMES, smallest), largest)
    return VideoOptions(
        fps=number(part, "fps"),
        sampling=sampling,
        sample_fps=sample_fps,
        num_frames=num_frames,
        max_frames=integer(part, "max_frames", 1, config.max_frames, config.max_frames),
        max_frame_pixels=integer(part, "max_frame_pixels", smallest, largest, default)
        if on_grid
        else 0,
        min_pixels=integer(part, "min_pixels", 1, high, min(config.min_pixels, high)),
        max_pixels=high,
    )


def check_known(part: MediaPart, known: Collection[str]) -> None:
    """Check that the model supports all options of a part. Raises InvalidRequestError."""
    for name in sorted(part.options.keys() - set(known)):
        raise invalid(part, name, f"is not an option for {part.modality}s of this model")


def detail_of(part: MediaPart) -> str:
    """Read the level of detail of an image. Raises InvalidRequestError."""
    detail = part.options.get("detail", "auto")
    if detail not in ("auto", "high", "low", "original"):
        raise invalid(part, "detail", "must be auto, low, high or original")
    return str(detail)


def sampling_of(part: MediaPart) -> Sampling:
    """Read the sampling method of a video. Raises InvalidRequestError."""
    sampling = part.options.get("sampling", "uniform")
    if sampling not in ("uniform", "fps_grid"):
        raise invalid(part, "sampling", "must be uniform or fps_grid")
    return "fps_grid" if sampling == "fps_grid" else "uniform"


def frame_count(part: MediaPart, most: int) -> int | None:
    """Read `num_frames`, from 1 to `most`, or -1 for all. Raises InvalidRequestError."""
    value = part.options.get("num_frames")
    if value is None or (type(value) is int and value == -1):
        return value
    return integer(part, "num_frames", 1, most, most)


def invalid(part: MediaPart, name: str, message: str) -> InvalidRequestError:
    """Make an error that names the option where the request sets it: in the part or for all."""
    named = part.named.get(name, part.param)
    if named == part.param:  # Options lie beside the medium, or together with its URL.
        owner, bracket, _ = named.rpartition("]")
        place = owner + bracket or named
        return InvalidRequestError(f"{place}: {name} {message}", param=f"{place}.{name}")
    return InvalidRequestError(f"{named} {message}", param=named)


def integer(part: MediaPart, name: str, low: int, high: int, default: int) -> int:
    """Read an integer option within bounds. Raises InvalidRequestError."""
    value: Any = part.options.get(name, default)
    if type(value) is not int or not low <= value <= high:
        raise invalid(part, name, f"must be a whole number from {low} to {high}")
    return value


def number(part: MediaPart, name: str) -> float | None:
    """Read a numeric option above 0. Raises InvalidRequestError."""
    value: Any = part.options.get(name)
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not 0 < value <= _MAX_FPS:
        raise invalid(part, name, f"must be a number above 0 and at most {_MAX_FPS:g}")
    return float(value)
