"""Where adapters change a model: its modules by name, and an adapter's share of each projection."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from blake3 import blake3

from vlm_serve.errors import CheckpointError
from vlm_serve.kernels.linear import Linear, Part, Shard
from vlm_serve.kernels.linear.low_rank import AdapterChanges
from vlm_serve.kernels.linear.low_rank_change import Change, Up
from vlm_serve.models.adapters.experts import kind_of, split
from vlm_serve.models.adapters.folder import AdapterFile
from vlm_serve.models.adapters.low_rank import LowRank
from vlm_serve.models.adapters.rows import Rows
from vlm_serve.models.adapters.sharing import shared
from vlm_serve.models.adapters.stacked import stacked_alike, stacked_change
from vlm_serve.options.declared import format_size
from vlm_serve.preprocess.keys import tagged

_DOMAIN = b"vlm-serve adapter 1"
_PREFIXES = ("model.language_model.", "language_model.model.", "model.", "language_model.")
_TIED, _HEAD = "embed_tokens", "lm_head"
_LISTED = 8


@dataclass
class Modules:
    """The projections of a model that adapters can change; `Weights` enters each that it loads.

    Attributes:
        sites: the parts of every projection, from number 1 on, and its columns.
        sizes: (out, in) of every module but routed experts.
        experts: (out, in) of every routed expert's projections, by expert.
        stacked: the number of experts of each site with all of a layer in one piece.
    """

    sites: list[tuple[tuple[Rows, ...], int]] = field(default_factory=list)
    sizes: dict[str, tuple[int, int]] = field(default_factory=dict)
    experts: dict[str, tuple[int, int]] = field(default_factory=dict)
    stacked: dict[int, int] = field(default_factory=dict)

    def enter(self, loaded: Linear) -> None:
        """Give a projection its numbers, unless adapters do not reach it."""
        for leaf in loaded.leaves():
            rows = tuple(rows_of(part, leaf.shard) for part in leaf.origin)
            if not rows or any(each.module.startswith("mtp.") for each in rows):
                continue
            for each in rows:
                known = self.experts if ".experts." in each.module else self.sizes
                known[each.module] = each.sizes
            self.sites.append((rows, leaf.columns))
            leaf.site = len(self.sites)

    def enter_stacked(self, parts: Sequence[Part], count: int, shard: Shard | None) -> int:
        """Give the weights of so many experts, which lie in one piece, a number; 0 if adapters do
        not reach them."""
        rows = tuple(rows_of(part, shard) for part in parts)
        if any(each.module.startswith("mtp.") for each in rows):
            return 0
        self.experts |= {each.module: each.sizes for each in rows}
        columns = sum(len(own) for each in rows for own in each.ranges) // count
        self.sites.append((rows, columns))
        self.stacked[len(self.sites)] = count
        return len(self.sites)


def rows_of(part: Part, shard: Shard | None) -> Rows:
    """Return a rank's rows of a part's module. Of experts in one tensor, each projection is a
    module."""
    name, (out, depth), ranges = module_of(part.name), part.sizes, tuple(part.ranges(shard))
    columns = shard.of(depth) if shard is not None and shard.axis == 1 else range(depth)
    if part.index is None:
        return Rows(name, (out, depth), ranges, columns)
    experts, _, kind = name.rpartition(".")
    if not kind.startswith("gate_up"):
        return Rows(f"{experts}.{part.index}.{kind}", (out, depth), ranges, columns)
    size = out // 2
    half = "gate_proj" if ranges[0].start < size else "up_proj"
    own = tuple(range(each.start % size, (each.stop - 1) % size + 1) for each in ranges)
    return Rows(f"{experts}.{part.index}.{half}", (size, depth), own, columns)


def module_of(name: str) -> str:
    """Return a module's name as it is the same in checkpoints and adapters of all classes."""
    name = unprefixed(name.removesuffix(".weight"))
    return _HEAD if name == _TIED else name


def unprefixed(name: str) -> str:
    """Return a name without what classes put in front of it."""
    return name.removeprefix(next((each for each in _PREFIXES if name.startswith(each)), ""))


@dataclass(frozen=True)
class Adapter:
    """An adapter beside the model that it was placed for.

    Attributes:
        modules: its factors, by the model's names of modules.
        changes: of the model's projections.
    """

    modules: Mapping[str, LowRank]
    changes: AdapterChanges

    @cached_property
    def digest(self) -> str:
        """64 hexadecimal digits that name everything that decides bits; not the adapter's name."""
        return _digest(self.modules)

    @cached_property
    def vision_digest(self) -> str:
        """The same of the vision tower's modules; "" if it leaves them alone."""
        tower = {name: each for name, each in self.modules.items() if is_vision(name)}
        return _digest(tower) if tower else ""

    @property
    def nbytes(self) -> int:
        """Bytes of its factors, of which the modules of an expert may share one."""
        factors = (each for own in self.modules.values() for each in (own.down, own.up))
        return sum({each.data_ptr(): each.nbytes for each in factors}.values())

    @property
    def layout_bytes(self) -> int:
        """Bytes of its factors in the layout of compiled code, about."""
        return sum(each.layout_bytes for each in self.modules.values())


def is_vision(module: str) -> bool:
    """Return True for a module of a vision tower or its merger."""
    return module != _HEAD and not module.startswith("layers.")


