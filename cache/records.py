"""The records that refer to each other: nodes, their blocks, snapshots and leases."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from vlm_serve.cache.node_table import NOBODY, UNPUBLISHED
from vlm_serve.cache.placement import Share

if TYPE_CHECKING:
    from vlm_serve.cache.placement import Planned

Rows = npt.NDArray[Any]
"""Routed expert rows `[tokens, layers, top_k]`."""
LogprobRows = npt.NDArray[Any]
"""Rows `[tokens]` of prompt log-probabilities, see `logprobs.row_type`."""
NO_MEDIA = -1


@dataclass(frozen=True, slots=True)
class MediaStart:
    """A media span that starts in a node.

    Attributes:
        offset: of its first token in the node's block.
        length: of the span in tokens; it may continue in further nodes.
        kind: "image" or "video".
        content_hash: of its content.
    """

    offset: int
    length: int
    kind: str
    content_hash: bytes


class Branch:
    """A root, or the part of a node that its children see.

    Attributes:
        key: the root key, or the node's chained 32-byte key.
        children: full nodes and tails by key. Keys cover the number of tokens, so the two kinds
            never collide.
        depth: blocks on the path from the root, this one included.
        end: position after the last token covered.
    """

    __slots__ = ("children", "depth", "end", "key")

    def __init__(self, key: bytes, depth: int, end: int) -> None:
        self.key = key
        self.children: dict[bytes, Node] = {}
        self.depth = depth
        self.end = end


class Node(Branch):
    """The KV of one block (or of a block's first tokens: a tail, always a leaf).

    Attributes:
        parent: the node before it, or the root.
        num_tokens: tokens covered; fewer than a block for a tail.
        block: the physical block that holds the KV rows.
        slot: its place in the columns of `table`, which hold the counters below.
        pins: running requests (and timed pins) that rely on the node.
        parked: suspended requests that rely on it.
        snapshot: the state at exactly `end`, if there is one.
        exact: the KV was computed by prefill alone, on an exact prefix.
        hits: requests that used the node.
        expected: waiting requests that are about to use it.
        last_used, credit: the counter and the policy's age at its last use.
        media_offset: offset in the block of the first media span that starts in it, or NO_MEDIA.
        media: all spans that start in it.
        packed_tokens: the ids of its tokens, four little-endian bytes each.
        inside_span: `end` lies strictly inside a media span: no snapshot belongs here.
        answered: number of its tokens that the model generated as part of an answer.
        experts: routed expert rows `[num_tokens, layers, top_k]`, if known.
        logprobs: a row for each token except the prompt's first one, if known.
        planned: plans of the node's first request; None: it came from a lower tier.
        ticket: of its entry among the nodes that may lose their log-probabilities.
    """

    __slots__ = (
        "answered",
        "block",
        "exact",
        "expected",
        "experts",
        "inside_span",
        "logprobs",
        "media",
        "media_offset",
        "num_tokens",
        "packed_tokens",
        "parent",
        "planned",
        "slot",
        "snapshot",
        "table",
        "ticket",
    )

    def __init__(self, key: bytes, parent: Branch, num_tokens: int, block: Block) -> None:
        super().__init__(key, parent.depth + 1, parent.end + num_tokens)
        self.parent = parent
        self.num_tokens = num_tokens
        self.block = block
        self.table = UNPUBLISHED
        self.slot = NOBODY
        self.snapshot: Snapshot | None = None
        self.exact = True
        self.expected = 0
        self.media_offset = NO_MEDIA
        self.media: tuple[MediaStart, ...] = ()
        self.packed_tokens = b""
        self.inside_span = False
        self.answered = 0
        self.experts: Rows | None = None
        self.logprobs: LogprobRows | None = None
        self.planned: Planned | None = None
        self.ticket = 0

    @property
    def pins(self) -> int:
        return self.table.pins.item(self.slot)

    @property
    def parked(self) -> int:
        return self.table.parked.item(self.slot)

    @property
    def hits(self) -> int:
        return self.table.hits.item(self.slot)

    @property
    def last_used(self) -> int:
        return self.table.last_used.item(self.slot)

    @property
    def credit(self) -> float:
        return self.table.credit.item(self.slot)


class Holds:
    """Holds of all blocks, a column each; see `Block`.

    Attributes:
        hard, soft: int32 `[blocks]`.
    """

    def __init__(self, num_blocks: int) -> None:
        self.hard = np.zeros(num_blocks, np.int32)
        self.soft = np.zeros(num_blocks, np.int32)


class Block:
    """One physical block.

    Running requests, suspended ones and several nodes may hold a block at once: a full node and the
    tails of the same tokens. All its nodes are siblings. Only a request that wrote a block, or
    shares it through its path, publishes nodes on it.

    Attributes:
        hard: holds of running requests, plus the pins of the nodes on this block.
        soft: holds and pins of suspended requests, which eviction may revoke.
        nodes: the trie nodes on this block.
        ticket: of its entry among the eviction candidates.
    """

    __slots__ = ("_holds", "id", "nodes", "ticket")

    def __init__(self, block_id: int, holds: Holds) -> None:
        self.id = block_id
        self._holds = holds
        self.nodes: tuple[Node, ...] = ()
        self.ticket = 0

    @property
    def hard(self) -> int:
        return self._holds.hard.item(self.id)

    @property
    def soft(self) -> int:
        return self._holds.soft.item(self.id)


class Snapshot:
    """The state at one position of a path. Immutable once READY.

    Attributes:
        row: the state row.
        position: tokens that the state contains.
        kind: why it was taken (see placement).
        node: the node to which it is attached; None while reserved and after its eviction.
        pins: requests about to read it.
        exact: computed by prefill alone, on an exact prefix.
        previous: the nearest snapshot before it on its path when it was attached.
        hits, last_used: as for nodes.
        asked: prompts admitted until its last use.
        expected: the uses expected of it: a number, or what is learned of its kind.
        heirs: what was expected of evicted snapshots behind it, until its next use: whoever would
            have asked for one of them starts here.
    """

    __slots__ = (
        "asked",
        "exact",
        "expected",
        "heirs",
        "hits",
        "kind",
        "last_used",
        "node",
        "pins",
        "position",
        "previous",
        "row",
    )

    def __init__(self, row: int, position: int, kind: str, expected: float | Share = 1.0) -> None:
        self.row = row
        self.position = position
        self.kind = kind
        self.expected = expected
        self.node: Node | None = None
        self.pins = 0
        self.exact = True
        self.previous: Snapshot | None = None
        self.hits = 0
        self.last_used = 0
        self.asked = 0
        self.heirs: Counter[Share] = Counter()

    @property
    def before(self) -> Snapshot | None:
        """The nearest shallower snapshot on its path that is still there."""
        before = self.previous
        while before is not None and before.node is None:
            before = before.previous
        self.previous = before
        return before

    @property
    def worth(self) -> float:
        """Tokens to recompute from the snapshot before it if this one were missing, times its uses:
        the past ones, those that are expected, and those of requests that wait for it."""
        before, node = self.before, self.node
        saved = self.position - (before.position if before is not None else 0)
        uses = self.hits + float(self.expected) + (node.expected if node is not None else 0)
        return saved * (uses + sum(count * float(share) for share, count in self.heirs.items()))

    def pass_on(self) -> Snapshot | None:
        """Expect what is expected of this snapshot of the one before it, and return that."""
        before = self.before
        if before is not None:
            before.heirs.update(self.heirs)
            if isinstance(self.expected, Share):
                before.heirs[self.expected] += 1
        return before


@dataclass(frozen=True, slots=True)
class Hit:
    """The result of a request's look-up in the cache.

    Attributes:
        key: of the deepest node that was used; empty if none was.
        prompt_tokens: length of the prompt.
        kv_boundary, state_boundary: as of its match.
        boundary: tokens taken from the cache.
        reason: why there were not more of them.
        root: key of the prompt's root.
        joined_tokens: the part of `boundary` that it waited for, while another request computed it.
        joined_ms: time of that wait, in milliseconds.
    """

    key: bytes
    prompt_tokens: int
    kv_boundary: int
    state_boundary: int
    boundary: int
    reason: str
    root: bytes
    joined_tokens: int = 0
    joined_ms: float = 0.0


class LeaseState(Enum):
    OPEN = "open"
    SUSPENDED = "suspended"
    CLOSED = "closed"


@dataclass(eq=False, slots=True)
class Lease:
    """Blocks, state row and pins of one request. Only the cache changes it; the engine reads it.

    Attributes:
        blocks: the block table: the blocks of the path, then own ones.
        row: live state row; -1 while it has none.
        src_row: row to read the initial state from: the snapshot's before the first commit, the
            live row from then on; -1: zero state.
        boundary: tokens that were cached when the lease was opened.
        length: tokens computed so far, cached ones included.
        prefilled: those of them without the ones from decode steps.
        shared_tokens: a multiple of the block size, possibly beyond `boundary`. The blocks below
            were full when the lease was opened: no KV is written there.
        exact: everything that this request reads was computed by prefill.
        copies: (source block, destination block, rows) to copy before the first step.
        committed: a step has succeeded since the lease was opened.
        private: nothing that it computes is ever published.
        old_path: nodes of its path that hold what other weights computed, since a change of them.
        moved: first entry of `blocks` that has been replaced since `PrefixCache.take_moved`:
            somebody else has published a block with the same tokens; None if none has.
        answered: number of tokens between the last block boundary and `boundary` that the model
            generated.
    """

    blocks: list[int] = field(default_factory=list)
    row: int = -1
    src_row: int = -1
    boundary: int = 0
    length: int = 0
    prefilled: int = 0
    shared_tokens: int = 0
    exact: bool = True
    copies: tuple[tuple[int, int, int], ...] = ()
    committed: bool = False
    private: bool = False
    old_path: int = 0
    moved: int | None = None
    answered: int = 0
    state: LeaseState = LeaseState.OPEN
    # The cache's own:
    num_shared: int = 0
    """Leading entries of `blocks` that the path's pins hold, one per node; it holds the others."""
    path: list[Node] = field(default_factory=list, repr=False)
    """The pinned full nodes from the root on."""
    tail: Node | None = field(default=None, repr=False)
    snapshot: Snapshot | None = field(default=None, repr=False)
    """The snapshot that the request starts from: pinned until the first commit."""
    copy_source: int = -1
    """The block from which a forked request copies its first rows, held until the first commit."""
    reserved: dict[int, Snapshot] = field(default_factory=dict, repr=False)
    """Reserved snapshots by position."""
    trailing: Snapshot | None = field(default=None, repr=False)
    """The reserved state of an answer's last block boundary. Decoding overwrites it at the next
    one; while its position is beyond `length`, that step is planned."""
    hit: Hit | None = field(default=None, repr=False)
    """The report to publish once the first step has succeeded."""
    pending_key: bytes | None = field(default=None, repr=False)
    """Key of the block that this request publishes next."""
    planned: Planned | None = field(default=None, repr=False)
    """Its request's plans, for later prompts parting from its path."""
    expert_seed: Rows | None = field(default=None, repr=False)
    """Expert rows between the last block boundary and `boundary`, where known."""
    expert_rows: list[Rows] | None = field(default=None, repr=False)
    """Expert rows of the block in progress, from its first token on; None: some are missing."""

    @property
    def own_blocks(self) -> list[int]:
        """Blocks that this request holds itself."""
        return self.blocks[self.num_shared :]

    @property
    def held_blocks(self) -> set[int]:
        """Every block that this request protects from eviction."""
        held = {*self.blocks, *((self.copy_source,) if self.copy_source >= 0 else ())}
        if self.tail is not None:
            held.add(self.tail.block.id)
        return held
