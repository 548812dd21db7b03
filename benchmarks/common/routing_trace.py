"""A seeded trace of questions about images and videos, for routers: no model, no pixels.

64 users ask about 200 media. Which medium a new conversation is about follows Zipf's law with
exponent 1, and which media are popular drifts. All share one system prompt; many questions go on
with an earlier conversation. Prompts have real prefix keys, requests real affinity keys.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from vlm_serve.preprocess.identity.affinity import affinity_keys_of_body
from vlm_serve.preprocess.identity.keys import PromptKeys

USERS, MEDIA, VIDEO_SHARE = 64, 200, 0.3
BLOCK_SIZE = 64
END_OF_TURN, PAD = 2, 3
SYSTEM_TOKENS, MAX_TURNS, GO_ON = 400, 5, 0.5
REQUESTS_PER_DRIFT = 25
"""After so many requests one medium takes another one's place in the order of popularity."""


@dataclass(frozen=True)
class Span:
    """See `MediaSpan`."""

    start: int
    end: int
    modality: str
    content_hash: bytes
    patch: int


@dataclass(frozen=True)
class Marks:
    """What a prompt says of itself; see `Prompt`."""

    keys: PromptKeys
    media_ends: tuple[int, ...]
    message_ends: tuple[int, ...]
    system_end: int
    stable_end: int

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True)
class Question:
    """One request.

    Attributes:
        time: seconds at which it comes.
        prompt: what the cache sees of it.
        answer: the tokens that answer it.
        affinity: its affinity keys.
        messages: of the chat, as a client sends it.
        medium: which of the media its conversation is about.
    """

    time: float
    prompt: Marks
    answer: tuple[int, ...]
    affinity: tuple[bytes, ...]
    messages: tuple[dict[str, Any], ...]
    medium: int


@dataclass
class Conversation:
    """What has been said between a user and the model so far."""

    medium: int
    ids: list[int]
    spans: list[Span] = field(default_factory=list)
    media_ends: list[int] = field(default_factory=list)
    message_ends: list[int] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    turns: int = 0


class Trace:
    """Makes the requests.

    Args:
        seed: the same seed gives the same trace.
        rate: requests a second.
        hot: share of the conversations that are about one medium, besides all others.
        scale: times as many users and media.
    """

    model = "model"

    def __init__(self, seed: int, rate: float, hot: float = 0.0, scale: float = 1) -> None:
        self._rng = random.Random(seed)
        self._rate = rate
        self._hot = hot
        media = int(MEDIA * scale)
        self._media = [self._new_medium(number) for number in range(media)]
        self._order = list(range(media))
        self._rng.shuffle(self._order)
        self._weights = list(accumulate(1 / rank for rank in range(1, media + 1)))
        self._system = self._words(SYSTEM_TOKENS)
        self._open: dict[int, Conversation] = {}
        self._users = int(USERS * scale)

    @property
    def media_tokens(self) -> int:
        """Of all media together."""
        return sum(size * patches for size, patches, _, _ in self._media)

    def requests(self, count: int) -> Iterator[Question]:
        now = 0.0
        for number in range(count):
            now += self._rng.expovariate(self._rate)
            if number % REQUESTS_PER_DRIFT == 0:
                moved = self._order.pop(self._rng.randrange(len(self._order)))
                self._order.insert(self._rng.randrange(len(self._order) + 1), moved)
            yield self._ask(self._rng.randrange(self._users), now)

    def _ask(self, user: int, now: float) -> Question:
        said = self._open.get(user)
        if said is None or said.turns == MAX_TURNS or self._rng.random() > GO_ON:
            said = self._open[user] = self._begin()
        question = self._words(self._rng.randint(8, 60))
        content: Any = [{"type": "text", "text": question[0]}]
        said.ids += [10, 11]
        if not said.turns:
            content.insert(0, self._see(said))
        said.messages.append({"role": "user", "content": content})
        said.ids += [*question[1], END_OF_TURN]
        said.message_ends.append(len(said.ids))
        stable = len(said.ids)
        said.ids += [12, 13]
        body = {"messages": said.messages}
        affinity = affinity_keys_of_body("chat", body, salt="", model=self.model)
        keys = PromptKeys(
            bytes(32),
            said.ids,
            block_size=BLOCK_SIZE,
            spans=tuple(said.spans),
            end_of_turn_ids={END_OF_TURN},
        )
        marks = Marks(
            keys, tuple(said.media_ends), tuple(said.message_ends), said.message_ends[0], stable
        )
        answer = self._words(self._rng.randint(16, 64))
        said.ids += [*answer[1], END_OF_TURN]
        said.message_ends.append(len(said.ids))
        said.messages.append({"role": "assistant", "content": answer[0]})
        said.turns += 1
        said_so_far, ids = tuple(said.messages[:-1]), (*answer[1], END_OF_TURN)
        return Question(now, marks, ids, affinity, said_so_far, said.medium)

    def _begin(self) -> Conversation:
        medium = 0
        if self._rng.random() >= self._hot:
            (medium,) = self._rng.choices(self._order, cum_weights=self._weights)
        said = Conversation(medium, [10, *self._system[1], END_OF_TURN])
        said.message_ends.append(len(said.ids))
        said.messages.append({"role": "system", "content": self._system[0]})
        return said

    def _see(self, said: Conversation) -> dict[str, Any]:
        """The conversation's medium is shown."""
        size, patches, url, digest = self._media[said.medium]
        kind = "video" if patches > 1 else "image"
        for patch in range(patches):
            start = len(said.ids) + 1
            said.spans.append(Span(start, start + size, kind, digest, patch))
            said.ids += [14, *[PAD] * size]
        said.media_ends.append(len(said.ids))
        return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}

    def _new_medium(self, number: int) -> tuple[int, int, str, bytes]:
        """(tokens of a span, spans, URL, content hash). How many bytes an image has says little of
        how many tokens it is."""
        rng = self._rng
        digest = number.to_bytes(32, "little")
        if rng.random() < VIDEO_SHARE:
            return 192, rng.randint(8, 24), f"data:;base64,{rng.randbytes(30_000).hex()}", digest
        size = rng.randint(256, 1536)
        num_bytes = int(size * 270 * rng.lognormvariate(0.0, 0.5))
        return size, 1, f"data:;base64,{rng.randbytes(num_bytes // 2).hex()}", digest

    def _words(self, count: int) -> tuple[str, list[int]]:
        """Random text, and its tokens."""
        words = [f"{self._rng.randrange(100, 10_000)} " for _ in range(count)]
        return "".join(words), [int(word) for word in words]