def place(file: AdapterFile, modules: Modules, experts: Collection[str] = ()) -> Adapter:
    """Match an adapter's modules with a model's.

    Args:
        file: the adapter.
        modules: of the model.
        experts: projections of routed experts that adapters may change: gate_up_proj, down_proj.

    Raises:
        CheckpointError: the model lacks modules, which the message lists, or has them in another
            size.
    """
    named: dict[str, LowRank] = {}
    for name, change in file.modules.items():
        module = module_of(name)
        if module in named:
            raise CheckpointError(f"the adapter has {module} twice")
        named[module] = change
    for name, fused in file.experts.items():
        own = split(module_of(name), fused, modules.experts)
        if named.keys() & own.keys():
            raise CheckpointError(f"the adapter has experts of {name} twice")
        named |= own
    sizes = modules.sizes | modules.experts
    unknown = sorted(name for name in named if name not in sizes)
    if unknown:
        raise CheckpointError(_complaint(unknown, modules))
    _check_experts(named, modules, experts)
    for name, change in named.items():
        out, depth = sizes[name]
        if (change.up.shape[0], change.down.shape[1]) != (out, depth):
            raise CheckpointError(
                f"the adapter is of another model: {name} takes {change.down.shape[1]} numbers to "
                f"{change.up.shape[0]}, the model's takes {depth} to {out}"
            )
    changes = changes_of(named, modules)
    sites = (
        (modules.sites[number - 1][0], modules.stacked.get(number, 0), change)
        for number, change in changes.by_site.items()
    )
    return Adapter(shared(named, sites), changes)


def changes_of(named: Mapping[str, LowRank], modules: Modules) -> AdapterChanges:
    """Return what an adapter's modules, which fit, change in a model or in a rank's share of it."""
    downs: _Downs = {}
    changes = {
        number: (
            stacked_change(rows, modules.stacked[number], named)
            if number in modules.stacked
            else _change(rows, named, downs)
        )
        for number, (rows, _) in enumerate(modules.sites, 1)
        if any(each.module in named for each in rows)
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
        number: stacked_alike(modules.sites[number - 1][0], count, rank, factor)
        for number, count in modules.stacked.items()
        if kind_of(modules.sites[number - 1][0][0].module) in experts
    }
    own = {**changes.by_site, **stacked}
    return AdapterChanges(own, len(modules.sites), tower=changes.tower, room=room)


def _complaint(unknown: list[str], modules: Modules) -> str:
    shown = ", ".join(unknown[:_LISTED]) + (", ..." if len(unknown) > _LISTED else "")
    known = ", ".join(dict.fromkeys(_kinds(modules.sizes | modules.experts)))
    return (
        f"the model has no such modules, {len(unknown)} of the adapter's: {shown}; it has {known}"
    )


def _kinds(names: Iterable[str]) -> Iterable[str]:
    """Yield modules' names without the numbers of layers."""
    for name in names:
        yield ".".join(part if not part.isdigit() else "*" for part in name.split("."))


def _check_experts(
    named: Mapping[str, LowRank], modules: Modules, allowed: Collection[str]
) -> None:
    """Check that options allow the adapter's changes of routed experts."""
    changed = {kind_of(name) for name in named if name in modules.experts}
    if changed <= set(allowed):
        return
    wanted = changed | set(allowed)
    option = "all" if len(wanted) > 1 else next(iter(wanted))
    size = format_size(
        sum(each.layout_bytes for name, each in named.items() if ".experts." in name)
    )
    raise CheckpointError(
        f"the adapter changes routed experts, in {size} of memory: --lora-experts {option} "
        "allows it"
    )


_Downs = dict[tuple[object, ...], torch.Tensor]
"""Factors A of changes, by what they are made of."""


def _change(rows: tuple[Rows, ...], named: Mapping[str, LowRank], known: _Downs) -> Change:
    """Return an adapter's change of a projection of several parts; a module's parts share u.

    `known`: of other projections. Gate and up of an expert may have one A.
    """
    offsets: dict[str, int] = {}
    downs, scales, ups = list[torch.Tensor](), list[torch.Tensor](), list[Up]()
    first = width = 0
    for each in rows:
        change = named.get(each.module)
        if change is not None:
            if each.module not in offsets:
                offsets[each.module] = width
                width += change.rank
                downs.append(change.down[:, each.columns.start : each.columns.stop])
                scales.append(torch.full((change.rank,), change.scale))
            own = torch.cat([change.up[one.start : one.stop] for one in each.ranges])
            ups.append(Up(first, offsets[each.module], own))
        first += sum(map(len, each.ranges))
    made_of = tuple((each.data_ptr(), each.shape, each.stride()) for each in downs)
    if made_of not in known:
        known[made_of] = torch.cat(downs)
    return Change(known[made_of], torch.cat(scales), tuple(ups))


def _digest(modules: Mapping[str, LowRank]) -> str:
    whole = blake3(tagged("domain", _DOMAIN))
    for name in sorted(modules):
        change = modules[name]
        whole.update(tagged("module", name) + tagged("scale", float(change.scale).hex()))
        for tag, factor in ("down", change.down), ("up", change.up):
            raw = factor.contiguous().view(torch.uint8).numpy()
            whole.update(tagged(tag, f"{factor.dtype} {list(factor.shape)}"))
            whole.update(raw.tobytes())
    return whole.hexdigest()
