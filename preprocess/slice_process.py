"""Turns decoded pixels into a whole picture and its slices: samples, resizes, cuts and hashes.

The spans of an image, and of every frame of a video, are the reduced whole picture, then its slices
row by row. All frames of a video are cut alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

import torch

from vlm_serve.preprocess.hashing import content_hash
from vlm_serve.preprocess.media_frames import Video
from vlm_serve.preprocess.media_image import Pixels
from vlm_serve.preprocess.media_process import (
    MediaRecord,
    Processed,
    Slices,
    channels_first,
    counted_indices,
    grid_frames,
)
from vlm_serve.preprocess.processors import resize
from vlm_serve.preprocess.reading.conversation import Modality
from vlm_serve.preprocess.sizes import check_ratio
from vlm_serve.preprocess.slice_config import SliceConfig, SliceVideoConfig
from vlm_serve.preprocess.slice_options import SliceOptions, SliceVideoOptions
from vlm_serve.preprocess.slice_sizes import second_indices, slice_grid, slice_size, whole_size


def process_sliced_image(
    pixels: Pixels, options: SliceOptions, config: SliceConfig, param: str | None = None
) -> Processed:
    """Process one image.

    Args:
        pixels: uint8 `[height, width, 3]`.

    Raises MediaError if one side is over 200 times the other.
    """
    return _process("image", [pixels], options, config, param)


def process_sliced_video(
    video: Video, options: SliceVideoOptions, config: SliceVideoConfig, param: str | None = None
) -> Processed:
    """Process one video; resize each frame as it is decoded, so that few are held at full size.

    Raises MediaError if it is damaged, too long for the grid, or one side is over 200 times the
    other.
    """
    total, fps, most = len(video.times), video.fps, options.max_frames
    if options.sampling == "fps_grid":
        assert options.sample_fps is not None
        indices: Sequence[int] = grid_frames(video.times, options.sample_fps, most, param)
    elif options.num_frames is not None:
        count, sample_fps = options.num_frames, options.sample_fps
        indices = counted_indices(total, fps, count, sample_fps, most, param)
    elif options.sample_fps is not None:
        indices = second_indices(total, fps, sample_fps=options.sample_fps, max_frames=most)
    else:
        indices = counted_indices(total, fps, -1, None, most, param)
    done = _process("video", video.frames(indices), options, config, param)
    return replace(done, record=replace(done.record, cut_short=video.cut_short))


def _process(
    modality: Modality,
    pictures: Iterable[Pixels],
    options: SliceOptions,
    config: SliceConfig,
    param: str | None,
) -> Processed:
    """Process pictures; the first one determines the size of all."""
    pictures = iter(pictures)
    first = next(pictures)
    height, width = first.shape[:2]
    check_ratio(height, width, param)
    grid, factor = None, config.patch_size * options.merge_size
    if options.max_slices > 1:
        grid = slice_grid(height, width, max_slices=options.max_slices, side=config.side)
    size = whole_size(height, width, side=config.side, factor=factor, enlarge=grid is None)
    wholes, details, layout = [], [], None
    if grid is not None:
        each = slice_size(height, width, grid, side=config.side, factor=factor)
        layout = Slices(*grid, config.grid(*each))
    for picture in map(channels_first, chain([first], pictures)):
        wholes.append(resize(picture, size, config))
        if grid is not None:
            large = resize(picture, (each[0] * grid[0], each[1] * grid[1]), config)
            details.append(_cut(large, *grid))
    record = MediaRecord(
        modality,
        (len(wholes), *config.grid(*size)),
        tuple(_hashes(modality, wholes, details, config)),
        (),
        options.merge_size,
        layout,
    )
    return Processed(record, torch.stack(wholes), torch.stack(details) if details else None)


def _hashes(
    modality: Modality, wholes: list[torch.Tensor], details: list[torch.Tensor], config: SliceConfig
) -> Iterator[bytes]:
    for index, whole in enumerate(wholes):
        for span in (whole, *(details[index] if details else ())):
            yield content_hash(modality, span, (1, *config.grid(*span.shape[-2:])))


def _cut(picture: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Cut `[3, height, width]` into `[rows * columns, 3, height / rows, width / columns]`."""
    channels, height, width = picture.shape
    height, width = height // rows, width // columns
    cut = picture.view(channels, rows, height, columns, width).permute(1, 3, 0, 2, 4)
    return cut.reshape(rows * columns, channels, height, width).contiguous()
