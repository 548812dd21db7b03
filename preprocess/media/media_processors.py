"""Combines the settings, options and arithmetic of a checkpoint's media processors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vlm_serve.errors import CheckpointError
from vlm_serve.preprocess.media.part_options import (
    image_options,
    slice_image_options,
    slice_video_options,
    square_video_options,
    tile_image_options,
    video_options,
)
from vlm_serve.preprocess.media.processing import Processed, process_image, process_video
from vlm_serve.preprocess.media.processors import (
    PictureConfig,
    check_fit,
    check_modes,
    fingerprint,
    frame_video_config,
    image_config,
    slice_image_config,
    slice_video_config,
    square_side,
    square_tile_config,
    square_video_config,
    tile_image_config,
    video_config,
)
from vlm_serve.preprocess.reading.conversation import MediaPart
from vlm_serve.preprocess.text.family import Family, answering_part, family_of
from vlm_serve.preprocess.text.tokenizer import read_json


@dataclass(frozen=True, slots=True)
class Processor:
    """A processor of images or of videos.

    Both of its functions take its config and raise InvalidRequestError.

    Attributes:
        config: its settings.
        read_options: returns the effective options of a part.
        run: turns a decoded medium and its options into a record and pixels.
    """

    config: PictureConfig
    read_options: Callable[[MediaPart, Any], Any]
    run: Callable[[Any, Any, Any], Processed]

    def options(self, part: MediaPart) -> Any:
        """See `read_options`."""
        return self.read_options(part, self.config)

    def process(self, decoded: Any, options: Any) -> Processed:
        """See `run`."""
        return self.run(decoded, options, self.config)


def find_processors(
    directory: Path | str, config: Mapping[str, Any], family: Family
) -> tuple[Processor | None, Processor | None]:
    """Return the processors of images and of videos, None for one the checkpoint does not have.

    Args:
        config: config.json.
        family: the model's.

    Raises CheckpointError for settings that are not supported or do not fit the model.
    """
    images: PictureConfig | None
    videos: PictureConfig | None
    read_image: Callable[[MediaPart, Any], Any]
    read_video: Callable[[MediaPart, Any], Any]
    if family.tile == "":
        patch_size = square_side("patch_size", config["vision_config"].get("patch_size", 14))
        images = square_tile_config(directory, patch_size)
        videos = square_video_config(directory, patch_size)
        read_image, read_video = tile_image_options, square_video_options
    elif family.tile is not None:
        images, videos = tile_image_config(directory), None
        read_image, read_video = tile_image_options, slice_video_options
        factor = config.get("downsample_factor", 2)
        if images is not None and images.downsample != factor:
            raise CheckpointError(
                f"downsample_factor of the processor config is {images.downsample}, but in "
                f"config.json it is {factor!r}"
            )
    elif family.slice_start is None:
        read = (
            video_config
            if family.timestamp
            else partial(frame_video_config, pixels=family.frame_pixels)
        )
        images, videos = image_config(directory), read(directory)
        read_image, read_video = image_options, video_options
    else:
        mode = family.downsample
        images, videos = slice_image_config(directory, mode), slice_video_config(directory, mode)
        check_modes(config.get("downsample_mode", mode), images, videos)
        read_image, read_video = slice_image_options, slice_video_options
    if family.tile != "":  # Otherwise the sizes are those of config.json.
        check_fit(config["vision_config"], images, videos)
    return (
        Processor(images, read_image, process_image) if images else None,
        Processor(videos, read_video, process_video) if videos else None,
    )


def processor_fingerprint(directory: Path | str, config: Mapping[str, Any] | None = None) -> bytes:
    """Return 32 bytes that name the checkpoint's media processors and their settings; `config`:
    see `Preprocessor`."""
    if config is None:
        config = answering_part(read_json(Path(directory) / "config.json"))
    if not config.get("vision_config"):
        return fingerprint(None, None)
    family = family_of(str(config.get("model_type", "")))
    processors = find_processors(directory, config, family)
    return fingerprint(*(processor.config if processor else None for processor in processors))
