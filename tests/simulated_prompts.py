"""What is asked in the simulation: histories that are shared, grow, and have media in them."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from functools import partial

from symbolic import END_OF_TURN, VOCABULARY, SymbolicMedia, make_prompt

from vlm_serve.preprocess.identity.keys import NO_ADAPTER, AdapterIdentity
from vlm_serve.preprocess.identity.prompt import Prompt


class Prompts:
    """Random prompts.

    Args:
        rng: what they follow from; others may draw from it in between.
        block_size, max_model_len: of the engine, in tokens.
    """

    def __init__(self, rng: random.Random, block_size: int, max_model_len: int) -> None:
        self._rng, self._block_size, self._max_model_len = rng, block_size, max_model_len
        # Without a draw of its own from the others' numbers, so that those stay as they were.
        self._marks = random.Random(str(rng.getstate()))
        self.adapter: Callable[[], AdapterIdentity] = lambda: NO_ADAPTER
        """Chooses the adapter of each prompt."""
        self._media = [self._new_media() for _ in range(4)]
        self._histories: list[list[tuple[int, ...] | SymbolicMedia]] = [
            [self._text(rng.randint(1, 3 * block_size))] for _ in range(3)
        ]
        self._asked: dict[int, list[tuple[int, ...] | SymbolicMedia]] = {}

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
        salt, adapter = rng.choice(["", "", "tenant"]), self.adapter()
        while True:
            prompt = self._marked(segments, salt, adapter)
            if 0 < len(prompt) <= limit:
                break
            segments = segments[:-1] or [self._text(1)]
        if rng.random() < 0.3:
            self._histories[rng.randrange(len(self._histories))] = segments
        elif rng.random() < 0.1:
            self._histories[rng.randrange(len(self._histories))] = [self._text(3)]
        self._asked[id(prompt)] = segments
        return prompt

    def answered(self, prompt: Prompt, answer: list[int], rng: random.Random) -> None:
        """What was asked has an answer: some ask on, in place of one of the histories."""
        segments = self._asked.pop(id(prompt))
        if answer and rng.random() < 0.5:
            turn = [*segments, tuple(answer)]
            self._histories[rng.randrange(len(self._histories))] = turn

    def burst(self, rng: random.Random) -> list[Prompt]:
        """Several askers at once: a new beginning that all share, behind which they part at two
        depths.

        Args:
            rng: what they follow from, so that other prompts stay the same without them.
        """
        size, limit = self._block_size, self._max_model_len - 1
        length = rng.randint(size, max(size, limit // 2))
        common: list[tuple[int, ...] | SymbolicMedia] = [
            tuple(rng.randrange(5, VOCABULARY) for _ in range(length))
        ]
        if rng.random() < 0.5:
            common.insert(rng.randint(0, 1), rng.choice(self._media))
        branches = [
            tuple(rng.randrange(5, VOCABULARY) for _ in range(rng.randint(1, limit // 3)))
            for _ in range(2)
        ]
        found = []
        for _ in range(rng.randint(2, 7)):
            branch = rng.choice([(), *branches])
            adapter = self.adapter()
            question = tuple(rng.randrange(5, VOCABULARY) for _ in range(rng.randint(1, 2 * size)))
            for segments in ([*common, branch, question], [*common, question], [question]):
                prompt = self._marked(segments, "", adapter)
                if len(prompt) <= limit:
                    found.append(prompt)
                    self._asked[id(prompt)] = [*segments]
                    break
        return found

    def _marked(
        self,
        segments: Sequence[tuple[int, ...] | SymbolicMedia],
        salt: str,
        adapter: AdapterIdentity,
    ) -> Prompt:
        """A prompt whose marks stand at ends of its segments, as an agent's, or anywhere. As the
        history grows they move."""
        make = partial(make_prompt, block_size=self._block_size, salt=salt, adapter=adapter)
        prompt, rng = make(segments), self._marks
        marks = set[int]()
        if len(prompt) and rng.random() < 0.5:
            ends = [len(make(segments[:count])) for count in range(1, len(segments) + 1)]
            marks.update(rng.sample(ends, min(len(ends), rng.randint(1, 2))))
        if len(prompt) and rng.random() < 0.2:
            marks.add(rng.randint(1, len(prompt)))
        return make(segments, marks=marks - {0}) if marks else prompt

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
