"""Turns decoded pixels into the vision tower's input: samples, resizes and hashes them.

Pictures are seen whole, or whole and in slices. The spans of an image in slices, and of every frame
of such a video, are the reduced whole picture, then its slices row by row. All frames of a video
are cut alike.

A hash names the pixels that the model sees (docs/architecture.md#identity).

Sizes of resized pictures follow transformers' `Qwen2VLImageProcessor.resize` / `smart_resize` and
`Qwen3VLVideoProcessor.resize`, number for number, or `Qwen2VLVideoProcessor`; with slices,
`MiniCPMV4_6ImageProcessor` and `MiniCPMV4_6VideoProcessor`, or `Lfm2VlImageProcessor`,
`GotOcr2ImageProcessor` and `InternVLVideoProcessor`, whose slices are called tiles.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch

from vlm_serve.errors import MediaError
from vlm_serve.preprocess.identity.keys import hasher_of
from vlm_serve.preprocess.media.frames import Video
from vlm_serve.preprocess.media.images import Pixels
from vlm_serve.preprocess.media.known_frames import Hashes, KnownVideo
from vlm_serve.preprocess.media.part_options import (
    ImageOptions,
    SliceOptions,
    SliceVideoOptions,
    VideoOptions,
)
from vlm_serve.preprocess.media.processors import (
    FittedTileConfig,
    FrameVideoConfig,
    PictureConfig,
    PixelConfig,
    SliceConfig,
    TileConfig,
    VideoConfig,
    resize,
)
from vlm_serve.preprocess.media.sampling import sampled
from vlm_serve.preprocess.reading.conversation import Modality

_DOMAIN = b"vlm-serve content 1"
_PATCH_DOMAIN = b"vlm-serve temporal patch 1"


Pictures = tuple[torch.Tensor, ...]
"""One frame as the model sees it: the whole picture, then its slices."""


MAX_ASPECT_RATIO = 200


@dataclass(frozen=True, slots=True)
class Slices:
    """How a medium's pictures are cut: rows, columns, and (h, w) of each slice in patches."""

    rows: int
    columns: int
    grid: tuple[int, int]

    @property
    def count(self) -> int:
        """Slices per picture."""
        return self.rows * self.columns


@dataclass(frozen=True, slots=True)
class MediaRecord:
    """Everything a prompt needs of a medium besides its pixels.

    Attributes:
        modality: "image" or "video".
        grid: (t, h, w) in patches; of the whole pictures if there are slices too.
        hashes: content hash of every span: temporal patches, or pictures with their slices.
        times: seconds of every temporal patch, if the prompt includes timestamps; empty for an
            image.
        merge_size: patches per side that form one token.
        slices: layout of every picture, None for no slices.
        cut_short: a part of the file is missing or does not decode; the medium is the rest.
    """

    modality: Modality
    grid: tuple[int, int, int]
    hashes: tuple[bytes, ...]
    times: tuple[float, ...]
    merge_size: int
    slices: Slices | None = None
    cut_short: bool = False

    def span(self, patch: int) -> tuple[int, int, int]:
        """Return (frame, h, w): the picture of a span, and the span's own size in patches."""
        if self.slices is None:
            return patch, *self.grid[1:]
        frame, part = divmod(patch, 1 + self.slices.count)
        return frame, *(self.slices.grid if part else self.grid[1:])


