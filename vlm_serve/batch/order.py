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

from vlm_serve.preprocess.affinity_turns import Medium, Said, read_body
from vlm_serve.server.api.request_affinity import APIS

PREFIX_CHARACTERS = 512
KEY_CHARACTERS = 4096


@dataclass(frozen=True, slots=True)
class ReuseKey:
    """The parts of a request that others may share.

    Attributes:
        salt: its tenant; tenants share nothing.
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

    A malformed body has the key of its valid beginning.
    """
    salt = body.get("cache_salt") if isinstance(body, dict) else None
    media: list[str] = []
    texts: list[str] = []
    try:
        for part in _parts(read_body(APIS[path], body)):
            if isinstance(part, Medium):
                source = "".join(part.source).encode("utf-8", "replace")
                media.append(hashlib.blake2b(source, digest_size=12).hexdigest())
                texts.append(media[-1])
            else:
                texts.append(part)
    except Exception:  # a malformed body may raise anything; its route reports the error
        pass
    text = "\n".join(texts)[:KEY_CHARACTERS]
    return ReuseKey(salt if isinstance(salt, str) else "", tuple(media), text)


def _parts(prompt: Said) -> Iterator[str | Medium]:
    yield from prompt.front.values()
    if prompt.tokens is not None:
        yield " ".join(map(str, prompt.tokens))
    for role, parts in prompt.turns:
        yield role
        for part in parts:
            yield part if isinstance(part, str | Medium) else str(part)


def ordered(keys: Sequence[ReuseKey]) -> list[int]:
    """Sort requests by their keys and return their indices. Media rank by first appearance."""
    ranks: dict[str, int] = {}
    for each in keys:
        for digest in each.media:
            ranks.setdefault(digest, len(ranks))

    def rank(index: int) -> tuple[str, tuple[int, ...], str, int]:
        each = keys[index]
        return each.salt, tuple(ranks[digest] for digest in each.media), each.text, index

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
