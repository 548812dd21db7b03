"""What is asked in the simulation: histories that are shared, grow, and have media in them."""

from __future__ import annotations

import hashlib
import random

from symbolic import END_OF_TURN, VOCABULARY, SymbolicMedia, make_prompt

from vlm_serve.preprocess.prompt import Prompt


class Prompts:
    """Random prompts.

    Args:
        rng: what they follow from; others may draw from it in between.
        block_size, max_model_len: of the engine, in tokens.
    """

    def __init__(self, rng: random.Random, block_size: int, max_model_len: int) -> None:
        self._rng, self._block_size, self._max_model_len = rng, block_size, max_model_len
        self._media = [self._new_media() for _ in range(4)]
        self._histories: list[list[tuple[int, ...] | SymbolicMedia]] = [
            [self._text(rng.randint(1, 3 * block_size))] for _ in range(3)
        ]

    def take(self) -> Prompt:
        """A known history, sometimes grown by media and text, under one of two tenants."""
        rng = self._rng
        limit = self._max_model_len - 1
        history = rng.choice(self._histories)
        segments = [*history]
        if rng.random() < 0.5:
            segments.append(rng.choice(self._media))
        if rng.random() < 0.8:
            segments.append(self._text(rng.randint(1, 2 * self._block_size)))
        if rng.random() < 0.2:
            self._media[rng.randrange(len(self._media))] = self._grown(rng.choice(self._media))
        salt = rng.choice(["", "", "tenant"])
        while True:
            prompt = make_prompt(segments, block_size=self._block_size, salt=salt)
            if 0 < len(prompt) <= limit:
                break
            segments = segments[:-1] or [self._text(1)]
        if rng.random() < 0.3:
            self._histories[rng.randrange(len(self._histories))] = segments
        elif rng.random() < 0.1:
            self._histories[rng.randrange(len(self._histories))] = [self._text(3)]
        return prompt

    def _text(self, length: int) -> tuple[int, ...]:
        return tuple(
            END_OF_TURN if self._rng.random() < 0.1 else self._rng.randrange(5, VOCABULARY)
            for _ in range(length)
        )

    def _new_media(self) -> SymbolicMedia:
        patches = self._rng.choice([1, 1, 2, 3])
        hashes = tuple(self._content() for _ in range(patches))
        return SymbolicMedia("video" if patches > 1 else "image", (patches, 2, 2), True, hashes)

    def _grown(self, media: SymbolicMedia) -> SymbolicMedia:
        """A video extended by a frame pair, or a new medium."""
        if media.modality == "image" or len(media.hashes) > 4 or self._rng.random() < 0.3:
            return self._new_media()
        hashes = (*media.hashes, self._content())
        return SymbolicMedia("video", (len(hashes), 2, 2), True, hashes)

    def _content(self) -> bytes:
        return hashlib.sha256(bytes([self._rng.randrange(30)])).digest()