@dataclass(frozen=True, slots=True)
class Processed:
    """A record and its pixels after the resize.

    Attributes:
        pixels: uint8 `[frames, 3, height, width]`.
        details: uint8 `[frames, slices, 3, height, width]` of pictures cut into slices, else None.
        kept: places of these frames among the sampled ones, ascending; None: these are all.
    """

    record: MediaRecord
    pixels: torch.Tensor
    details: torch.Tensor | None = None
    kept: Sequence[int] | None = None

    def has(self, patch: int, patch_size: int) -> bool:
        """Return True if the pixels of a span are here."""
        if self.kept is None:
            return True
        frames = 1 if self.record.slices is not None else patch_size
        first = self._row(self.record.span(patch)[0] * frames)
        return first < self._row((self.record.span(patch)[0] + 1) * frames)

    def _row(self, place: int) -> int:
        return place if self.kept is None else bisect_left(self.kept, place)

    def frames(self, patch: int, patch_size: int) -> torch.Tensor:
        """Return uint8 `[1 or patch_size, 3, height, width]` of a span.

        The last frame is repeated to fill a temporal patch of a video.
        """
        if self.details is not None:
            frame, part = divmod(patch, 1 + self.details.shape[1])
            if part:
                row = self._row(frame)
                return self.details[row, part - 1 : part]
            patch = frame
        if self.record.modality == "image":
            return self.pixels[patch : patch + 1]
        first, last = (self._row(place * patch_size) for place in (patch, patch + 1))
        return filled(self.pixels[first:last], patch_size)


@dataclass(frozen=True, slots=True)
class PictureLayout:
    """Size and cut of all pictures of a medium.

    Attributes:
        size: (height, width) of a whole picture after the resize.
        merge_size: patches per side of one token.
        cut: (rows, columns) of slices, None for no slices.
        slice_shape: (height, width) of a slice.
    """

    modality: Modality
    size: tuple[int, int]
    merge_size: int
    config: PictureConfig
    cut: tuple[int, int] | None = None
    slice_shape: tuple[int, int] = (0, 0)

    @property
    def key(self) -> str:
        """Everything that decides the pictures of a frame, besides the processor."""
        return f"{self.size} {self.cut} {self.slice_shape}"

    def pictures(self, frame: Pixels) -> Pictures:
        """Resize and cut one frame.

        Raises MediaError if the processor does not resize, and a side does not fit its patches.
        """
        picture = torch.from_numpy(frame).permute(2, 0, 1)  # [3, height, width]
        if not self.config.do_resize:
            return (_kept(picture, self.config),)
        whole = resize(picture, self.size, self.config)
        if self.cut is None:
            return (whole,)
        (rows, columns), (height, width) = self.cut, self.slice_shape
        large = resize(picture, (height * rows, width * columns), self.config)
        return (whole, *_cut(large, rows, columns))

    def hashes(self, pictures: Pictures) -> Hashes:
        """Return the content hashes of a frame."""
        return tuple(
            content_hash(self.modality, span, (1, *self.config.grid(*span.shape[-2:])))
            for span in pictures
        )

    def spans(self, frames: Sequence[Hashes]) -> Hashes:
        """Return the hashes of the spans of frames that belong together."""
        hashes = tuple(chain.from_iterable(frames))
        if isinstance(self.config, SliceConfig):
            return hashes
        return (patch_hash(hashes, self.config.temporal_patch_size),)


def process_image(
    pixels: Pixels, options: ImageOptions | SliceOptions, config: PictureConfig
) -> Processed:
    """Process one image.

    Args:
        pixels: uint8 `[height, width, 3]`.

    Raises MediaError if one side is over 200 times the other.
    """
    layout = _lay_out("image", pixels.shape[:2], 1, options, config)
    pictures = layout.pictures(pixels)
    return _processed(layout, layout.hashes(pictures), [pictures])


