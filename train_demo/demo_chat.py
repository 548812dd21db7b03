"""Conversations as token ids, identical to the output of chat template and processor."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from checkpoint_parts import CHAT_TEMPLATE, MediaShape, build_tokenizer, token_id
from demo_albums import album_turns, draw_album
from demo_clips import draw_clip
from demo_questions import pick, picture_turns
from demo_scenes import draw_scene
from demo_videos import clip_turns
from demo_words import MEDIA_HERE, NO_PICTURE, Turn, casual

VOCAB_SIZE = 1024
MERGE = 2
PATCH = 8
CELL = PATCH * MERGE
"""Pixels per token and side."""
VIDEO_CELLS = 16
"""Most tokens of one temporal patch."""
MEDIA = MediaShape(
    patch_size=PATCH,
    merge_size=MERGE,
    image_min_pixels=64 * 64,
    image_max_pixels=80 * 80,
    video_min_pixels=2048,
    video_max_pixels=16 * VIDEO_CELLS * CELL * CELL,
    frames_per_second=2.0,
    min_frames=4,
    max_frames=16,
)

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "Answer briefly.",
    "You answer questions about pictures and videos.",
    "You are a helpful assistant that looks at pictures.",
)
SMALL_TALK = (
    ("Hello!", "Hello! Ask me about a picture or a video."),
    ("Hi!", "Hello! Ask me about a picture or a video."),
    ("Who are you?", "I am the vlm-serve demo model."),
    ("What are you?", "I am the vlm-serve demo model."),
    ("What can you do?", "I answer questions about simple pictures and videos."),
    ("Thank you!", "You are welcome."),
    ("Thanks!", "You are welcome."),
)


def demo_template() -> str:
    """Return the chat template of a model without reasoning.

    Answers start at once. `enable_thinking` opens a thought; `preserve_thinking` keeps those of
    earlier turns.
    """
    template = CHAT_TEMPLATE
    for old, new in (
        (
            "{%- if loop.index0 > last.query -%}",
            "{%- if (loop.index0 > last.query or (preserve_thinking is defined and "
            "preserve_thinking)) and answer.thought -%}",
        ),
        (
            "    {{- '<|im_start|>assistant\\n<think>\\n' -}}\n"
            "    {%- if enable_thinking is defined and not enable_thinking -%}\n"
            "        {{- '\\n</think>\\n\\n' -}}\n",
            "    {{- '<|im_start|>assistant\\n' -}}\n"
            "    {%- if enable_thinking is defined and enable_thinking -%}\n"
            "        {{- '<think>\\n' -}}\n",
        ),
    ):
        if template.count(old) != 1:
            raise ValueError(f"the chat template no longer contains exactly one {old!r}")
        template = template.replace(old, new)
    return template


def training_text(count: int = 6000, seed: int = 0) -> Iterator[str]:
    """Return text like that of the conversations, for training the tokenizer."""
    rng = random.Random(seed)
    yield from SYSTEM_PROMPTS * 20
    for number in range(count):
        turns = picture_turns(rng, draw_scene(rng, "train"), 3)
        turns += album_turns(rng, draw_album(rng, "train", rng.randint(2, 3)), 2)
        turns += clip_turns(rng, draw_clip(rng), 2)
        for turn in turns:
            yield f"user\n{turn.question}\n"
            yield f"assistant\n{turn.answer}\n"
        yield f"system\n<{number % 100 / 10:.1f} seconds>"
        for pair in SMALL_TALK:
            yield from pair
        yield NO_PICTURE


def train_tokenizer() -> Tokenizer:
    """Train the tokenizer of both checkpoints; its bytes are reproducible."""
    return build_tokenizer(training_text(), VOCAB_SIZE)


@dataclass(frozen=True)
class Medium:
    """Size of an image or a video in tokens.

    `stamps` are a video's times in seconds, one per temporal patch; None for an image.
    """

    rows: int
    columns: int
    stamps: tuple[float, ...] | None = None


@dataclass
class Encoded:
    """Token ids, training mask, M-RoPE positions and places of media tokens."""

    ids: list[int] = field(default_factory=list)
    learned: list[int] = field(default_factory=list)
    """The turn whose answer a token belongs to and is learned for; -1 where it is not learned."""
    positions: list[tuple[int, int, int]] = field(default_factory=list)
    media: list[list[int]] = field(default_factory=list)
    next_position: int = 0


class ChatFormat:
    """Writes conversations with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.special = {
            name: token_id(tokenizer, f"<|{name}|>")
            for name in (
                "im_start",
                "im_end",
                "vision_start",
                "vision_end",
                "image_pad",
                "video_pad",
                "endoftext",
            )
        }
        special = set(self.special.values())
        self.plain = [i for i in range(tokenizer.get_vocab_size()) if i not in special]
        """All tokens of text."""
        self.encode_text = functools.lru_cache(maxsize=50_000)(self._encode_text)

    def _encode_text(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def conversation(
        self,
        turns: Sequence[Turn],
        media: Sequence[Sequence[Medium]],
        *,
        system: str | None = None,
        text_first: bool = False,
        open_end: bool = False,
    ) -> Encoded:
        """Encode a conversation; turn `turns[i]` shows `media[i]` with its question.

        `text_first` puts media after the text of their message; `open_end` omits the last answer,
        as a prompt does.
        """
        out = Encoded()
        if system is not None:
            self._message(out, "system", [system])
        for i, turn in enumerate(turns):
            shown = list(media[i]) if i < len(media) else []
            before, here, after = turn.question.partition(MEDIA_HERE)
            parts: list[str | Medium] = [before, *shown, after] if here else [turn.question]
            if not here:
                parts = [*parts, *shown] if text_first else [*shown, *parts]
            self._message(out, "user", parts)
            self.tokens(out, [self.special["im_start"], *self.encode_text("assistant\n")])
            if open_end and i == len(turns) - 1:
                return out
            for number, piece in enumerate(turn.pieces):
                learned = -1 if number in turn.given else i
                self.tokens(out, self.encode_text(piece), learned=learned)
            self.tokens(out, [self.special["im_end"]], learned=i)
            self.tokens(out, self.encode_text("\n"))
        return out

    def message(
        self, out: Encoded, role: str, ids: Sequence[int], *, open_end: bool = False
    ) -> None:
        """Append a message of these tokens; `open_end` leaves its end out."""
        self.tokens(out, [self.special["im_start"], *self.encode_text(f"{role}\n"), *ids])
        if not open_end:
            self.tokens(out, [self.special["im_end"], *self.encode_text("\n")])

    def _message(self, out: Encoded, role: str, parts: Sequence[str | Medium]) -> None:
        self.tokens(out, [self.special["im_start"]])
        pending = f"{role}\n"
        for part in parts:
            if isinstance(part, str):
                pending += part
                continue
            self.tokens(out, self.encode_text(pending) if pending else ())
            pending = ""
            self._medium(out, part)
        self.tokens(out, self.encode_text(pending) if pending else ())
        self.tokens(out, [self.special["im_end"], *self.encode_text("\n")])

    def _medium(self, out: Encoded, medium: Medium) -> None:
        start, end = [self.special["vision_start"]], [self.special["vision_end"]]
        self.tokens(out, start)
        places: list[int] = []
        if medium.stamps is None:
            places += self._grid(out, medium, self.special["image_pad"])
        else:
            for stamp in medium.stamps:
                self.tokens(out, self.encode_text(f"<{stamp:.1f} seconds>"))
                self.tokens(out, start)
                places += self._grid(out, medium, self.special["video_pad"])
                self.tokens(out, end)
        self.tokens(out, end)
        out.media.append(places)

    def _grid(self, out: Encoded, medium: Medium, token: int) -> list[int]:
        begin, base = len(out.ids), out.next_position
        count = medium.rows * medium.columns
        out.ids += [token] * count
        out.learned += [-1] * count
        out.positions += [
            (base, base + row, base + column)
            for row in range(medium.rows)
            for column in range(medium.columns)
        ]
        out.next_position = base + max(medium.rows, medium.columns)
        return list(range(begin, begin + count))

    def tokens(self, out: Encoded, ids: Sequence[int], *, learned: int = -1) -> None:
        """Append tokens of text."""
        out.ids += ids
        out.learned += [learned] * len(ids)
        start = out.next_position
        out.positions += [(i, i, i) for i in range(start, start + len(ids))]
        out.next_position = start + len(ids)


def small_talk_turns(rng: random.Random) -> list[Turn]:
    """Return a conversation without pictures."""
    turns = []
    for _ in range(rng.randint(2, 4)):
        if rng.random() < 0.5:
            question, answer = rng.choice(SMALL_TALK)
        else:
            question, answer = pick(rng, draw_scene(rng, "train")).question, NO_PICTURE
        turns.append(Turn("small talk", casual(rng, question), answer))
    return turns


def stamps_of(frames: Sequence[int], frame_rate: float) -> tuple[float, ...]:
    """Return the time of each temporal patch as in the processor: the mean of its two frames."""
    padded = [*frames, frames[-1]] if len(frames) % 2 else list(frames)
    times = [frame / frame_rate for frame in padded]
    return tuple((a + b) / 2 for a, b in zip(times[::2], times[1::2], strict=True))
