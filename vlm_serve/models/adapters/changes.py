"""An adapter's changes of a model's projections: its modules' factors, stacked by projection.

A host holds factors once: those that a change holds whole are views of it. On a GPU, routed experts
with weights in one piece are changed together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import accumulate

import torch

from vlm_serve.kernels.linear import Linear, Part, Shard
from vlm_serve.kernels.linear.low_rank import AdapterChanges
from vlm_serve.kernels.linear.low_rank_factors import LowRankChange, Up
from vlm_serve.kernels.linear.packed import PANEL

GATE_UP, DOWN = "gate_up_proj", "down_proj"
_PROJECTIONS = {"w1": "gate_proj", "w3": "up_proj", "w2": DOWN}
"""Other names of an expert's projections in checkpoints; classes of transformers join them all
under one name."""
_PREFIXES = (
    *("model.language_model.", "language_model.model.", "model.", "language_model."),
    "backbone.",
)
_TIED, _HEAD = "embed_tokens", "lm_head"


@dataclass(frozen=True, slots=True)
class LowRank:
    """The change of one module's weight: `scale * up @ down`.

    Attributes:
        down: A, `[rank, in]`.
        up: B, `[out, rank]`.
        scale: alpha over the rank, or over its root.
    """

    down: torch.Tensor
    up: torch.Tensor
    scale: float

    @property
    def rank(self) -> int:
        """Rows of A."""
        return int(self.down.shape[0])

    @property
    def nbytes(self) -> int:
        """Bytes of both factors."""
        return self.down.nbytes + self.up.nbytes

    @property
    def layout_bytes(self) -> int:
        """Bytes of both factors as compiled code takes them, about: A in panels of 32 rows, B in
        float32."""
        panels = -(-self.rank // PANEL)
        return panels * PANEL * self.down.shape[1] * self.down.itemsize + 4 * self.up.numel()


def changes_of(named: Mapping[str, LowRank], modules: Modules) -> AdapterChanges:
    """Return what an adapter's modules, which fit, change in a model or in a rank's share of it."""
    downs: _Downs = {}
    changes = {
        number: (
            _stacked_change(rows, modules.stacked[number], named)
            if number in modules.stacked
            else _change(rows, named, downs)
        )
        for number, (rows, _) in enumerate(modules.sites, 1)
        if any(part.module in named for part in rows)
    }
    return AdapterChanges(changes, len(modules.sites), tower=any(map(is_vision, named)))


def without_effect(
    modules: Modules, experts: Collection[str] = (), room: Sequence[int] = ()
) -> AdapterChanges:
    """Return an adapter of rank 1 that adds zeros to every module; of routed experts only to those
    in one piece, and to their projections `experts`. `room`: see `AdapterChanges`."""
    return uniform(modules, 1, lambda rows, columns: torch.zeros(rows, columns), experts, room)


def uniform(
    modules: Modules,
    rank: int,
    factor: Callable[[int, int], torch.Tensor],
    experts: Collection[str] = (),
    room: Sequence[int] = (),
) -> AdapterChanges:
    """Return an adapter of one rank, with factors of the sizes that `factor` gets.

    Args:
        modules: of the model; it changes all but routed experts.
        rank: of each module.
        factor: returns `[rows, columns]`.
        experts: projections of routed experts in one piece that it changes too, all experts alike.
        room: see `AdapterChanges`.
    """
    named = {
        name: LowRank(factor(rank, depth), factor(out, rank), 1.0)
        for name, (out, depth) in modules.sizes.items()
    }
    changes = changes_of(named, modules)
    stacked = {
        number: _stacked_alike(modules.sites[number - 1][0], count, rank, factor)
        for number, count in modules.stacked.items()
        if kind_of(modules.sites[number - 1][0][0].module) in experts
    }
    by_site = {**changes.by_site, **stacked}
    return AdapterChanges(by_site, len(modules.sites), tower=changes.tower, room=room)


_Downs = dict[tuple[object, ...], torch.Tensor]
"""Factors A of changes, by what they are made of."""


def _change(
    rows: tuple[ModuleRows, ...], named: Mapping[str, LowRank], known: _Downs
) -> LowRankChange:
    """Return an adapter's change of a projection of several parts; a module's parts share u.

    `known`: of other projections. Gate and up of an expert may have one A.
    """
    offsets: dict[str, int] = {}
    downs, scales, ups = list[torch.Tensor](), list[torch.Tensor](), list[Up]()
    first = width = 0
    for part in rows:
        change = named.get(part.module)
        if change is not None:
            if part.module not in offsets:
                offsets[part.module] = width
                width += change.rank
                downs.append(change.down[:, part.columns.start : part.columns.stop])
                scales.append(torch.full((change.rank,), change.scale))
            ups.append(Up(first, offsets[part.module], part.of(change.up)))
        first += part.count
    made_of = tuple((down.data_ptr(), down.shape, down.stride()) for down in downs)
    if made_of not in known:
        known[made_of] = torch.cat(downs)
    return LowRankChange(known[made_of], torch.cat(scales), tuple(ups))


def _stacked_change(
    rows: Sequence[ModuleRows], count: int, named: Mapping[str, LowRank]
) -> LowRankChange:
    """Return the changes of all experts of a weight.

    Args:
        rows: parts of every expert: gate and up, or down.
        count: number of experts.
        named: an adapter's modules; at least one is changed.
    """
    parts = len(rows) // count
    experts = [rows[first : first + parts] for first in range(0, len(rows), parts)]
    changed = [expert for expert in experts if any(part.module in named for part in expert)]
    expert_changes = [[named.get(part.module) for part in expert] for expert in changed]
    ranks = [
        max(0 if change is None else change.rank for change in alternatives)
        for alternatives in zip(*expert_changes, strict=True)
    ]
    shared = parts == 2 and all(_share(gate, up) for gate, up in expert_changes)
    offsets = [0] * parts if shared else [0, *accumulate(ranks)][:parts]
    kinds = [
        change.down.dtype for expert in expert_changes for change in expert if change is not None
    ]
    dtype, columns = reduce(torch.promote_types, kinds), rows[0].columns
    width = max(first + rank for first, rank in zip(offsets, ranks, strict=True))
    down = torch.zeros(len(changed), width, len(columns), dtype=dtype)
    scales = torch.zeros(len(changed), width)
    sizes = [part.count for part in experts[0]]
    values = [
        torch.zeros(len(changed), size, rank, dtype=dtype)
        for size, rank in zip(sizes, ranks, strict=True)
    ]
    for place, (places, changes) in enumerate(zip(changed, expert_changes, strict=True)):
        for part, (rows_part, change) in enumerate(zip(places, changes, strict=True)):
            if change is None:
                continue
            mine = slice(offsets[part], offsets[part] + change.rank)
            down[place, mine] = change.down[:, columns.start : columns.stop].to(dtype)
            scales[place, mine] = change.scale
            values[part][place, :, : change.rank] = rows_part.of(change.up).to(dtype)
    firsts = [0, *accumulate(sizes)]
    ups = tuple(Up(*fields) for fields in zip(firsts, offsets, values, strict=False))
    return LowRankChange(down, scales, ups, _places(experts, named))


def _stacked_alike(
    rows: Sequence[ModuleRows], count: int, rank: int, factor: Callable[[int, int], torch.Tensor]
) -> LowRankChange:
    """Return changes that all experts share, in the memory of one expert's; see `uniform`."""
    first_expert = rows[: len(rows) // count]
    sizes = [part.count for part in first_expert]
    firsts = [0, *accumulate(sizes)]
    ups = tuple(
        Up(first, 0, factor(size, rank).unsqueeze(0))
        for first, size in zip(firsts, sizes, strict=False)
    )
    down = factor(rank, len(rows[0].columns)).unsqueeze(0)
    return LowRankChange(down, torch.ones(1, rank), ups, torch.zeros(count, dtype=torch.int32))


def _share(gate: LowRank | None, up: LowRank | None) -> bool:
    """Return True if gate and up have the same A, as experts in one tensor do."""
    if gate is None or up is None:
        return False
    same = gate.down.data_ptr() == up.down.data_ptr() and gate.down.shape == up.down.shape
    return same and gate.scale == up.scale


def _places(experts: Sequence[Sequence[ModuleRows]], named: Mapping[str, LowRank]) -> torch.Tensor:
    changed = [any(part.module in named for part in expert) for expert in experts]
    places = torch.tensor(changed, dtype=torch.int32).cumsum(0, dtype=torch.int32) - 1
    places[~torch.tensor(changed)] = -1
    return places


def shared(
    named: Mapping[str, LowRank], modules: Modules, changes: AdapterChanges
) -> dict[str, LowRank]:
    """Return an adapter's modules. A factor that a change holds whole is a view of that."""
    views = dict(named)
    for number, change in changes.by_site.items():
        for module, down, up in _factors(modules.sites[number - 1][0], change, named):
            factors = views[module]
            views[module] = LowRank(_same(down, factors.down), _same(up, factors.up), factors.scale)
    return views


def to_send(named: Mapping[str, LowRank]) -> dict[str, LowRank]:
    """Return an adapter's modules with factors in memory of their own. A pickle of a view has all
    that its memory holds. Modules with one factor share it still."""
    alone: dict[tuple[object, ...], torch.Tensor] = {}

    def alone_of(factor: torch.Tensor) -> torch.Tensor:
        key = factor.data_ptr(), factor.shape, factor.stride(), factor.dtype
        if key not in alone:
            whole = factor.untyped_storage().nbytes() == factor.nbytes
            alone[key] = factor if whole else factor.clone()
        return alone[key]

    return {
        name: LowRank(alone_of(change.down), alone_of(change.up), change.scale)
        for name, change in named.items()
    }


def _same(view: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return the view if it is the factor; a share of it, or its rows in another order, is not."""
    same = view.shape == factor.shape and view.dtype == factor.dtype and torch.equal(view, factor)
    return view if same else factor


def _factors(
    rows: Sequence[ModuleRows], change: LowRankChange, named: Mapping[str, LowRank]
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield the changed modules of a projection, with A and B as its change holds them."""
    if change.places is None:
        changed = [part.module for part in rows if part.module in named]
        for module, up in zip(changed, change.ups, strict=True):
            rank = up.values.shape[1]
            yield module, change.down[up.offset : up.offset + rank], up.values
        return
    parts = len(rows) // len(change.places)
    for number, module_rows in enumerate(rows):
        expert, part = divmod(number, parts)
        if module_rows.module in named:
            rank, up = named[module_rows.module].rank, change.ups[part]
            place = int(change.places[expert])
            down = change.down[place, up.offset : up.offset + rank]
            yield module_rows.module, down, up.values[place, :, :rank]


@dataclass(frozen=True, slots=True)
class ModuleRows:
    """A module's rows in a projection.

    Attributes:
        module: its name.
        sizes: (out, in) of the whole module.
        ranges: of its rows, in their order.
        columns: of its columns.
    """

    module: str
    sizes: tuple[int, int]
    ranges: tuple[range, ...]
    columns: range

    @property
    def count(self) -> int:
        """Number of rows."""
        return sum(map(len, self.ranges))

    def of(self, up: torch.Tensor) -> torch.Tensor:
        """Return these rows of a module's B."""
        return torch.cat([up[one.start : one.stop] for one in self.ranges])


@dataclass
class Modules:
    """The projections of a model that adapters can change; `Weights` enters each that it loads.

    Attributes:
        sites: the parts of every projection, from number 1 on, and its columns.
        sizes: (out, in) of every module but routed experts.
        experts: (out, in) of every routed expert's projections, by expert.
        stacked: the number of experts of each site with all of a layer in one piece.
    """

    sites: list[tuple[tuple[ModuleRows, ...], int]] = field(default_factory=list)
    sizes: dict[str, tuple[int, int]] = field(default_factory=dict)
    experts: dict[str, tuple[int, int]] = field(default_factory=dict)
    stacked: dict[int, int] = field(default_factory=dict)

    def enter(self, loaded: Linear) -> None:
        """Give a projection its numbers, unless adapters do not reach it."""
        for leaf in loaded.leaves():
            rows = tuple(rows_of(part, leaf.shard) for part in leaf.origin)
            if not rows or any(part.module.startswith("mtp.") for part in rows):
                continue
            for row in rows:
                known = self.experts if ".experts." in row.module else self.sizes
                known[row.module] = row.sizes
            self.sites.append((rows, leaf.columns))
            leaf.site = len(self.sites)

    def enter_stacked(self, parts: Sequence[Part], count: int, shard: Shard | None) -> int:
        """Give the weights of so many experts, which lie in one piece, a number; 0 if adapters do
        not reach them."""
        rows = tuple(rows_of(part, shard) for part in parts)
        if any(part.module.startswith("mtp.") for part in rows):
            return 0
        self.experts |= {part.module: part.sizes for part in rows}
        columns = sum(part.count for part in rows) // count
        self.sites.append((rows, columns))
        self.stacked[len(self.sites)] = count
        return len(self.sites)


def rows_of(part: Part, shard: Shard | None) -> ModuleRows:
    """Return a rank's rows of a part's module. Of experts in one tensor, each projection is a
    module."""
    name, (out, depth), ranges = module_of(part.name), part.sizes, tuple(part.ranges(shard))
    columns = shard.of(depth) if shard is not None and shard.axis == 1 else range(depth)
    if part.index is None:
        return ModuleRows(name, (out, depth), ranges, columns)
    experts, _, kind = name.rpartition(".")
    if not kind.startswith("gate_up"):
        return ModuleRows(f"{experts}.{part.index}.{kind}", (out, depth), ranges, columns)
    size = out // 2
    half = "gate_proj" if ranges[0].start < size else "up_proj"
    halves = tuple(range(bounds.start % size, (bounds.stop - 1) % size + 1) for bounds in ranges)
    return ModuleRows(f"{experts}.{part.index}.{half}", (size, depth), halves, columns)


def module_of(name: str) -> str:
    """Return a module's name as it is the same in checkpoints and adapters of all classes."""
    name = unprefixed(name.removesuffix(".weight"))
    experts, _, kind = name.rpartition(".")
    if ".experts." in name and kind in _PROJECTIONS:
        name = f"{experts}.{_PROJECTIONS[kind]}"
    return _HEAD if name == _TIED else name


def unprefixed(name: str) -> str:
    """Return a name without what classes put in front of it: in Qwen3-Omni the thinker, too."""
    name = name.removeprefix("thinker.")
    return name.removeprefix(next((prefix for prefix in _PREFIXES if name.startswith(prefix)), ""))


def is_vision(module: str) -> bool:
    """Return True for a module of a vision tower or its merger."""
    return module != _HEAD and not module.startswith("layers.")


def kind_of(module: str) -> str:
    """Return which of an expert's tensors a projection of its own belongs to."""
    return DOWN if module.endswith(DOWN) else GATE_UP
