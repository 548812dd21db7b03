"""Training batches: pictures as patches, conversations as tokens, labels of every picture cell.

Batch number `step` depends on the seed and on `step` alone, so any number of workers gives the
same training run.
"""

from __future__ import annotations

import io
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from demo_albums import album_turns, draw_album
from demo_chat import (
    CELL,
    MEDIA,
    MERGE,
    PATCH,
    SYSTEM_PROMPTS,
    VIDEO_CELLS,
    ChatFormat,
    Encoded,
    Medium,
    small_talk_turns,
    stamps_of,
)
from demo_questions import Turn, picture_turns
from demo_scenes import COLOURS, KINDS, Scene, Thing, draw_scene, random_size, render
from demo_videos import Clip, clip_turns, draw_clip, render_clip, sampled_frames, visible
from PIL import Image
from torch import Tensor

COLOUR_IDS = {name: i + 1 for i, name in enumerate(COLOURS)}
KIND_IDS = {name: i + 1 for i, name in enumerate(KINDS)}
NUM_COLOURS = len(COLOURS) + 1
NUM_KINDS = len(KINDS) + 1
IGNORE = -100


def image_size(height: int, width: int) -> tuple[int, int]:
    """Pixels (height, width) to which the processor resizes a picture of this size."""
    high, wide = (max(CELL, round(side / CELL) * CELL) for side in (height, width))
    if high * wide > MEDIA.image_max_pixels:
        shrink = math.sqrt(height * width / MEDIA.image_max_pixels)
        high, wide = (max(CELL, int(side / shrink / CELL) * CELL) for side in (height, width))
    elif high * wide < MEDIA.image_min_pixels:
        grow = math.sqrt(MEDIA.image_min_pixels / (height * width))
        high, wide = (math.ceil(side * grow / CELL) * CELL for side in (height, width))
    return high, wide


def frame_size(height: int, width: int, frames: int) -> tuple[int, int]:
    """The same for the frames of a video, whose budget is per frame."""
    high, wide = (max(CELL, round(side / CELL) * CELL) for side in (height, width))
    budget = VIDEO_CELLS * CELL * CELL * frames
    even = round(frames / 2) * 2
    if even * high * wide > budget:
        shrink = math.sqrt(frames * height * width / budget)
        high, wide = (max(CELL, int(side / shrink / CELL) * CELL) for side in (height, width))
    return high, wide


def resize(pictures: Sequence[Image.Image], size: tuple[int, int]) -> Tensor:
    """uint8 [n, 3, height, width], resized as the server does."""
    arrays = np.stack([np.asarray(picture) for picture in pictures])
    pixels = torch.from_numpy(arrays).permute(0, 3, 1, 2).contiguous()
    if tuple(pixels.shape[-2:]) == size:
        return pixels
    return torch.nn.functional.interpolate(pixels, size=size, mode="bicubic", antialias=True)


