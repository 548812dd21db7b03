"""Settings of MiniCPM-V's processors, which cut large pictures into slices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlm_serve.errors import CheckpointError
from vlm_serve.preprocess.processors import (
    PictureConfig,
    image_fields,
    shared_fields,
    size_field,
    video_fields,
)
from vlm_serve.preprocess.tokenizer import read_json

MERGES = {"16x": 4, "4x": 2}
"""Patches per side that become one token, by `downsample_mode`."""
_HALF = (0.5, 0.5, 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceConfig(PictureConfig):
    """Settings for pictures seen whole and small, then in slices. Patches come row by row.

    Attributes:
        max_slices: maximum number of slices of a picture; 1: none.
        side: pictures and slices are resized to about the area of a square of this side, in pixels.
        downsample: patches per side that become one token, unless the request overrides it.
        numbered: put a number before each picture.
    """

    max_slices: int
    side: int
    downsample: int
    numbered: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceVideoConfig(SliceConfig):
    """Settings for videos, whose frames are treated like pictures.

    Attributes:
        max_frames: maximum number of frames of a video.
        do_sample_frames: False takes every frame.
    """

    max_frames: int
    do_sample_frames: bool


def slice_image_config(directory: Path | str) -> SliceConfig | None:
    """Return the config of the image processor, None if the checkpoint has none.

    Raises CheckpointError for settings that are not supported.
    """
    raw = image_fields(directory)
    return SliceConfig(**_slice_fields(raw, directory)) if raw else None


def slice_video_config(directory: Path | str) -> SliceVideoConfig | None:
    """Return the config of the video processor, None if the checkpoint has none.

    Raises CheckpointError for settings that are not supported.
    """
    raw = video_fields(directory)
    if not raw:
        return None
    if raw.get("stack_frames", 1) != 1:
        raise _unsupported("stack_frames", raw["stack_frames"], 1)
    return SliceVideoConfig(
        **_slice_fields(raw, directory),
        max_frames=size_field(raw, "max_num_frames", 128),
        do_sample_frames=bool(raw.get("do_sample_frames", True)),
    )


def _slice_fields(raw: Mapping[str, Any], directory: Path | str) -> dict[str, Any]:
    shared = shared_fields(raw, patch_size=14, mean=_HALF, std=_HALF)
    if not shared["do_resize"]:
        raise _unsupported("do_resize", False, True)
    mode = raw.get("downsample_mode", "16x")
    if mode not in MERGES:
        raise _unsupported("downsample_mode", mode, *MERGES)
    sliced = bool(raw.get("slice_mode", True))
    return shared | {
        # Each frame is its own temporal patch, and the tower reorders patches itself.
        "temporal_patch_size": 1,
        "merge_size": 1,
        "max_slices": size_field(raw, "max_slice_nums", 9) if sliced else 1,
        "side": size_field(raw, "scale_resolution", 448),
        "downsample": MERGES[mode],
        "numbered": _numbered(Path(directory)),
    }


def _numbered(directory: Path) -> bool:
    """Read `use_image_id` of the processor, or else of its image processor; true by default."""
    outer = read_json(directory / "processor_config.json").get("use_image_id")
    inner = image_fields(directory).get("use_image_id", True)
    return bool(inner if outer is None else outer)


def check_modes(config: Mapping[str, Any], *processors: SliceConfig | None) -> None:
    """Check that the processors count as many tokens as the model makes. Raises CheckpointError.

    Args:
        config: config.json.
    """
    mode = config.get("downsample_mode", "16x")
    for each in processors:
        if each is not None and each.downsample != MERGES.get(mode):
            theirs = next(name for name, merge in MERGES.items() if merge == each.downsample)
            raise CheckpointError(
                f"downsample_mode of the processor config is {theirs!r}, but in config.json it is "
                f"{mode!r}"
            )


def _unsupported(name: str, value: Any, *known: Any) -> CheckpointError:
    return CheckpointError(
        f"{name} {value!r} of the processor config is not supported, only "
        + " and ".join(map(repr, known))
    )