def process_video(
    video: Video, options: VideoOptions | SliceVideoOptions, config: PictureConfig
) -> Processed:
    """Process one video; frames are resized and hashed while later ones are decoded, so few are
    held at full size.

    Of a `KnownVideo`, nothing is decoded if the hashes of all frames are known. Otherwise frames
    are decoded unless their spans are known and have their embeddings at hand: those that need
    pixels are decoded once, with the new ones.

    Raises MediaError if it is damaged, too long for the grid, or one side is over 200 times the
    other.
    """
    indices, seconds = sampled(video, options, config)
    together = config.temporal_patch_size
    groups = [indices[at : at + together] for at in range(0, len(indices), together)]
    lay_out = partial(_lay_out, "video", num_frames=len(indices), options=options, config=config)
    memory = video if isinstance(video, KnownVideo) else None
    kept: Sequence[int] = range(len(indices))
    hashes: dict[int, Hashes] = {}
    layout: PictureLayout | None = None
    size = memory.size(indices[0]) if memory is not None else None
    if memory is not None and size is not None:
        layout = lay_out(size)
        hashes = memory.hashes(layout.key)
        kept = list(_places_to_decode(groups, together, layout, hashes, memory))
    pictures: list[Pictures] = []
    new_hashes: dict[int, Hashes] = {}
    if kept:
        wanted = [indices[place] for place in kept]
        for index, frame in zip(wanted, video.frames(wanted), strict=True):
            if layout is None:
                size = frame.shape[0], frame.shape[1]
                layout = lay_out(size)
            pictures.append(layout.pictures(frame))
            new_hashes[index] = layout.hashes(pictures[-1])
    assert layout is not None and size is not None
    if memory is not None:
        memory.count(shown=len(indices), known=len(indices) - len(kept))
        if new_hashes:
            memory.learn((indices[0], size), layout.key, new_hashes)
    hashes = hashes | new_hashes
    spans = [layout.spans([hashes[index] for index in group]) for group in groups]
    done = _processed(layout, tuple(chain.from_iterable(spans)), pictures)
    record = replace(done.record, times=tuple(seconds), cut_short=video.cut_short)
    return replace(done, record=record, kept=kept if len(kept) < len(indices) else None)


def _processed(layout: PictureLayout, hashes: Hashes, pictures: Sequence[Pictures]) -> Processed:
    slices, details, config = None, None, layout.config
    if layout.cut is not None:
        slices = Slices(*layout.cut, config.grid(*layout.slice_shape))
        details = stacked([torch.stack(details) for _, *details in pictures])
    count = len(hashes) // (1 + (slices.count if slices is not None else 0))
    grid = (count, *config.grid(*layout.size))
    record = MediaRecord(layout.modality, grid, hashes, (), layout.merge_size, slices)
    return Processed(record, stacked([whole for whole, *_ in pictures]), details)


