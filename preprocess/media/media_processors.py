"""Combines the settings, options and arithmetic of a checkpoint's media processors.

Pictures are seen whole (`processing`), or whole and in slices. The spans of an image in slices, and
of every frame of such a video, are the reduced whole picture, then its slices row by row. All
frames of a video are cut alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch

from vlm_serve.preprocess.media.frames import Video
from vlm_serve.preprocess.media.images import Pixels
from vlm_serve.preprocess.media.part_options import (
    SliceOptions,
    SliceVideoOptions,
    image_options,
    slice_image_options,
    slice_video_options,
    video_options,
)
from vlm_serve.preprocess.media.processing import (
    MediaRecord,
    Processed,
    Slices,
    channels_first,
    check_ratio,
    content_hash,
    counted_indices,
    grid_frames,
    process_image,
    process_video,
    sample,
    second_indices,
    slice_grid,
    slice_size,
    stacked,
    whole_size,
)
from vlm_serve.preprocess.media.processors import (
    PictureConfig,
    SliceConfig,
    SliceVideoConfig,
    check_fit,
    check_modes,
    fingerprint,
    image_config,
    resize,
    slice_image_config,
    slice_video_config,
    video_config,
)
from vlm_serve.preprocess.reading.conversation import MediaPart, Modality
from vlm_serve.preprocess.text.family import Family, family_of
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


def missing_files(
    images: Processor | None, videos: Processor | None
) -> dict[Literal["image", "video"], str]:
    """Return the kinds of media without a processor, each with the file that it lacks."""
    missing: dict[Literal["image", "video"], str] = {}
    if images is None:
        missing["image"] = "preprocessor_config.json"
    if videos is None:
        missing["video"] = "video_preprocessor_config.json"
    return missing


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
    if family.slice_start is None:
        images, videos = image_config(directory), video_config(directory)
        image_processor = Processor(images, image_options, process_image) if images else None
        video_processor = Processor(videos, video_options, process_video) if videos else None
    else:
        images, videos = slice_image_config(directory), slice_video_config(directory)
        check_modes(config, images, videos)
        image_processor = (
            Processor(images, slice_image_options, process_sliced_image) if images else None
        )
        video_processor = (
            Processor(videos, slice_video_options, process_sliced_video) if videos else None
        )
    check_fit(config["vision_config"], images, videos)
    return image_processor, video_processor


def processor_fingerprint(directory: Path | str, config: Mapping[str, Any] | None = None) -> bytes:
    """Return 32 bytes that name the checkpoint's media processors and their settings; `config`:
    see `Preprocessor`."""
    if config is None:
        config = read_json(Path(directory) / "config.json")
    if not config.get("vision_config"):
        return fingerprint(None, None)
    family = family_of(str(config.get("model_type", "")))
    processors = find_processors(directory, config, family)
    return fingerprint(*(processor.config if processor else None for processor in processors))


def process_sliced_image(pixels: Pixels, options: SliceOptions, config: SliceConfig) -> Processed:
    """Process one image.

    Args:
        pixels: uint8 `[height, width, 3]`.

    Raises MediaError if one side is over 200 times the other.
    """
    height, width, _ = pixels.shape
    layout = _lay_out("image", height, width, options, config)
    pictures = layout.pictures(pixels)
    return _processed(layout, layout.hashes(pictures), [pictures])


def process_sliced_video(
    video: Video, options: SliceVideoOptions, config: SliceVideoConfig
) -> Processed:
    """Process one video; frames are resized as they are decoded, so few are held at full size.

    Of a `KnownVideo`, only frames are decoded that are not known, see `sample`.

    Raises MediaError if it is damaged, too long for the grid, or one side is over 200 times the
    other.
    """
    total, fps, most = len(video.times), video.fps, options.max_frames
    if options.sampling == "fps_grid":
        assert options.sample_fps is not None
        indices: Sequence[int] = grid_frames(video.times, options.sample_fps, most)
    elif options.num_frames is not None:
        count, sample_fps = options.num_frames, options.sample_fps
        indices = counted_indices(total, fps, count, sample_fps, most)
    elif options.sample_fps is not None:
        indices = second_indices(total, fps, sample_fps=options.sample_fps, max_frames=most)
    else:
        indices = counted_indices(total, fps, -1, None, most)

    def lay_out(height: int, width: int) -> SliceLayout:
        return _lay_out("video", height, width, options, config)

    sampled = sample(video, indices, 1, lay_out)
    done = _processed(sampled.layout, sampled.hashes, sampled.pictures)
    record = replace(done.record, cut_short=video.cut_short)
    return replace(done, record=record, kept=sampled.kept)


@dataclass(frozen=True, slots=True)
class SliceLayout:
    """A `PictureLayout` of whole pictures and their slices.

    Attributes:
        size: (height, width) of the whole picture after the resize.
        cut: (rows, columns) of slices, None for no slices.
        slice_shape: (height, width) of a slice.
        merge_size: see `PictureLayout`.
    """

    modality: Modality
    size: tuple[int, int]
    cut: tuple[int, int] | None
    slice_shape: tuple[int, int]
    merge_size: int
    config: SliceConfig

    @property
    def key(self) -> str:
        """See `PictureLayout`."""
        return f"{self.size} {self.cut} {self.slice_shape}"

    def pictures(self, frame: Pixels) -> tuple[torch.Tensor, ...]:
        """See `PictureLayout`."""
        picture = channels_first(frame)
        whole = resize(picture, self.size, self.config)
        if self.cut is None:
            return (whole,)
        (rows, columns), (height, width) = self.cut, self.slice_shape
        large = resize(picture, (height * rows, width * columns), self.config)
        return (whole, *_cut(large, rows, columns))

    def hashes(self, pictures: tuple[torch.Tensor, ...]) -> tuple[bytes, ...]:
        """See `PictureLayout`."""
        return tuple(
            content_hash(self.modality, span, (1, *self.config.grid(*span.shape[-2:])))
            for span in pictures
        )

    def spans(self, frames: Sequence[tuple[bytes, ...]]) -> tuple[bytes, ...]:
        """See `PictureLayout`."""
        return tuple(chain.from_iterable(frames))


def _lay_out(
    modality: Modality, height: int, width: int, options: SliceOptions, config: SliceConfig
) -> SliceLayout:
    check_ratio(height, width)
    cut, slice_shape, factor = None, (0, 0), config.patch_size * options.merge_size
    if options.max_slices > 1:
        cut = slice_grid(height, width, max_slices=options.max_slices, side=config.side)
    size = whole_size(height, width, side=config.side, factor=factor, enlarge=cut is None)
    if cut is not None:
        slice_shape = slice_size(height, width, cut, side=config.side, factor=factor)
    return SliceLayout(modality, size, cut, slice_shape, options.merge_size, config)


def _processed(
    layout: SliceLayout,
    hashes: tuple[bytes, ...],
    pictures: Sequence[tuple[torch.Tensor, ...]],
) -> Processed:
    slices, config = None, layout.config
    if layout.cut is not None:
        slices = Slices(*layout.cut, config.grid(*layout.slice_shape))
    count = len(hashes) // (1 + (slices.count if slices is not None else 0))
    grid = (count, *config.grid(*layout.size))
    record = MediaRecord(layout.modality, grid, hashes, (), layout.merge_size, slices)
    wholes = stacked([whole for whole, *_ in pictures])
    details = None
    if slices is not None:
        details = stacked([torch.stack(details) for _, *details in pictures])
    return Processed(record, wholes, details)


def _cut(picture: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Cut `[3, height, width]` into `[rows * columns, 3, height / rows, width / columns]`."""
    channels, height, width = picture.shape
    height, width = height // rows, width // columns
    cut = picture.view(channels, rows, height, columns, width).permute(1, 3, 0, 2, 4)
    return cut.reshape(rows * columns, channels, height, width).contiguous()
