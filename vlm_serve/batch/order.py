"""Orders the requests of a batch to reuse the cache.

Requests with the same media run together, sorted by their text, so that shared prefixes are
neighbours. The first request of a group runs alone, and the others find its cache entries.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vlm_serve.preprocess.identity.affinity import front_of, turns_of
from vlm_serve.preprocess.reading.conversation import Conversation, MediaPart
from vlm_serve.preprocess.reading.reader import APIS, read_conversation

PREFIX_CHARACTERS = 512
KEY_CHARACTERS = 4096


@dataclass(frozen=True, slots=True)
class ReuseKey:
    """The parts of a request that others may share.

    Attributes:
        salt: its tenant and its model's name; others share nothing with it.
        media: digests of its media sources, in order.
        text: the beginning of its prompt, with media as digests.
    """

    salt: str = ""
    media: tuple[str, ...] = ()
    text: str = ""

    @property
    def group(self) -> Hashable:
        """Equal for requests of which one should run first."""
        return self.salt, self.media, "" if self.media else self.text[:PREFIX_CHARACTERS]


def reuse_key_of(path: str, body: Any) -> ReuseKey:
    """Compute the key of a request from its route and parsed body.

    A body that cannot be read shares nothing; its route reports the error.
    """
    media: list[str] = []
    texts: list[str] = []
    try:
        conversation = read_conversation(APIS[path], body)
        for part in _parts(conversation):
            if isinstance(part, MediaPart):
                source = "".join(part.texts).encode("utf-8", "replace")
                media.append(hashlib.blake2b(source, digest_size=12).hexdigest())
                texts.append(media[-1])
            else:
                texts.append(part)
    except Exception:  # a malformed body may raise anything
        return ReuseKey()
    salt, model = conversation.cache_salt, body.get("model")
    text = "\n".join(texts)[:KEY_CHARACTERS]
    names = [name if isinstance(name, str) else "" for name in (salt, model)]
    return ReuseKey("\n".join(names), tuple(media), text)


def _parts(conversation: Conversation) -> Iterator[str | MediaPart]:
    yield from front_of(conversation).values()
    for prompt in conversation.prompts or ():
        yield prompt if isinstance(prompt, str) else " ".join(map(str, prompt))
    for role, parts in turns_of(conversation):
        yield role
        for part in parts:
            yield part if isinstance(part, str | MediaPart) else str(part)


def ordered(keys: Sequence[ReuseKey]) -> list[int]:
    """Sort requests by their keys and return their indices. Media rank by first appearance."""
    ranks: dict[str, int] = {}
    for key in keys:
        for digest in key.media:
            ranks.setdefault(digest, len(ranks))

    def rank(index: int) -> tuple[str, tuple[int, ...], str, int]:
        key = keys[index]
        return key.salt, tuple(ranks[digest] for digest in key.media), key.text, index

    return sorted(range(len(keys)), key=rank)


class ReuseQueue:
    """Queue of requests: the first of each group, then the group's others once it has ended.

    A new group starts only while no started group has a request ready.

    Args:
        keys: of all requests to run.
    """

    def __init__(self, keys: Sequence[ReuseKey]) -> None:
        groups: dict[Hashable, list[int]] = {}
        for index in ordered(keys):
            groups.setdefault(keys[index].group, []).append(index)
        self._first = deque(members[0] for members in groups.values())
        self._rest = {members[0]: members[1:] for members in groups.values()}
        self._ready: deque[int] = deque()

    def take(self) -> int | None:
        """Take the next request; return None if all others wait for a running one."""
        if self._ready:
            return self._ready.popleft()
        return self._first.popleft() if self._first else None

    def ended(self, index: int) -> None:
        """Release the requests that waited for this one."""
        self._ready.extend(self._rest.pop(index, ()))
