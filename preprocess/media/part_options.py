"""Options of images and videos, seen whole or in slices, checked against the checkpoint's limits.

Every part has its own. Two fields of vLLM's are for all media of a request: `media_io_kwargs`
controls how files are read, by modality; `mm_processor_kwargs` controls the checkpoint's processor.
Both map to the per-part options, and a part's own options take precedence. An option that cannot be
honoured is refused by name.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.media.processors import (
    MERGES,
    PixelConfig,
    SliceConfig,
    SliceVideoConfig,
    SquareVideoConfig,
    VideoConfig,
)
from vlm_serve.preprocess.reading.conversation import MediaPart, Modality

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Sampling = Literal["uniform", "fps_grid"]

_LOW_DETAIL_PIXELS = 512 * 512
_SAMPLING = ("fps", "max_frames", "num_frames", "sample_fps", "sampling")
_IMAGE_OPTIONS = ("detail", "max_pixels", "min_pixels")
_VIDEO_OPTIONS = (*_SAMPLING, "max_frame_pixels", "max_pixels", "min_pixels")
_SLICED_IMAGE_OPTIONS = ("detail", "downsample_mode", "max_slice_nums")
_SLICED_VIDEO_OPTIONS = (*_SAMPLING, "downsample_mode", "max_slice_nums")
_MAX_FPS = 1000.0
# The default cap of a grid frame is a video's pixel budget divided by this.
_GRID_FRAMES = 192


_MODALITIES: tuple[Modality, ...] = ("image", "video")
_IO, _PROCESSOR = "media_io_kwargs", "mm_processor_kwargs"
# Nested processor arguments that apply to one modality.
_NESTED: dict[str, Modality] = {"images_kwargs": "image", "videos_kwargs": "video"}
_EDGES = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}
# The only values accepted: others would give pixels unlike those the model was trained on.
_FIXED_IMAGE_IO = {"image_mode": "RGB", "rgba_background_color": [255, 255, 255]}


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


def options_key(options: DataclassInstance) -> bytes:
    """Encode all effective options as bytes, for the raw index."""
    return json.dumps([type(options).__name__, dataclasses.asdict(options)]).encode()


def image_options(part: MediaPart, config: PixelConfig) -> ImageOptions:
    """Read an image's options. Raises InvalidRequestError, naming the option at fault."""
    _check_known(part, _IMAGE_OPTIONS)
    smallest = config.factor**2
    high = _integer(part, "max_pixels", smallest, config.max_pixels, config.max_pixels)
    low = _integer(part, "min_pixels", 1, high, min(config.min_pixels, high))
    if _detail_of(part) == "low":
        high = max(smallest, min(high, _LOW_DETAIL_PIXELS))
        low = min(low, high)
    return ImageOptions(low, high)


