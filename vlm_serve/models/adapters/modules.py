"""A model's modules that adapters can change, by name, and their rows in its projections."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from vlm_serve.kernels.linear import Linear, Part, Shard

GATE_UP, DOWN = "gate_up_proj", "down_proj"
_PREFIXES = ("model.language_model.", "language_model.model.", "model.", "language_model.")
_TIED, _HEAD = "embed_tokens", "lm_head"


@dataclass(frozen=True, slots=True)
class Rows:
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
        columns = sum(each.count for each in rows) // count
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


def is_vision(module: str) -> bool:
    """Return True for a module of a vision tower or its merger."""
    return module != _HEAD and not module.startswith("layers.")


def kind_of(module: str) -> str:
    """Return which of an expert's tensors a projection of its own belongs to."""
    return DOWN if module.endswith(DOWN) else GATE_UP
