"""Patches of pictures as the processor makes them, and labels of every picture cell."""

from __future__ import annotations

import io
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from demo_chat import CELL, MEDIA, MERGE, PATCH, VIDEO_CELLS
from demo_scenes import COLOURS, KINDS, Thing, random_size
from demo_words import PLACES
from PIL import Image
from torch import Tensor

COLOUR_IDS = {name: i + 1 for i, name in enumerate(COLOURS)}


KIND_IDS = {name: i + 1 for i, name in enumerate(KINDS)}


NUM_COLOURS = len(COLOURS) + 1


NUM_KINDS = len(KINDS) + 1


PLACE_IDS = {name: i + 1 for i, name in enumerate(PLACES.values())}


NUM_PLACES = len(PLACES) + 1


def image_size(height: int, width: int) -> tuple[int, int]:
    """Return the size (height, width) to which the processor resizes a picture."""
    high, wide = (max(CELL, round(side / CELL) * CELL) for side in (height, width))
    if high * wide > MEDIA.image_max_pixels:
        shrink = math.sqrt(height * width / MEDIA.image_max_pixels)
        high, wide = (max(CELL, int(side / shrink / CELL) * CELL) for side in (height, width))
    elif high * wide < MEDIA.image_min_pixels:
        grow = math.sqrt(MEDIA.image_min_pixels / (height * width))
        high, wide = (math.ceil(side * grow / CELL) * CELL for side in (height, width))
    return high, wide


def frame_size(height: int, width: int, frames: int) -> tuple[int, int]:
    """Return the size (height, width) of a video's frames; the budget is per frame."""
    high, wide = (max(CELL, round(side / CELL) * CELL) for side in (height, width))
    budget = VIDEO_CELLS * CELL * CELL * frames
    even = round(frames / 2) * 2
    if even * high * wide > budget:
        shrink = math.sqrt(frames * height * width / budget)
        high, wide = (max(CELL, int(side / shrink / CELL) * CELL) for side in (height, width))
    return high, wide


def resize(pictures: Sequence[Image.Image], size: tuple[int, int]) -> Tensor:
    """Resize uint8 [n, 3, height, width] as the server does."""
    arrays = np.stack([np.asarray(picture) for picture in pictures])
    pixels = torch.from_numpy(arrays).permute(0, 3, 1, 2).contiguous()
    if tuple(pixels.shape[-2:]) == size:
        return pixels
    return torch.nn.functional.interpolate(pixels, size=size, mode="bicubic", antialias=True)


def patchify(frames: Tensor) -> Tensor:
    """Split uint8 [2 * p, 3, H, W] into normalised patches in spatial-merge order.

    Returns float32 [p, H * W / PATCH**2, 3 * 2 * PATCH**2].
    """
    count, channels, height, width = frames.shape
    pixels = (frames.float() / 255 - 0.5) / 0.5
    rows, columns = height // CELL, width // CELL
    split = pixels.view(count // 2, 2, channels, rows, MERGE, PATCH, columns, MERGE, PATCH)
    order = split.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return order.reshape(count // 2, rows * columns * MERGE**2, -1)


def through_jpeg(picture: Image.Image, quality: int) -> Image.Image:
    """Compress a picture with loss and decode it."""
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=quality)
    return Image.open(buffer).convert("RGB")


@dataclass
class CellLabels:
    """Content of each cell of some pictures: int64 [pictures, cells]; 0 is background.

    The fields are colour, kind, place and size of the thing in the cell, and whether its centre
    lies there. Sizes are 1 small and 2 big, and 0 also for a single thing.
    """

    colour: Tensor
    kind: Tensor
    place: Tensor
    size: Tensor
    centre: Tensor


def cell_labels(pictures: Sequence[Sequence[Thing]], rows: int, columns: int) -> CellLabels:
    """Label the cells that things cover or are centred in."""
    shape = (len(pictures), rows * columns)
    colour, kind, place, size, centre = (np.zeros(shape, np.int64) for _ in range(5))
    ys, xs = (np.arange(rows) + 0.5)[:, None], (np.arange(columns) + 0.5)[None]
    for i, things in enumerate(pictures):
        nearest = np.full((rows, columns), 1.1)
        for thing in things:
            x, y = thing.x * columns, thing.y * rows
            radius = thing.radius * min(rows, columns)
            far = np.hypot(ys - y, xs - x) / (radius + 0.3)
            inside = (far < nearest).reshape(-1)
            nearest = np.minimum(nearest, far)
            colour[i][inside] = COLOUR_IDS[thing.colour]
            kind[i][inside] = KIND_IDS[thing.kind]
            place[i][inside] = PLACE_IDS[PLACES[thing.row, thing.column]]
            size[i][inside] = 0 if len(things) == 1 else 1 + thing.big
            row, column = min(rows - 1, int(y)), min(columns - 1, int(x))
            centre[i][row * columns + column] = 1
    return CellLabels(*(torch.from_numpy(found) for found in (colour, kind, place, size, centre)))


@dataclass
class StoryLabels:
    """Content of each picture of an album or second of a video: int64 [pictures]."""

    order: Tensor
    """Its number, from 0."""
    fresh: Tensor
    """Whether it shows something, and something else than the one before."""
    count: Tensor
    """How many were fresh until here."""


def story_labels(rows: Sequence[Sequence[Thing | None]]) -> StoryLabels:
    """Label rows of pictures, each picture with the thing in it."""
    order, fresh, count = [], [], []
    for row in rows:
        look: tuple[str, str] | None = None
        total = 0
        for number, thing in enumerate(row):
            before, look = look, (thing.kind, thing.colour) if thing is not None else None
            new = look is not None and look != before
            total += new
            order.append(number)
            fresh.append(int(new))
            count.append(total)
    return StoryLabels(*(torch.tensor(values) for values in (order, fresh, count)))


def sizes_of_one_grid(rng: random.Random, count: int) -> list[tuple[int, int]]:
    """Return source sizes of one common grid. Very large ones are rare, for speed."""
    first = random_size(rng)
    size, sources = image_size(*first), [first]
    ratio = first[0] / first[1]
    while len(sources) < count:
        base = math.exp(rng.uniform(math.log(64), math.log(320)))
        base = 640 if rng.random() < 0.02 else base
        spread = math.exp(rng.uniform(-0.2, 0.2)) if ratio != 1 else 1.0
        height, width = (
            min(640, max(64, round(base * side)))
            for side in (math.sqrt(ratio * spread), 1 / math.sqrt(ratio * spread))
        )
        sources.append((height, width) if image_size(height, width) == size else first)
    return sources


def frame_sizes_of_one_grid(rng: random.Random, count: int) -> list[tuple[int, int]]:
    ratio = rng.choice((1.0, 1.0, 1.0, 0.75, 0.5625, 1.33))
    widest = max(64, round(64 / min(1.0, ratio)))
    first = (max(64, round(widest * ratio)), widest)
    size, sources = frame_size(*first, 8), [first]
    while len(sources) < count:
        width = rng.randint(widest, 2 * widest)
        source = (round(width * first[0] / first[1]), width)
        sources.append(source if frame_size(*source, 8) == size else first)
    return sources


def noisy(rng: random.Random, patches: Tensor) -> Tensor:
    """Add a little sensor noise, so that flat areas do not become a fingerprint."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    noise = torch.randn(patches.shape, generator=generator)
    return patches + noise * rng.uniform(0, 0.04)