def video_options(part: MediaPart, config: VideoConfig) -> VideoOptions:
    """Read a video's options. Raises InvalidRequestError, naming the option at fault."""
    _check_known(part, _VIDEO_OPTIONS)
    sampled = _sampled(part, config.max_frames, config.sample_fps or None, config.sample_fps or 2.0)
    on_grid = sampled["sampling"] == "fps_grid"
    if not on_grid and "max_frame_pixels" in part.options:
        raise _invalid(part, "max_frame_pixels", "needs sampling fps_grid")
    smallest = config.factor**2
    high = _integer(part, "max_pixels", smallest, config.max_pixels, config.max_pixels)
    largest = max(smallest, config.max_video_tokens * smallest)
    default = min(max(config.max_pixels // _GRID_FRAMES, smallest), largest)
    frame = _integer(part, "max_frame_pixels", smallest, largest, default) if on_grid else 0
    return VideoOptions(
        **sampled,
        max_frame_pixels=frame,
        min_pixels=_integer(part, "min_pixels", 1, high, min(config.min_pixels, high)),
        max_pixels=high,
    )


def slice_image_options(part: MediaPart, config: SliceConfig) -> SliceOptions:
    """Read an image's options. Raises InvalidRequestError, naming the option at fault."""
    _check_known(part, _SLICED_IMAGE_OPTIONS)
    low = _detail_of(part) == "low"
    return SliceOptions(1 if low else _max_slices(part, config), _merge_size(part, config))


def tile_image_options(part: MediaPart, config: SliceConfig) -> SliceOptions:
    """Read an image's options. Raises InvalidRequestError, naming the option at fault."""
    _check_known(part, ("detail", "max_slice_nums"))
    low = _detail_of(part) == "low"
    return SliceOptions(1 if low else _max_slices(part, config), config.downsample)


def slice_video_options(part: MediaPart, config: SliceVideoConfig) -> SliceVideoOptions:
    """Read a video's options. Raises InvalidRequestError, naming the option at fault."""
    _check_known(part, _SLICED_VIDEO_OPTIONS)
    sampled = _sampled(part, config.max_frames, 1.0 if config.do_sample_frames else None, 1.0)
    return SliceVideoOptions(
        max_slices=_max_slices(part, config), merge_size=_merge_size(part, config), **sampled
    )


def square_video_options(part: MediaPart, config: SquareVideoConfig) -> SliceVideoOptions:
    """Read a video's options. Raises InvalidRequestError, naming the option at fault."""
    _check_known(part, _SAMPLING)
    sampled = _sampled(part, config.max_frames, config.sample_fps, config.sample_fps or 1.0)
    if sampled["sample_fps"] is None and sampled["num_frames"] is None:
        sampled["num_frames"] = config.num_frames
    return SliceVideoOptions(max_slices=1, merge_size=config.downsample, **sampled)


def _max_slices(part: MediaPart, config: SliceConfig) -> int:
    return _integer(part, "max_slice_nums", 1, config.max_slices, config.max_slices)


def _merge_size(part: MediaPart, config: SliceConfig) -> int:
    mode = part.options.get("downsample_mode")
    if mode is None:
        return config.downsample
    if not isinstance(mode, str) or mode not in MERGES:
        raise _invalid(part, "downsample_mode", f"must be {' or '.join(MERGES)}")
    return MERGES[mode]


def _sampled(
    part: MediaPart, max_frames: int, uniform_fps: float | None, grid_fps: float
) -> dict[str, Any]:
    """Read a video's options about sampling, by the fields of `VideoOptions`.

    Args:
        max_frames: most frames that the checkpoint allows.
        uniform_fps, grid_fps: `sample_fps` if the request says nothing about the number of frames.

    Raises InvalidRequestError.
    """
    sampling = part.options.get("sampling", "uniform")
    if sampling not in ("uniform", "fps_grid"):
        raise _invalid(part, "sampling", "must be uniform or fps_grid")
    on_grid = sampling == "fps_grid"
    sample_fps, num_frames = _number(part, "sample_fps"), part.options.get("num_frames")
    if num_frames is not None and (type(num_frames) is not int or num_frames != -1):
        num_frames = _integer(part, "num_frames", 1, max_frames, max_frames)
    if on_grid and num_frames is not None:
        raise _invalid(part, "num_frames", "needs sampling uniform")
    if sample_fps is None and num_frames is None:
        sample_fps = grid_fps if on_grid else uniform_fps
    return {
        "fps": _number(part, "fps"),
        "sampling": sampling,
        "sample_fps": sample_fps,
        "num_frames": num_frames,
        "max_frames": _integer(part, "max_frames", 1, max_frames, max_frames),
    }


def _check_known(part: MediaPart, known: Collection[str]) -> None:
    """Check that the model supports all options of a part. Raises InvalidRequestError."""
    for name in sorted(part.options.keys() - set(known)):
        raise _invalid(part, name, f"is not an option for {part.modality}s of this model")


def _detail_of(part: MediaPart) -> str:
    """Read the level of detail of an image. Raises InvalidRequestError."""
    detail = part.options.get("detail", "auto")
    if detail not in ("auto", "high", "low", "original"):
        raise _invalid(part, "detail", "must be auto, low, high or original")
    return str(detail)


def _invalid(part: MediaPart, name: str, message: str) -> InvalidRequestError:
    """Make an error that names the option where the request sets it: in the part or for all."""
    named = part.named.get(name, part.param)
    if named == part.param:  # Options lie beside the medium, or together with its URL.
        owner, bracket, _ = named.rpartition("]")
        place = owner + bracket or named
        return InvalidRequestError(f"{place}: {name} {message}", param=f"{place}.{name}")
    return InvalidRequestError(f"{named} {message}", param=named)


def _integer(part: MediaPart, name: str, low: int, high: int, default: int) -> int:
    """Read an integer option within bounds. Raises InvalidRequestError."""
    value: Any = part.options.get(name, default)
    if type(value) is not int or not low <= value <= high:
        raise _invalid(part, name, f"must be a whole number from {low} to {high}")
    return value


def _number(part: MediaPart, name: str) -> float | None:
    """Read a numeric option above 0. Raises InvalidRequestError."""
    value: Any = part.options.get(name)
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not 0 < value <= _MAX_FPS:
        raise _invalid(part, name, f"must be a number above 0 and at most {_MAX_FPS:g}")
    return float(value)


ONE_OF_EACH = tuple(MediaPart(modality, None, {}, modality) for modality in _MODALITIES)
"""Dummy parts: they check a request's options even if it has no such media."""


class MediaDefaults:
    """A request's options for all its media.

    Args:
        media_io_kwargs: `{"video": {"num_frames": n, "fps": f}, "image": {...}}`; n = -1 takes
            every frame, or every one sampled at f.
        mm_processor_kwargs: `fps`, `num_frames`, `max_frames`, `do_sample_frames` of videos;
            `min_pixels`, `max_pixels`, `size`, `max_slice_nums`, `downsample_mode` of images and
            videos alike; any of them also below `images_kwargs` or `videos_kwargs`, for one of the
            two. The model determines which of them it accepts.

    Raises InvalidRequestError for any other option, by name.
    """

    def __init__(self, media_io_kwargs: Any, mm_processor_kwargs: Any) -> None:
        self._options: dict[Modality, dict[str, Any]] = {"image": {}, "video": {}}
        self._named: dict[Modality, dict[str, str]] = {"image": {}, "video": {}}
        self._read_io(_object(media_io_kwargs, _IO))
        self._read_processor(_object(mm_processor_kwargs, _PROCESSOR), _PROCESSOR, _MODALITIES)

    def apply(self, parts: Iterable[MediaPart]) -> list[MediaPart]:
        """Return the parts with these options filled in; a part's own options take precedence."""
        return [
            replace(
                part.joined(),
                options={**self._options[part.modality], **part.options},
                named={**self._named[part.modality], **dict.fromkeys(part.options, part.param)},
            )
            for part in parts
        ]

    def _read_io(self, given: Mapping[str, Any]) -> None:
        for modality, kwargs in given.items():
            where = f"{_IO}.{modality}"
            if modality not in _MODALITIES:
                raise _refused(where)
            for name, value in _object(kwargs, where).items():
                place = f"{where}.{name}"
                if value is None:
                    continue
                if modality == "video" and name in ("num_frames", "fps"):
                    option = "sample_fps" if name == "fps" else name
                    if name == "fps" and value == -1:  # as in vLLM: no rate is requested
                        continue
                    self._set("video", option, value, place)
                elif modality == "video" or _FIXED_IMAGE_IO.get(name, ...) != _plain(value):
                    raise _refused(place)

    def _read_processor(
        self, given: Mapping[str, Any], where: str, modalities: tuple[Modality, ...]
    ) -> None:
        for name, value in given.items():
            place = f"{where}.{name}"
            if value is None:
                continue
            if name in _NESTED and where == _PROCESSOR:
                self._read_processor(_object(value, place), place, (_NESTED[name],))
            elif name in ("min_pixels", "max_pixels", "max_slice_nums", "downsample_mode"):
                for modality in modalities:
                    self._set(modality, name, value, place)
            elif name == "size":
                self._read_size(_object(value, place), place, modalities)
            elif "video" in modalities:
                self._read_sampling(name, value, place)
            else:
                raise _refused(place)

    def _read_size(
        self, size: Mapping[str, Any], where: str, modalities: tuple[Modality, ...]
    ) -> None:
        for name, value in size.items():
            place = f"{where}.{name}"
            if name not in _EDGES:
                raise _refused(place)
            for modality in modalities:
                self._set(modality, _EDGES[name], value, place)

    def _read_sampling(self, name: str, value: Any, place: str) -> None:
        if name == "do_sample_frames":
            # False takes the frames sampled by media_io_kwargs; without it, none are defined.
            sampled = any(named.startswith(_IO) for named in self._named["video"].values())
            if value is not True and (value is not False or not sampled):
                raise InvalidRequestError(
                    f"{place} cannot be false without {_IO}.video.num_frames or fps", param=place
                )
        elif name in ("fps", "num_frames", "max_frames"):
            self._set("video", "sample_fps" if name == "fps" else name, value, place)
        else:
            raise _refused(place)

    def _set(self, modality: Modality, name: str, value: Any, place: str) -> None:
        if name in self._options[modality]:
            before = self._named[modality][name]
            raise InvalidRequestError(f"{place} sets the same option as {before}", param=place)
        self._options[modality][name] = value
        self._named[modality][name] = place


def _object(value: Any, where: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise InvalidRequestError(f"{where} must be an object", param=where)
    return value


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _refused(where: str) -> InvalidRequestError:
    shown = where if len(where) <= 80 else where[:77] + "..."
    return InvalidRequestError(f"{shown} cannot be set per request", param=shown)
