"""Training batches: pictures as patches, conversations as tokens, labels of every picture cell.

Batch number `step` depends on the seed and on `step` alone, so any number of workers gives the
same training run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from demo_albums import Album, album_turns, draw_album
from demo_chat import CELL, SYSTEM_PROMPTS, ChatFormat, Encoded, Medium, small_talk_turns, stamps_of
from demo_clips import Clip, draw_clip, render_clip, sampled_frames, visible
from demo_drawing import render
from demo_patches import (
    CellLabels,
    StoryLabels,
    cell_labels,
    frame_size,
    frame_sizes_of_one_grid,
    image_size,
    noisy,
    patchify,
    resize,
    sizes_of_one_grid,
    story_labels,
    through_jpeg,
)
from demo_questions import picture_turns
from demo_records import album_record, clip_record, picture_record, text_record
from demo_scenes import Scene, Thing, draw_scene
from demo_videos import clip_turns
from demo_words import Turn
from torch import Tensor

IGNORE = -100
PADDING = 199
"""Padding counts through so many tokens, over and over."""
Shown = TypeVar("Shown")
"""What a conversation is about: a picture, an album, a clip, or nothing but a question."""


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
    story: StoryLabels | None = None
    """Albums and videos only."""


@dataclass
class Batch:
    """A training batch.

    `targets[b, t]` is the token after `ids[b, t]` if it is learned, else IGNORE; `turns[b, t]` is
    the number of its turn.
    """

    kind: str
    ids: Tensor
    targets: Tensor
    turns: Tensor
    positions: Tensor
    slots: list[Slot] = field(default_factory=list)
    turn_kinds: list[list[str]] = field(default_factory=list)
    """Kind of every question, by sequence."""


@dataclass(frozen=True)
class BatchSizes:
    """Sequences per batch."""

    image: int = 20
    album: int = 14
    video: int = 9
    text: int = 20
    vision: int = 32


class BatchMaker:
    """Makes batches of the kinds "vision", "image", "album", "video" and "text".

    `records` is the share of conversations with one answer in JSON.
    """

    def __init__(
        self,
        chat: ChatFormat,
        seed: int,
        sizes: BatchSizes | None = None,
        split: str = "train",
        records: float = 0.0,
    ) -> None:
        self.chat = chat
        self.seed = seed
        self.sizes = sizes or BatchSizes()
        self.split = split
        self.records = records

    def make(self, step: int, kind: str, turns: int = 4) -> Batch:
        """Make the batch of one training step."""
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
        sources = sizes_of_one_grid(rng, count)
        scenes = [draw_scene(rng, self.split) for _ in range(count)]
        medium, slot = picture_slot(rng, scenes, sources)
        talks = [picture_turns(rng, scene, turns) for scene in scenes if kind == "image"]
        self._add_records(rng, picture_record, talks, scenes)
        encoded = [
            self.chat.conversation(
                talk, [[medium]], system=_system(rng), text_first=rng.random() < 0.05
            )
            for talk in talks
        ]
        return collate(kind, encoded, [slot], self.chat, talks)

    def _album(self, rng: random.Random, turns: int) -> Batch:
        count, pictures = self.sizes.album, rng.choice((2, 2, 3))
        albums = [draw_album(rng, self.split, pictures) for _ in range(count)]
        media, slots = [], []
        for place in range(pictures):
            scenes = [album[place] for album in albums]
            medium, slot = picture_slot(rng, scenes, sizes_of_one_grid(rng, count))
            media.append(medium)
            slots.append(slot)
        stories = [story_labels([[scene.things[0] for scene in album]]) for album in albums]
        for place, slot in enumerate(slots):
            at = [
                torch.stack([getattr(story, name)[place] for story in stories])
                for name in ("order", "fresh", "count")
            ]
            slot.story = StoryLabels(*at)
        talks = self._album_talks(rng, albums, turns)
        encoded = [
            self.chat.conversation(
                talk, [media], system=_system(rng), text_first=rng.random() < 0.05
            )
            for talk in talks
        ]
        return collate("album", encoded, slots, self.chat, talks)

    def _video(self, rng: random.Random, turns: int) -> Batch:
        count = self.sizes.video
        clips = [self._clip(rng) for _ in range(count)]
        seconds = rng.choice((4, 5, 6, 6, 7, 8))
        while any(clip.seconds != seconds for clip in clips):
            clips = [clip if clip.seconds == seconds else self._clip(rng) for clip in clips]
        frames = [sampled_frames(clip) for clip in clips]
        sources = frame_sizes_of_one_grid(rng, count)
        size = frame_size(*sources[0], len(frames[0]))
        patches = []
        seconds_shown: list[list[Thing | None]] = []
        for clip, chosen, source in zip(clips, frames, sources, strict=True):
            pictures = render_clip(clip, chosen, *source)
            if rng.random() < 0.3:
                quality = rng.randint(30, 90)
                pictures = [through_jpeg(picture, quality) for picture in pictures]
            patches.append(patchify(resize(pictures, size)))
            shown = [visible(clip, frame) for frame in chosen[::2]]
            seconds_shown.append(shown if clip.unreadable is None else [None] * len(shown))
        rows, columns = size[0] // CELL, size[1] // CELL
        slot = Slot(
            noisy(rng, torch.cat(patches)),
            rows,
            columns,
            torch.empty(0, dtype=torch.int64),
            cell_labels(
                [[thing] if thing else [] for row in seconds_shown for thing in row], rows, columns
            ),
            story_labels(seconds_shown),
        )
        talks = self._clip_talks(rng, clips, turns)
        encoded = [
            self.chat.conversation(
                talk,
                [[Medium(rows, columns, stamps_of(chosen, clip.frame_rate))]],
                system=_system(rng),
                text_first=rng.random() < 0.05,
            )
            for talk, clip, chosen in zip(talks, clips, frames, strict=True)
        ]
        return collate("video", encoded, [slot], self.chat, talks)

    def _clip(self, rng: random.Random) -> Clip:
        return draw_clip(rng)

    def _clip_talks(
        self, rng: random.Random, clips: Sequence[Clip], turns: int
    ) -> list[list[Turn]]:
        talks = [clip_turns(rng, clip, turns) for clip in clips]
        self._add_records(rng, clip_record, talks, clips)
        return talks

    def _album_talks(
        self, rng: random.Random, albums: Sequence[Album], turns: int
    ) -> list[list[Turn]]:
        talks = [album_turns(rng, album, turns) for album in albums]
        self._add_records(rng, album_record, talks, albums)
        return talks

    def _text(self, rng: random.Random) -> Batch:
        talks = [small_talk_turns(rng) for _ in range(self.sizes.text)]
        self._add_records(rng, text_record, talks, [talk[0] for talk in talks])
        encoded = [self.chat.conversation(talk, [], system=_system(rng)) for talk in talks]
        return collate("text", encoded, [], self.chat, talks)

    def _add_records(
        self,
        rng: random.Random,
        make: Callable[[random.Random, Shown], Turn],
        talks: Sequence[list[Turn]],
        shown: Sequence[Shown],
    ) -> None:
        """Add a turn with a JSON answer to the start or end of some conversations."""
        for talk, each in zip(talks, shown, strict=False):
            if self.records and rng.random() < self.records:
                talk.insert(0, make(rng, each))
                talk.append(make(rng, each))


def _system(rng: random.Random) -> str | None:
    return rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.12 else None


def picture_slot(
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
    return Medium(rows, columns), Slot(noisy(rng, patchify(frames)), rows, columns, empty, labels)


def collate(
    kind: str,
    encoded: list[Encoded],
    slots: list[Slot],
    chat: ChatFormat,
    talks: Sequence[Sequence[Turn]],
) -> Batch:
    """Pad at the end, where no learned token attends."""
    longest = max((len(sequence.ids) for sequence in encoded), default=0)
    shape = (len(encoded), longest)
    # Equal tokens have equal keys, and a long row of them overflows in `_unit_inverse`.
    ids = np.broadcast_to(np.arange(longest) % PADDING, shape).astype(np.int64)
    targets = np.full(shape, IGNORE, np.int64)
    turns = np.full(shape, -1, np.int64)
    positions = np.zeros((3, *shape), np.int64)
    for i, sequence in enumerate(encoded):
        length = len(sequence.ids)
        ids[i, :length] = sequence.ids
        learned = np.array(sequence.learned[1:])
        targets[i, : length - 1] = np.where(learned >= 0, sequence.ids[1:], IGNORE)
        turns[i, : length - 1] = learned
        positions[:, i, :length] = np.array(sequence.positions).T
    for number, slot in enumerate(slots):
        places = [i * longest + place for i, s in enumerate(encoded) for place in s.media[number]]
        slot.places = torch.tensor(places, dtype=torch.int64)
    kinds = [[turn.kind for turn in talk] for talk in talks]
    return Batch(
        kind,
        torch.from_numpy(ids),
        torch.from_numpy(targets),
        torch.from_numpy(turns),
        torch.from_numpy(positions),
        slots,
        kinds,
    )