def stacked(pictures: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack pictures of one size; there may be none. A single one is not copied."""
    if len(pictures) == 1:
        return pictures[0][None]
    return torch.stack(list(pictures)) if pictures else torch.empty(0, dtype=torch.uint8)


def _lay_out(
    modality: Modality,
    size: tuple[int, ...],
    num_frames: int,
    options: ImageOptions | VideoOptions | SliceOptions,
    config: PictureConfig,
) -> PictureLayout:
    """Return the layout of all pictures, from the (height, width) of the first one."""
    height, width = size
    if isinstance(options, SliceOptions):
        assert isinstance(config, SliceConfig)
        lay_out = _lay_out_tiles if isinstance(config, TileConfig) else _lay_out_slices
        return lay_out(modality, height, width, options, config)
    assert isinstance(config, PixelConfig)
    if isinstance(options, ImageOptions):
        low, high = options.min_pixels, options.max_pixels
        fitted = image_size(height, width, factor=config.factor, min_pixels=low, max_pixels=high)
    else:
        assert isinstance(config, VideoConfig)
        fitted = _frame_size(height, width, num_frames, options, config)
    shown = fitted if config.do_resize else (height, width)
    return PictureLayout(modality, shown, config.merge_size, config)


def _lay_out_slices(
    modality: Modality, height: int, width: int, options: SliceOptions, config: SliceConfig
) -> PictureLayout:
    check_ratio(height, width)
    cut, slice_shape, factor = None, (0, 0), config.patch_size * options.merge_size
    if options.max_slices > 1:
        cut = slice_grid(height, width, max_slices=options.max_slices, side=config.side)
    enlarge = cut is None and config.enlarges
    size = whole_size(height, width, side=config.side, factor=factor, enlarge=enlarge)
    if cut is not None:
        slice_shape = slice_size(height, width, cut, side=config.side, factor=factor)
    return PictureLayout(modality, size, options.merge_size, config, cut, slice_shape)


def _lay_out_tiles(
    modality: Modality, height: int, width: int, options: SliceOptions, config: SliceConfig
) -> PictureLayout:
    assert isinstance(config, TileConfig)
    tile = config.side, config.side
    size, cut, large, fitted = tile, (1, 1), True, False
    if isinstance(config, FittedTileConfig):
        size, large = _fitted(height, width, options.merge_size, config)
        fitted = True
    if large and options.max_slices >= config.min_slices:
        least, most = config.min_slices, options.max_slices
        cut = tile_grid(height, width, least, most, side=config.side, ordered=not fitted)
    if cut == (1, 1):
        return PictureLayout(modality, size, options.merge_size, config)
    return PictureLayout(modality, size, options.merge_size, config, cut, tile)


def _fitted(
    height: int, width: int, merge_size: int, config: FittedTileConfig
) -> tuple[tuple[int, int], bool]:
    """Return the size of a picture that is seen whole, and whether it is large enough to be cut."""
    bounds, least = config.bounds(merge_size), config.patch_size
    factor = bounds["factor"]
    size = image_size(height, width, **bounds, least=factor)
    area = max(least, round(height / factor) * factor) * max(least, round(width / factor) * factor)
    return size, area > bounds["max_pixels"] * config.tolerance


def tile_grid(
    height: int, width: int, least: int, most: int, *, side: int, ordered: bool = False
) -> tuple[int, int]:
    """Return (rows, columns) of the tiles of a picture: those whose shape is closest to its own. Of
    two such cuts that come one after the other, with fewer tiles first, the later one counts if the
    picture has more than half of its pixels.

    Args:
        least, most: number of tiles.
        side: of a tile, in pixels.
        ordered: narrow cuts come before wide ones of equally many tiles.
    """
    # Otherwise in the order of transformers' set, which decides between equally many tiles.
    shapes = {
        (columns, rows)
        for count in range(least, most + 1)
        for columns in range(1, count + 1)
        for rows in range(1, count + 1)
        if least <= columns * rows <= most
    }
    best, distance = (1, 1), math.inf
    for columns, rows in sorted(sorted(shapes) if ordered else shapes, key=math.prod):
        found = abs(width / height - columns / rows)
        large = height * width > 0.5 * side * side * columns * rows
        if found < distance or (found == distance and large):
            best, distance = (rows, columns), found
    return best


def _frame_size(
    height: int, width: int, num_frames: int, options: VideoOptions, config: VideoConfig
) -> tuple[int, int]:
    if options.sampling == "fps_grid":
        size = image_size(
            height,
            width,
            factor=config.factor,
            min_pixels=config.factor**2,
            max_pixels=options.max_frame_pixels,
        )
        most = options.max_pixels
        if isinstance(config, FrameVideoConfig):
            most = config.whole_pixels
        if num_frames * size[0] * size[1] > most:
            raise MediaError(
                f"{num_frames} frames of {size[1]}x{size[0]} pixels exceed a video's budget of "
                f"{most} pixels; lower sample_fps or max_frame_pixels"
            )
        return size
    max_pixels = options.max_pixels
    if isinstance(config, FrameVideoConfig):
        low, share = options.min_pixels, config.whole_pixels // num_frames
        if config.cap_pixels_per_frame:
            max_pixels = max(min(max_pixels, share), int(low * 1.05))
        return image_size(
            height, width, factor=config.factor, min_pixels=low, max_pixels=max_pixels
        )
    if config.cap_pixels_per_frame:
        max_pixels = capped_budget(
            num_frames,
            min_pixels=options.min_pixels,
            max_pixels=options.max_pixels,
            max_frame_pixels=config.max_video_tokens * config.factor**2,
        )
    return video_size(
        height,
        width,
        num_frames=num_frames,
        factor=config.factor,
        temporal_factor=config.temporal_patch_size,
        min_pixels=options.min_pixels,
        max_pixels=max_pixels,
    )


def _kept(picture: torch.Tensor, config: PictureConfig) -> torch.Tensor:
    """Return a picture as it is. Raises MediaError unless its sides fit the patches."""
    assert isinstance(config, PixelConfig), "pictures with slices are resized"
    if picture.shape[-2] % config.factor or picture.shape[-1] % config.factor:
        raise MediaError(f"sides must be multiples of {config.factor} pixels")
    return picture.contiguous()


def _cut(picture: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Cut `[3, height, width]` into `[rows * columns, 3, height / rows, width / columns]`."""
    channels, height, width = picture.shape
    height, width = height // rows, width // columns
    cut = picture.view(channels, rows, height, columns, width).permute(1, 3, 0, 2, 4)
    return cut.reshape(rows * columns, channels, height, width).contiguous()


def filled(frames: torch.Tensor, patch_size: int) -> torch.Tensor:
    """Return `[patch_size, 3, height, width]` of a temporal patch, its last frame repeated."""
    missing = patch_size - len(frames)
    if missing:
        frames = torch.cat([frames, frames[-1:].expand(missing, -1, -1, -1)])
    return frames


def content_hash(modality: Modality, pixels: torch.Tensor, grid: tuple[int, int, int]) -> bytes:
    """Return the 32-byte BLAKE3 of an image, or of a frame or slice of a video.

    Args:
        modality: part of the hash: an image and a video frame of equal pixels are different media.
        pixels: post-resize uint8 `[3, height, width]`, contiguous.
        grid: (1, h, w) in patches.
    """
    assert pixels.dtype == torch.uint8 and pixels.is_contiguous()
    hasher = hasher_of(
        _DOMAIN,
        modality=modality,
        dtype="uint8",
        shape=",".join(map(str, pixels.shape)),
        grid=",".join(map(str, grid)),
    )
    # The pixels come last and the shape gives their length: no prefix and no copy is needed.
    hasher.update(pixels.numpy().reshape(-1).data)
    return hasher.digest()


def patch_hash(frames: Sequence[bytes], size: int) -> bytes:
    """Return the 32-byte hash of a temporal patch, from the content hashes of its frames.

    So a patch of known frames has a known hash, without their pixels.

    Args:
        frames: at most `size` hashes; the last frame is repeated to fill the patch.
    """
    filled = [*frames, *[frames[-1]] * (size - len(frames))]
    return hasher_of(_PATCH_DOMAIN, frames=b"".join(filled)).digest()


def _places_to_decode(
    groups: Sequence[Sequence[int]],
    together: int,
    layout: PictureLayout,
    hashes: dict[int, Hashes],
    memory: KnownVideo,
) -> Iterator[int]:
    wanted = memory.wanted
    if wanted is None and all(index in hashes for group in groups for index in group):
        return
    for number, group in enumerate(groups):
        if all(index in hashes for index in group):
            spans = layout.spans([hashes[index] for index in group])
            at_hand = all(memory.held(span, layout.merge_size) for span in spans)
            if at_hand if wanted is None else number not in wanted:
                continue
        yield from range(number * together, number * together + len(group))


def check_ratio(height: float, width: float) -> None:
    """Check the aspect ratio. Raises MediaError if one side is over 200 times the other."""
    ratio = max(height, width) / min(height, width)
    if ratio > MAX_ASPECT_RATIO:
        raise MediaError(f"the aspect ratio must be at most {MAX_ASPECT_RATIO}, it is {ratio:.1f}")


def image_size(
    height: int, width: int, *, factor: int, min_pixels: int, max_pixels: int, least: int = 0
) -> tuple[int, int]:
    """Return (height, width) after the resize: multiples of `factor`, the area within bounds.

    Args:
        least: a side that is shorter counts as so long before the bounds are applied.

    Raises MediaError if one side is over 200 times the other.
    """
    check_ratio(height, width)
    return _fit(height, width, 1, 1, factor, min_pixels, max_pixels, least)


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
    least: int = 0,
) -> tuple[int, int]:
    new_height = max(least, round(height / factor) * factor)
    new_width = max(least, round(width / factor) * factor)
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
