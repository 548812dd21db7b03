"""Rows of prompt log-probabilities, stored with the KV of their tokens.

The row of a token holds its log-probability given everything before it, and the likelier tokens. It
belongs to the node of the token itself, not to the one before: two prompts that diverge at a token
share every row but that one. Rows are not part of a node's identity. A node created without them
gets them when its tokens are computed with log-probabilities.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vlm_serve.cache.candidates import LazyHeap
from vlm_serve.cache.records import Branch, Lease, LogprobRows, Node

if TYPE_CHECKING:
    from vlm_serve.preprocess.identity.keys import PromptKeys


def row_type(top: int) -> np.dtype[Any]:
    """Return the dtype of one token's row.

    Fields: `logprob` of the token itself (natural log, float32) and its `rank` (1: the likeliest);
    `ids` and `logprobs` of the `top` likeliest tokens, best first, the lower id first among equals.
    """
    return np.dtype(
        [
            ("logprob", np.float32),
            ("rank", np.int32),
            ("ids", np.int32, (top,)),
            ("logprobs", np.float32, (top,)),
        ]
    )


def top_of(rows: LogprobRows) -> int:
    """Return how many of the likeliest tokens each row names."""
    count: int = rows.dtype["ids"].shape[0]
    return count


def narrowed(rows: LogprobRows, top: int) -> LogprobRows:
    """Return a copy that names the `top` likeliest tokens; the rows name at least as many."""
    assert top <= top_of(rows), "what nobody computed cannot be told"
    copy = np.empty(len(rows), row_type(top))
    for name in ("logprob", "rank"):
        copy[name] = rows[name]
    for name in ("ids", "logprobs"):
        copy[name] = rows[name][:, :top]
    return copy


@dataclass(frozen=True, slots=True)
class WantedRows:
    """The rows that a request still needs of its prompt: those of the tokens from `first` (at least
    1) on, with the `top` likeliest tokens."""

    first: int
    top: int


@dataclass(frozen=True, slots=True)
class RowPiece:
    """Rows of the tokens from `start` on."""

    start: int
    rows: LogprobRows

    @property
    def end(self) -> int:
        return self.start + len(self.rows)


class RowKeeper:
    """The nodes that hold rows, within a byte limit. Rows of nodes pinned by a running request
    stay.

    Args:
        limit: most bytes of all rows.
        changed: called with each node that gained or lost rows.

    Attributes:
        num_bytes: of all rows.
        additions: number of times that a node was given rows.
        spare: unpinned nodes with rows, least recently used first. On one path the deepest comes
            first, because rows are useful only from the first one on.
    """

    def __init__(self, limit: int, changed: Callable[[Node], None]) -> None:
        self.limit = limit
        self._changed = changed
        self.num_bytes = 0
        self.additions = 0
        self.spare: LazyHeap[Node] = LazyHeap()

    def refresh(self, node: Node) -> None:
        """Add a node with rows to those that may lose them, or remove it."""
        if node.logprobs is not None and not node.pins:
            self.spare.push(node, (0, node.last_used, -node.end))
        else:
            self.spare.discard(node)

    def give(self, node: Node, rows: LogprobRows) -> None:
        """Store a copy of the rows, dropping other nodes' rows for space; do nothing if that is not
        enough."""
        kept = rows.copy()
        kept.flags.writeable = False
        self.spare.discard(node)
        old = sys.getsizeof(node.logprobs) if node.logprobs is not None else 0
        if self._make_room(sys.getsizeof(kept) - old):
            node.logprobs = kept
            self.num_bytes += sys.getsizeof(kept) - old
            self.additions += 1
            self._changed(node)
        self.refresh(node)

    def drop(self, node: Node) -> None:
        """Remove the rows of a node that has some."""
        assert node.logprobs is not None
        self.num_bytes -= sys.getsizeof(node.logprobs)
        node.logprobs = None
        self._changed(node)
        self.spare.discard(node)

    def _make_room(self, size: int) -> bool:
        while self.num_bytes + size > self.limit:
            least_used = self.spare.peek()
            if least_used is None:
                return False
            self.drop(least_used[1])
        return True


def kept_rows(
    root: Branch | None, path: list[Node], keys: PromptKeys, wanted: WantedRows
) -> tuple[RowPiece, ...]:
    """Return the stored ones of the wanted rows, from the first on and without a hole, in the
    wanted form.

    Args:
        root: of the prompt, if it has any node.
        path: the matched full nodes from the root on.
    """
    pieces: list[RowPiece] = []
    position, size = wanted.first, keys.block_size
    for index in range(position // size, len(path) + 1):
        branch = path[index - 1] if index else root
        node = _deepest_with_rows(path[index : index + 1], branch, keys, index, wanted.top)
        if node is None or node.end <= position:
            break
        assert node.logprobs is not None
        rows = node.logprobs[len(node.logprobs) - (node.end - position) :]
        pieces.append(RowPiece(position, narrowed(rows, wanted.top)))
        position = node.end
        if node.num_tokens < size:
            break
    return tuple(pieces)


def _deepest_with_rows(
    full: list[Node], branch: Branch | None, keys: PromptKeys, index: int, top: int
) -> Node | None:
    """Return the full node of a block if it has enough rows, else the longest of its tails that
    does."""
    if branch is None:
        return None
    start = index * keys.block_size
    first = bisect_right(keys.cuts, start)
    last = bisect_left(keys.cuts, start + keys.block_size)
    tails = [branch.children.get(keys.tails[cut]) for cut in reversed(keys.cuts[first:last])]
    for node in (*full, *tails):
        if node is not None and node.logprobs is not None and top_of(node.logprobs) >= top:
            return node
    return None


def keep(
    keeper: RowKeeper,
    root: Branch | None,
    lease: Lease,
    keys: PromptKeys,
    end: int,
    known: RowPiece,
) -> None:
    """Store a request's rows in the nodes that end in `(lease.length, end]` and have fewer. Call it
    after they are published and before the lease's length advances."""
    size = keys.block_size
    cuts = keys.cuts[bisect_right(keys.cuts, lease.length) : bisect_right(keys.cuts, end)]
    for cut in cuts:
        index = (cut - 1) // size
        first = max(1, index * size)
        if not known.start <= first < cut <= known.end:
            continue
        parent = lease.path[index - 1] if index else root
        assert parent is not None, "the nodes up to there are published"
        node = lease.path[index] if cut % size == 0 else parent.children.get(keys.tails[cut])
        if node is None:
            continue
        if node.logprobs is None or top_of(node.logprobs) < top_of(known.rows):
            keeper.give(node, known.rows[first - known.start : cut - known.start])


def check_rows(keeper: RowKeeper, nodes: list[Node]) -> None:
    """Raise AssertionError unless the accounting agrees with the nodes."""
    holders = [node for node in nodes if node.logprobs is not None]
    for node in holders:
        assert node.logprobs is not None
        count = node.num_tokens - (node.num_tokens == node.end)  # the first token has no row
        assert len(node.logprobs) == count, "logprob rows do not cover their node"
    num_bytes = sum(sys.getsizeof(node.logprobs) for node in holders)
    assert keeper.num_bytes == num_bytes <= keeper.limit, "bytes of logprob rows are wrong"
    spare = {id(node): priority for priority, node in keeper.spare.items().values()}
    expected = {id(node): node for node in holders if not node.pins}
    assert spare.keys() == expected.keys(), "candidates among logprob rows are wrong"
    assert len(keeper.spare) == len(spare), "count of candidates among logprob rows is wrong"
    for key, node in expected.items():
        assert spare[key][1] == node.last_used, "a use of logprob rows was not noted"
