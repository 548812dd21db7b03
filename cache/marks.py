"""Cut points that prompts have marked inside a block.

Tokens alone do not tell them, so a prompt without the mark asks here where others had one.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vlm_serve.preprocess.identity.keys import PromptKeys

MOST_MARKS = 16_384
"""Marked tails that are remembered, the most recently published ones."""


class _Place(NamedTuple):
    """The place of a mark: `rest` tokens into the block that follows `depth` blocks of a root."""

    root: bytes
    depth: int
    branch: bytes
    rest: int


class KnownMarks:
    """Marked tails by their keys. One outlives its node, because a lower tier may have it."""

    def __init__(self, most: int = MOST_MARKS) -> None:
        self._most = most
        self._tails: OrderedDict[bytes, _Place] = OrderedDict()
        self._depths: dict[bytes, Counter[int]] = {}
        self._rests: dict[bytes, Counter[int]] = {}

    def __len__(self) -> int:
        return len(self._tails)

    def clear(self) -> None:
        """Forget all of them."""
        for known in (self._tails, self._depths, self._rests):
            known.clear()

    def add(self, keys: PromptKeys, cut: int) -> None:
        """Remember a mark of a prompt, inside a block."""
        depth, rest = divmod(cut, keys.block_size)
        tail = keys.tail(cut)
        if tail not in self._tails:
            branch = keys.block_keys[depth - 1] if depth else keys.root
            self._tails[tail] = place = _Place(keys.root, depth, branch, rest)
            self._depths.setdefault(place.root, Counter())[depth] += 1
            self._rests.setdefault(branch, Counter())[rest] += 1
        self._tails.move_to_end(tail)
        if len(self._tails) > self._most:
            _, place = self._tails.popitem(last=False)
            _subtract(self._depths, place.root, place.depth)
            _subtract(self._rests, place.branch, place.rest)

    def beside(self, tail: bytes) -> tuple[bytes, set[int]] | None:
        """Return the key of the block that a marked tail follows, and the lengths of all known
        tails behind that block; None for a tail without a mark."""
        place = self._tails.get(tail)
        return None if place is None else (place.branch, set(self._rests[place.branch]))

    def cuts(self, keys: PromptKeys) -> list[int]:
        """Return the known marks before which a prompt has the same tokens and media."""
        size, found = keys.block_size, list[int]()
        for depth in self._depths.get(keys.root, ()):
            if depth > len(keys.block_keys):
                continue
            branch = keys.block_keys[depth - 1] if depth else keys.root
            places = (depth * size + rest for rest in self._rests.get(branch, ()))
            found += [cut for cut in places if cut <= len(keys) and keys.tail(cut) in self._tails]
        return found


def _subtract(counts: dict[bytes, Counter[int]], name: bytes, number: int) -> None:
    """Count one less; what has come down to nothing is dropped."""
    counts[name][number] -= 1
    if not counts[name][number]:
        del counts[name][number]
    if not counts[name]:
        del counts[name]
