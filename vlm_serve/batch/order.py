"""In which order requests find most of each other in the cache.

Requests with the same media stand together, those of one group in the order of their text, so that
shared prefixes are neighbours. The first of a group runs alone: the others find what it leaves.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

PREFIX_CHARACTERS = 512
KEY_CHARACTERS = 4096
_MEDIA = ("image_url", "video_url", "input_image", "input_video", "image", "video")


@dataclass(frozen=True, slots=True)
class Affinity:
    """What decides about a request's neighbours.

    Attributes:
        salt: its tenant; nothing is shared beyond it.
        media: digests of its media, in order.
        text: the start of what the prompt is made from, media as digests.
    """

    salt: str = ""
    media: tuple[str, ...] = ()
    text: str = ""

    @property
    def group(self) -> Hashable:
        """Equal for requests of which one should run first."""
        return self.salt, self.media, "" if self.media else self.text[:PREFIX_CHARACTERS]


def affinity_of(body: Any) -> Affinity:
    """The affinity of a request's body; of one that is malformed, some affinity."""
    if not isinstance(body, dict):
        return Affinity()
    media: list[str] = []
    prompt = [_digested(body.get(name), media) for name in ("tools", "system", "messages")]
    prompt += [_digested(body.get(name), media) for name in ("input", "prompt")]
    text = json.dumps([part for part in prompt if part is not None], ensure_ascii=False)
    salt = body.get("cache_salt")
    return Affinity(salt if isinstance(salt, str) else "", tuple(media), text[:KEY_CHARACTERS])


def _digested(value: Any, media: list[str]) -> Any:
    """The value with every medium replaced by a digest, which is added to `media`."""
    if isinstance(value, list):
        return [_digested(item, media) for item in value]
    if not isinstance(value, dict):
        return value
    found = {}
    for name, item in value.items():
        if name in _MEDIA and (isinstance(item, str) or (isinstance(item, dict) and "url" in item)):
            url = item if isinstance(item, str) else item["url"]
            digest = hashlib.blake2b(str(url).encode("utf-8", "replace"), digest_size=12)
            media.append(digest.hexdigest())
            found[name] = media[-1]
        else:
            found[name] = _digested(item, media)
    return found


def ordered(affinities: Sequence[Affinity]) -> list[int]:
    """Indices of the requests in the order to run them. Media rank by their first appearance."""
    ranks: dict[str, int] = {}
    for affinity in affinities:
        for digest in affinity.media:
            ranks.setdefault(digest, len(ranks))

    def key(index: int) -> tuple[str, tuple[int, ...], str, int]:
        each = affinities[index]
        return each.salt, tuple(ranks[digest] for digest in each.media), each.text, index

    return sorted(range(len(affinities)), key=key)


class Agenda:
    """Hands out requests: the first of a group before the group's others, which follow as soon as
    it has ended; other groups only while there is nothing of a group that has begun.

    Args:
        affinities: of all requests that are to run.
    """

    def __init__(self, affinities: Sequence[Affinity]) -> None:
        groups: dict[Hashable, list[int]] = {}
        for index in ordered(affinities):
            groups.setdefault(affinities[index].group, []).append(index)
        self._first = deque(members[0] for members in groups.values())
        self._rest = {members[0]: members[1:] for members in groups.values()}
        self._ready: deque[int] = deque()

    def take(self) -> int | None:
        """The next request to run; None if there is none before another one has ended."""
        if self._ready:
            return self._ready.popleft()
        return self._first.popleft() if self._first else None

    def ended(self, index: int) -> None:
        """A request has ended; what waited for it may run."""
        self._ready.extend(self._rest.pop(index, ()))
