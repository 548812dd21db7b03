"""The settings of media processors. An mmproj file has few of them: the others are those that are
published with every Qwen3-VL and Qwen3.5."""

from __future__ import annotations

from typing import Any

from vlm_serve.errors import CheckpointError
from vlm_serve.models.gguf.metadata import Metadata

_IMAGE_PIXELS = 65536, 16777216
_VIDEO_PIXELS = 4096, 25165824
_MEAN = _STD = [0.5, 0.5, 0.5]


def processors(metadata: Metadata, vision: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the contents of the processors' files by their names.

    Args:
        metadata: of the mmproj file.
        vision: its `vision_config`.
    """
    own = metadata.own("clip.vision.")
    shared = {
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "image_mean": _channels(own, "image_mean", _MEAN),
        "image_std": _channels(own, "image_std", _STD),
        "patch_size": vision["patch_size"],
        "temporal_patch_size": vision["temporal_patch_size"],
        "merge_size": vision["spatial_merge_size"],
    }
    low, high = _IMAGE_PIXELS
    images = own.size("image_min_pixels", low), own.size("image_max_pixels", high)
    return {
        "preprocessor_config.json": shared | {"size": _bounds(images)},
        "video_preprocessor_config.json": shared | {"size": _bounds(_VIDEO_PIXELS)},
    }


def _bounds(pixels: tuple[int, int]) -> dict[str, int]:
    return {"shortest_edge": pixels[0], "longest_edge": pixels[1]}


def _channels(own: Metadata, key: str, default: list[float]) -> list[float]:
    found = own.numbers(key)
    if found is None:
        return default
    numbers = [float(f"{each:.7g}") for each in found if isinstance(each, float)]
    if len(numbers) != len(default) or not all(0 <= each < 1e6 for each in numbers):
        raise CheckpointError(f"clip.vision.{key} in {own.name} must be three numbers")
    return numbers