def patchify(frames: Tensor) -> Tensor:
    """uint8 [2 * p, 3, H, W] to float32 [p, H * W / PATCH**2, 3 * 2 * PATCH**2]: normalised
    patches in spatial-merge order."""
    count, channels, height, width = frames.shape
    pixels = (frames.float() / 255 - 0.5) / 0.5
    rows, columns = height // CELL, width // CELL
    split = pixels.view(count // 2, 2, channels, rows, MERGE, PATCH, columns, MERGE, PATCH)
    order = split.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return order.reshape(count // 2, rows * columns * MERGE**2, -1)


def through_jpeg(picture: Image.Image, quality: int) -> Image.Image:
    """What lossy compression leaves of a picture."""
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=quality)
    return Image.open(buffer).convert("RGB")


@dataclass
class CellLabels:
    """What each cell of some pictures shows: int64 [pictures, cells]; 0 is background."""

    colour: Tensor
    kind: Tensor
    centre: Tensor


def cell_labels(pictures: Sequence[Sequence[Thing]], rows: int, columns: int) -> CellLabels:
    """Labels of the cells that things cover or have their centre in."""
    shape = (len(pictures), rows * columns)
    colour, kind, centre = (np.zeros(shape, np.int64) for _ in range(3))
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
            row, column = min(rows - 1, int(y)), min(columns - 1, int(x))
            centre[i][row * columns + column] = 2 if thing.big else 1
    return CellLabels(*(torch.from_numpy(array) for array in (colour, kind, centre)))


@dataclass
class Slot:
    """One medium of every sequence of a batch; all have the same grid."""

    patches: Tensor
    """float32 [B * p, patches per picture, patch values]"""
    rows: int
    columns: int
    places: Tensor
    """int64 [B * p * cells]: index of each token in the flattened [B * T]."""
    labels: CellLabels


@dataclass
class Batch:
    """A training batch. `targets[b, t]` is the token after `ids[b, t]` where it is learned, else
    IGNORE."""

    kind: str
    ids: Tensor
    targets: Tensor
    positions: Tensor
    slots: list[Slot] = field(default_factory=list)
    turn_kinds: list[list[str]] = field(default_factory=list)
    """Kind of every question, by sequence."""


@dataclass(frozen=True)
class BatchSizes:
    """Sequences per batch."""

    image: int = 32
    album: int = 20
    video: int = 12
    text: int = 32
    vision: int = 32


class BatchMaker:
    """Makes batches of the kinds "vision", "image", "album", "video" and "text"."""

    def __init__(
        self,
        chat: ChatFormat,
        seed: int,
        sizes: BatchSizes | None = None,
        split: str = "train",
    ) -> None:
        self.chat = chat
        self.seed = seed
        self.sizes = sizes or BatchSizes()
        self.split = split

    def make(self, step: int, kind: str, turns: int = 5) -> Batch:
        """The batch of one training step."""
        rng = random.Random(f"{self.split}:{self.seed}:{step}")
        if kind == "text":
            return self._text(rng)
        if kind == "album":
            return self._album(rng, turns)
        if kind == "video":
            return self._video(rng, turns)
        return self._image(rng, turns, kind)

    def _image(self, rng: random.Random, turns: int, kind: str) -> Batch:
        count = self.sizes.vision if kind == "vision" else self.sizes.image
        sources = _sizes_of_one_grid(rng, count)
        scenes = [draw_scene(rng, self.split) for _ in range(count)]
        medium, slot = _picture_slot(rng, scenes, sources)
        talks = [picture_turns(rng, scene, turns) for scene in scenes if kind == "image"]
        encoded = [
            self.chat.conversation(
                talk, [[medium]], system=_system(rng), text_first=rng.random() < 0.15
            )
            for talk in talks
        ]
        return _collate(kind, encoded, [slot], self.chat, talks)

    def _album(self, rng: random.Random, turns: int) -> Batch:
        count, pictures = self.sizes.album, rng.choice((2, 2, 3))
        albums = [draw_album(rng, self.split, pictures) for _ in range(count)]
        media, slots = [], []
        for place in range(pictures):
            scenes = [album[place] for album in albums]
            medium, slot = _picture_slot(rng, scenes, _sizes_of_one_grid(rng, count))
            media.append(medium)
            slots.append(slot)
        talks = [album_turns(rng, album, turns) for album in albums]
        encoded = [
            self.chat.conversation(
                talk, [media], system=_system(rng), text_first=rng.random() < 0.1
            )
            for talk in talks
        ]
        return _collate("album", encoded, slots, self.chat, talks)

    def _video(self, rng: random.Random, turns: int) -> Batch:
        count = self.sizes.video
        clips = [draw_clip(rng) for _ in range(count)]
        seconds = rng.choice((4, 5, 6, 6, 7, 8))
        while any(clip.seconds != seconds for clip in clips):
            clips = [clip if clip.seconds == seconds else draw_clip(rng) for clip in clips]
        frames = [sampled_frames(clip) for clip in clips]
        sources = _frame_sizes_of_one_grid(rng, count)
        size = frame_size(*sources[0], len(frames[0]))
        patches = []
        things: list[list[Thing]] = []
        for clip, chosen, source in zip(clips, frames, sources, strict=True):
            pictures = render_clip(clip, chosen, *source)
            if rng.random() < 0.3:
                quality = rng.randint(30, 90)
                pictures = [through_jpeg(picture, quality) for picture in pictures]
            patches.append(patchify(resize(pictures, size)))
            things += _things_by_second(clip, chosen)
        rows, columns = size[0] // CELL, size[1] // CELL
        slot = Slot(
            _noisy(rng, torch.cat(patches)),
            rows,
            columns,
            torch.empty(0, dtype=torch.int64),
            cell_labels(things, rows, columns),
        )
        talks = [clip_turns(rng, clip, turns) for clip in clips]
        encoded = [
            self.chat.conversation(
                talk,
                [[Medium(rows, columns, stamps_of(chosen, clip.frame_rate))]],
                system=_system(rng),
                text_first=rng.random() < 0.1,
            )
            for talk, clip, chosen in zip(talks, clips, frames, strict=True)
        ]
        return _collate("video", encoded, [slot], self.chat, talks)

    def _text(self, rng: random.Random) -> Batch:
        talks = [small_talk_turns(rng) for _ in range(self.sizes.text)]
        encoded = [self.chat.conversation(talk, [], system=_system(rng)) for talk in talks]
        return _collate("text", encoded, [], self.chat, talks)


def _system(rng: random.Random) -> str | None:
    return rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.12 else None


def _sizes_of_one_grid(rng: random.Random, count: int) -> list[tuple[int, int]]:
    """Source sizes that the processor brings to one grid. Enormous ones are rare, for speed."""
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


def _frame_sizes_of_one_grid(rng: random.Random, count: int) -> list[tuple[int, int]]:
    ratio = rng.choice((1.0, 1.0, 1.0, 0.75, 0.5625, 1.33))
    widest = max(64, round(64 / min(1.0, ratio)))
    first = (max(64, round(widest * ratio)), widest)
    size, sources = frame_size(*first, 8), [first]
    while len(sources) < count:
        width = rng.randint(widest, 2 * widest)
        source = (round(width * first[0] / first[1]), width)
        sources.append(source if frame_size(*source, 8) == size else first)
    return sources


def _picture_slot(
    rng: random.Random, scenes: Sequence[Scene], sources: Sequence[tuple[int, int]]
) -> tuple[Medium, Slot]:
    size = image_size(*sources[0])
    pixels = []
    for scene, source in zip(scenes, sources, strict=True):
        picture = render(scene, *source)
        if rng.random() < 0.15:
            picture = through_jpeg(picture, rng.randint(40, 95))
        pixels.append(resize([picture], size))
    frames = torch.cat(pixels).repeat_interleave(2, dim=0)
    rows, columns = size[0] // CELL, size[1] // CELL
    labels = cell_labels([scene.things for scene in scenes], rows, columns)
    empty = torch.empty(0, dtype=torch.int64)
    return Medium(rows, columns), Slot(_noisy(rng, patchify(frames)), rows, columns, empty, labels)


def _noisy(rng: random.Random, patches: Tensor) -> Tensor:
    """A little sensor noise, so that flat areas do not become a fingerprint."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    noise = torch.randn(patches.shape, generator=generator)
    return patches + noise * rng.uniform(0, 0.04)


def _things_by_second(clip: Clip, frames: Sequence[int]) -> list[list[Thing]]:
    """What each temporal patch shows, by its first frame."""
    shown = [visible(clip, frame) for frame in frames[::2]]
    return [[thing] if thing is not None else [] for thing in shown]


def _collate(
    kind: str,
    encoded: list[Encoded],
    slots: list[Slot],
    chat: ChatFormat,
    talks: Sequence[Sequence[Turn]],
) -> Batch:
    """Pad at the end; nothing that is learned looks there."""
    longest = max((len(sequence.ids) for sequence in encoded), default=0)
    shape = (len(encoded), longest)
    ids = np.full(shape, chat.special["endoftext"], np.int64)
    targets = np.full(shape, IGNORE, np.int64)
    positions = np.zeros((3, *shape), np.int64)
    for i, sequence in enumerate(encoded):
        length = len(sequence.ids)
        ids[i, :length] = sequence.ids
        learned = np.array(sequence.learned[1:])
        targets[i, : length - 1] = np.where(learned, sequence.ids[1:], IGNORE)
        positions[:, i, :length] = np.array(sequence.positions).T
    for number, slot in enumerate(slots):
        places = [i * longest + place for i, s in enumerate(encoded) for place in s.media[number]]
        slot.places = torch.tensor(places, dtype=torch.int64)
    kinds = [[turn.kind for turn in talk] for talk in talks]
    return Batch(
        kind,
        torch.from_numpy(ids),
        torch.from_numpy(targets),
        torch.from_numpy(positions),
        slots,
        kinds,
    )
