"""Map from affinity keys to cached prefixes, for routers.

The engine's thread records the node at which each key of a request ends. Readers look the nodes up
in the mirror: evicted nodes are not reported, and readers do not wait for the engine.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from vlm_serve.cache.matching import key_at
from vlm_serve.engine.features.mirror import TreeMirror
from vlm_serve.engine.requests.sequence import SequenceGroup
from vlm_serve.preprocess.identity.affinity import AffinityDigest, AffinityKey, place_of
from vlm_serve.preprocess.identity.keys import PromptKeys

MAX_NOTED_KEYS = 16_384
MAX_DIGEST_ENTRIES = 4096
_SLACK = 16
"""A position may be estimated too low by a sixteenth of the tokens before it, or by a block."""


class PromptPlaces(Protocol):
    """Positions in a prompt; implemented by `Prompt`."""

    def __len__(self) -> int: ...
    @property
    def keys(self) -> PromptKeys: ...
    @property
    def media_ends(self) -> Sequence[int]: ...


class AffinityMap:
    """Maps each affinity key to the deepest node from which a request with this key can continue.

    Holds at most MAX_NOTED_KEYS keys; the least recently used are dropped. `note` belongs to the
    engine's thread, `digest` is thread-safe.

    Args:
        mirror: mirror of the cache's tree.
        has_state: if True, only nodes with a state count.
    """

    def __init__(self, mirror: TreeMirror, *, has_state: bool) -> None:
        self._mirror = mirror
        self._has_state = has_state
        self._nodes: OrderedDict[AffinityKey, bytes] = OrderedDict()
        self._lock = threading.Lock()
        self._notes = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def on_renewed(self) -> None:
        """Forget all nodes: requests are not sent here for what other weights have computed."""
        with self._lock:
            self._notes += 1
            self._nodes.clear()

    def on_answering(self, group: SequenceGroup) -> None:
        """Record a request whose prompt has been computed."""
        if group.report is not None:
            request = group.request
            self.note(request.affinity, request.prompt, group.report.snapshots)

    def note(
        self, affinity: Sequence[AffinityKey], prompt: PromptPlaces, states: Sequence[int]
    ) -> None:
        """Record a request whose prompt has been computed.

        If several keys end at one node, only the shortest is stored: requests with a longer one
        have it too.

        Args:
            affinity: the request's keys, longest prefix first.
            prompt: its prompt.
            states: positions with a state now, ascending.
        """
        keys = prompt.keys
        size = keys.block_size
        ends = states if self._has_state else range(size, len(prompt) + 1, size)
        noted: dict[int, AffinityKey] = {}
        places = reversed(_places(affinity, prompt))
        for key, most in zip(reversed(affinity), places, strict=True):
            index = bisect_right(ends, most)
            if index:
                noted.setdefault(ends[index - 1], key)
        with self._lock:
            self._notes += 1
            for end, key in noted.items():
                self._nodes[key] = key_at(keys, end)
                self._nodes.move_to_end(key)
            while len(self._nodes) > MAX_NOTED_KEYS:
                self._nodes.popitem(last=False)

    def digest(self, most: int = MAX_DIGEST_ENTRIES) -> AffinityDigest:
        """Return the keys whose nodes are cached now, at most `most`."""
        with self._lock:
            noted, version = list(self._nodes.items()), self._notes + self._mirror.sequence
        entries, gone = list[tuple[AffinityKey, int]](), list[tuple[AffinityKey, bytes]]()
        for key, node_key in reversed(noted):
            entry = self._mirror.find(node_key)
            if entry is None or (self._has_state and entry.node.snapshot is None):
                gone.append((key, node_key))
            elif len(entries) < most:
                entries.append((key, entry.node.end))
        with self._lock:
            for key, node_key in gone:
                if self._nodes.get(key) == node_key:
                    del self._nodes[key]
        return AffinityDigest(version, tuple(entries))


def _places(affinity: Sequence[AffinityKey], prompt: PromptPlaces) -> list[int]:
    """Estimate where each key's prefix ends, in tokens. The estimate errs towards deeper positions,
    but never exceeds the start of the next medium.

    Text is assumed to have the same number of bytes per token everywhere.
    """
    places = [place_of(key) for key in affinity]
    if not places or places[0].media != len(prompt.media_ends):
        return [0] * len(places)  # parts of the conversation were left out
    media_ends = [0, *prompt.media_ends]
    starts = [*_media_starts(prompt), len(prompt)]
    sizes = [end - start for start, end in zip(starts, prompt.media_ends, strict=False)]
    text = len(prompt) - sum(sizes)
    share = text / max(1, places[0].text_bytes)
    guesses = []
    for place in places:
        guess = int(place.text_bytes * share) + sum(sizes[: place.media])
        guess += max(prompt.keys.block_size, guess // _SLACK)
        guesses.append(min(max(guess, media_ends[place.media]), starts[place.media]))
    return guesses


def _media_starts(prompt: PromptPlaces) -> list[int]:
    """Return the start of each medium's first span."""
    starts: list[int] = []
    for start, end in prompt.keys.span_bounds:
        if len(starts) < len(prompt.media_ends) and (
            not starts or end > prompt.media_ends[len(starts) - 1]
        ):
            starts.append(start)
    return starts
