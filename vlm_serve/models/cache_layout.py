"""The memory of layers between steps: kinds of pools, their sizes, and the pools themselves.

A pool has one entry for every layer of its kind, in every KV block or in every state row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

import torch

from vlm_serve.kernels.large_pages import zeros

BLOCK_SIZE = -1
"""Placeholder for the block size in a pool's entry shape."""

Unit = Literal["block", "row", "update"]
Content = Literal["kv", "scales", "state", "inputs", "activations", "exact"]
Dtypes = Mapping[Content, torch.dtype]
"""The dtypes of pools by content. Pools whose content has no dtype do not exist."""


@dataclass(frozen=True, slots=True)
class Pool:
    """One kind of memory.

    Attributes:
        kind: the mixer's name for it; layers of one kind are alike.
        content: keys and values, their scales, a state that tokens are added to, the inputs of a
            convolution, activations, or float32 numbers that nothing may round.
        unit: the owner of an entry: a block of tokens, a sequence's state row, or a drafted token
            with a pending state update.
        entry: shape of one layer's.
        split: the dimension of the entry that tensor parallelism splits, None for none; if it is
            smaller than the number of ranks, each of them has one.
        swapped: a dimension of the entry stored behind the next one in a CPU's memory.
        heads: what follows one another in the dimension that is split: numbers of heads, and the
            size of each; every number is split by itself. Without them the dimension counts heads.
    """

    kind: str
    content: Content
    unit: Unit
    entry: tuple[int, ...]
    split: int | None
    swapped: int | None = None
    heads: tuple[tuple[int, int], ...] = ()

    def of_rank(self, ranks: int) -> Pool:
        """Return the pool of one of so many ranks."""
        if self.split is None:
            return self
        sizes = list(self.entry)
        heads = self.heads or ((sizes[self.split], 1),)
        sizes[self.split] = sum(max(1, count // ranks) * size for count, size in heads)
        return replace(self, entry=tuple(sizes))

    def shape(self, block_size: int) -> tuple[int, ...]:
        """Return the shape of an entry, with blocks of `block_size` tokens."""
        return tuple(block_size if size == BLOCK_SIZE else size for size in self.entry)


@dataclass(frozen=True)
class CacheLayout:
    """The pools of a model.

    Attributes:
        pools: every kind, and the number of its layers.
        places: for each layer its index among the layers of a kind, by kind.
    """

    pools: tuple[tuple[Pool, int], ...]
    places: tuple[Mapping[str, int], ...]

    @classmethod
    def of(cls, layers: Iterable[Sequence[Pool]], ranks: int = 1) -> CacheLayout:
        """Return the layout of layers with these pools, for one of `ranks` ranks."""
        kinds: dict[str, Pool] = {}
        counts: Counter[str] = Counter()
        places = []
        for pools in layers:
            place = {}
            for pool in pools:
                assert kinds.setdefault(pool.kind, pool) == pool, "layers of a kind are alike"
                place[pool.kind] = counts[pool.kind]
                counts[pool.kind] += 1
            places.append(place)
        shared = tuple((pool.of_rank(ranks), counts[kind]) for kind, pool in kinds.items())
        return cls(shared, tuple(places))

    @property
    def has_state(self) -> bool:
        """True if sequences have state rows."""
        return any(pool.unit == "row" for pool, _ in self.pools)

    def num_bytes(self, unit: Unit, dtypes: Dtypes, block_size: int = 0) -> int:
        """Return the size of one KV block, of one state row or of one update."""
        return sum(
            layers * prod(pool.shape(block_size)) * dtypes[pool.content].itemsize
            for pool, layers in self.pools
            if pool.unit == unit and pool.content in dtypes
        )

    def types(self, dtypes: Dtypes) -> str:
        """Return the names of all kinds of memory that outlives a step, with their dtypes."""
        kept = (pool for pool, _ in self.pools if pool.unit != "update" and pool.content in dtypes)
        names = (f"{pool.kind} {str(dtypes[pool.content]).split('.')[1]}" for pool in kept)
        return ", ".join(sorted(names))

    def allocate(
        self,
        num_blocks: int,
        num_rows: int,
        block_size: int,
        dtypes: Dtypes,
        device: torch.device | str = "cpu",
        *,
        num_updates: int = 0,
    ) -> CacheTensors:
        """Allocate the pools. Untouched pages of a CPU pool cost no memory until they are
        written."""
        counts = {"block": num_blocks, "row": num_rows, "update": num_updates}
        tensors = {
            pool.kind: _room(
                (counts[pool.unit], layers, *pool.shape(block_size)),
                dtypes[pool.content],
                torch.device(device),
                pool.swapped,
            )
            for pool, layers in self.pools
            if pool.content in dtypes
        }
        return CacheTensors(
            self,
            tensors,
            num_blocks,
            num_rows if self.has_state else 0,
            block_size,
            torch.device(device),
            num_updates,
        )


def _room(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, swapped: int | None
) -> torch.Tensor:
    """Allocate a tensor of a shape; on a CPU dimension `swapped` of the entries and the next one
    are exchanged in memory."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    if swapped is None:
        return zeros(*shape, dtype=dtype)
    sizes, at = list(shape), 2 + swapped
    sizes[at], sizes[at + 1] = sizes[at + 1], sizes[at]
    return zeros(*sizes, dtype=dtype).transpose(at, at + 1)


@dataclass(frozen=True, eq=False)
class CacheTensors:
    """The pools that a forward reads and writes.

    Attributes:
        layout: the kinds of pools.
        tensors: by kind, `[num_blocks, num_rows or num_updates, layers, *entry]`; the `pools` of
            each mixer say what its entries are.
        num_rows: 0 without state layers.
        num_updates: entries for drafted tokens; 0 without drafts.
        device: of all of them.
    """

    layout: CacheLayout
    tensors: Mapping[str, torch.Tensor]
    num_blocks: int
    num_rows: int
    block_size: int
    device: torch.device
    num_updates: int = 0

    def __getitem__(self, kind: str) -> torch.Tensor:
        return self.tensors[kind]

    def of_unit(self, unit: Unit) -> tuple[torch.Tensor, ...]:
        """Return all pools with one entry per such unit."""
        pools = self.layout.pools
        kinds = [pool.kind for pool, _ in pools if pool.unit == unit and pool.kind in self.tensors]
        return tuple(self.tensors[kind] for kind in kinds)

    def of_layer(self, index: int) -> dict[str, torch.Tensor]:
        """Return a layer's part of each of its pools, `[num_blocks or num_rows, *entry]`."""
        places = self.layout.places[index]
        return {
            kind: self[kind][:, place] for kind, place in places.items() if kind in self.tensors
        }
