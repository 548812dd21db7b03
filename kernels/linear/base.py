"""Interface of projections and of their sources of weights."""

from __future__ import annotations

import ctypes
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch

from vlm_serve.kernels.checks import KernelArgumentError
from vlm_serve.kernels.elementwise import silu_times
from vlm_serve.kernels.linear.codes import Codes
from vlm_serve.kernels.linear.low_rank_factors import ExpertSites, Reduced
from vlm_serve.kernels.native_layout import struct
from vlm_serve.kernels.norms import Normed

Activation = Literal["silu", "gelu", "gelu_tanh", "relu2"]

CHUNK_BYTES = 16 << 20
"""Bytes of rows to convert at a time, so that loading needs no second copy of a tensor."""


class WeightSource(Protocol):
    """Source of weights.

    Attributes:
        dtype: dtype of the weights in memory.
        device: device to place them on.
        compiled: True if compiled CPU code multiplies by them.
        dynamic: True if activations beside integer codes are quantised to int8, per row and group
            of k.
    """

    dtype: torch.dtype
    device: torch.device
    compiled: bool
    dynamic: bool

    def mapped(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """Return a tensor of the checkpoint, read-only."""
        ...

    def codes(self, part: Part, shard: Shard | None) -> Iterator[Codes] | None:
        """Return an iterator over a part's rows as codes, in pieces of one kind; None if it is
        dense.

        A shard or a range of rows that cuts through blocks of scales makes the blocks smaller,
        exactly.
        """
        ...


@dataclass(frozen=True, slots=True)
class Shard:
    """Share of one of `size` ranks: of every part's rows (`axis` 0), or of the depth (`axis` 1).

    Raises:
        KernelArgumentError: on use, if the rows or the depth do not split evenly.
    """

    rank: int
    size: int
    axis: Literal[0, 1]

    def of(self, count: int) -> range:
        """Return this rank's share of `count` items."""
        if count % self.size:
            raise KernelArgumentError("shard", f"{count} do not split into {self.size}")
        share = count // self.size
        return range(self.rank * share, (self.rank + 1) * share)


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one tensor of a checkpoint.

    Attributes:
        name, shape: of the tensor; dimensions after the rows are flattened.
        rows: ranges of rows, in their order; empty means all.
        index: in the first dimension, of a tensor that stacks several weights.
        transposed: True if the tensor's rows are the weight's columns.
        least_bits: fewest bits for its values when a plain weight is quantised on load; 16: never
            quantised.
    """

    name: str
    shape: tuple[int, ...]
    rows: tuple[range, ...] = ()
    index: int | None = None
    transposed: bool = False
    least_bits: int = 16

    @property
    def sizes(self) -> tuple[int, int]:
        """Rows and columns of the whole weight."""
        shape = self.shape if self.index is None else self.shape[1:]
        rows, columns = shape[0], math.prod(shape[1:])
        return (columns, rows) if self.transposed else (rows, columns)

    def ranges(self, shard: Shard | None) -> list[range]:
        """Return the rows of a shard, or all of them."""
        ranges = list(self.rows) or [range(self.sizes[0])]
        if shard is None or shard.axis == 1:
            return ranges
        return list(_share(ranges, shard.of(sum(map(len, ranges)))))

    def pieces(self, source: WeightSource, shard: Shard | None) -> Iterator[torch.Tensor]:
        """Yield `[n, K]` pieces (`[n]` of a bias) in the source's dtype, up to CHUNK_BYTES each."""
        tensor = source.mapped(self.name, self.shape)
        if self.index is not None:
            tensor = tensor[self.index]
        tensor = tensor.flatten(1) if tensor.ndim > 1 else tensor
        tensor = tensor.T if self.transposed else tensor
        if shard is not None and shard.axis == 1 and tensor.ndim > 1:
            columns = shard.of(tensor.shape[1])
            tensor = tensor[:, columns.start : columns.stop]
        row_bytes = max(1, tensor[:1].numel()) * source.dtype.itemsize
        step = max(1, CHUNK_BYTES // row_bytes)
        for rows in self.ranges(shard):
            for start in range(rows.start, rows.stop, step):
                yield tensor[start : min(start + step, rows.stop)].to(source.dtype)


def shape(parts: Sequence[Part], shard: Shard | None) -> tuple[int, int]:
    """Return N and K of parts stacked by rows."""
    columns = sum(len(rows) for part in parts for rows in part.ranges(shard))
    depth = parts[0].sizes[1]
    return columns, len(shard.of(depth)) if shard is not None and shard.axis == 1 else depth


def stacked(source: WeightSource, bias: Sequence[Part], shard: Shard | None) -> torch.Tensor | None:
    """Concatenate the parts of a bias; None if there are none."""
    pieces = [piece for part in bias for piece in part.pieces(source, shard)]
    return torch.cat(pieces) if pieces else None


def _share(ranges: Sequence[range], wanted: range) -> Iterator[range]:
    """Yield the elements `wanted` of the concatenated ranges."""
    begin = 0
    for part in ranges:
        low, high = max(wanted.start - begin, 0), min(wanted.stop - begin, len(part))
        if low < high:
            yield part[low:high]
        begin += len(part)


WeightRecord = struct("Weight")


class Epilogue(NamedTuple):
    """Operations after a product: at most one of them.

    Attributes:
        activation: applied to the result.
        times, plus: `[T, N]`, multiplied with or added to the result.
        overwrite: True if the result may take the place of `plus`.
    """

    activation: Activation | None = None
    times: torch.Tensor | None = None
    plus: torch.Tensor | None = None
    overwrite: bool = False

    def of(self, part: Callable[[torch.Tensor], torch.Tensor]) -> Epilogue:
        """Return the epilogue of a part of the product: `part` cuts or pads the tensors."""
        times = None if self.times is None else part(self.times)
        plus = None if self.plus is None else part(self.plus)
        return Epilogue(self.activation, times, plus, self.overwrite)


class ChangedRows(Protocol):
    """The adapters of rows; `low_rank.RowChanges` implements it."""

    def kept(self, rows: torch.Tensor) -> ChangedRows:
        """Return the same for some of the rows, in their order."""
        ...

    def reaches(self, site: int) -> bool:
        """Tell whether the adapter of any row changes a projection."""
        ...

    def changed(self, sites: Sequence[int]) -> list[bool]:
        """Tell for each row whether its adapter changes any of these projections."""
        ...

    def few(self, site: int, x: torch.Tensor, norm: torch.Tensor | None = None) -> Reduced | None:
        """Compute u of a few rows, for kernels; None if no row is changed."""
        ...

    def experts(self, sites: tuple[int, int], device: torch.device) -> ExpertSites | None:
        """Return the changes of experts in one piece; None if those of no row are changed."""
        ...

    def added(self, weight: Linear, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Add the changes by the adapters of x's rows to products in float32, in place."""
        ...

    def multiplied(
        self, weight: Linear, x: torch.Tensor, after: Epilogue, *, deterministic: bool
    ) -> torch.Tensor:
        """Compute a call of a projection with checked arguments."""
        ...

    def gated(
        self, gate: Linear, up: Linear, x: torch.Tensor, *, deterministic: bool
    ) -> torch.Tensor:
        """Compute `gate.gated`."""
        ...


class Linear(ABC):
    """A projection.

    Attributes:
        columns, depth: N and K.
        dtype: of the weight in memory.
        origin: the rows of a checkpoint that it was loaded from.
        shard: this rank's share of them; None: all.
        site: number under which adapters know it; 0: adapters do not change it.
    """

    columns: int
    depth: int
    dtype: torch.dtype
    origin: tuple[Part, ...] = ()
    shard: Shard | None = None
    site: int = 0

    def __call__(
        self,
        x: torch.Tensor,
        *,
        activation: Activation | None = None,
        times: torch.Tensor | None = None,
        plus: torch.Tensor | None = None,
        overwrite: bool = False,
        deterministic: bool = False,
        changes: ChangedRows | None = None,
    ) -> torch.Tensor:
        """Compute `x @ weight.T + bias`, then at most one of: an activation, a product, a sum.

        Args:
            x: `[T, K]` activations, dense rows.
            activation: applied to the result.
            times, plus: `[T, N]`, multiplied with or added to the result.
            overwrite: allow the result to take the place of `plus`, which saves a GPU a copy.
            deterministic: give a row the same bits in any batch; packed formats always do.
            changes: the adapters of the rows, if any have one.

        Returns:
            `[T, N]` in the dtype of x.

        Raises:
            KernelArgumentError: more than one of activation, times and plus; an x that does not
                fit.
        """
        if (activation is not None) + (times is not None) + (plus is not None) > 1:
            raise KernelArgumentError("activation", "at most one of activation, times and plus")
        if x.ndim != 2 or x.shape[1] != self.depth:
            raise KernelArgumentError("x", f"{list(x.shape)}, expected [T, {self.depth}]")
        after = Epilogue(activation, times, plus, overwrite)
        return self._changed(x, after, deterministic, changes)

    def _changed(
        self, x: torch.Tensor, after: Epilogue, deterministic: bool, changes: ChangedRows | None
    ) -> torch.Tensor:
        """Compute a call with checked arguments, whose rows may have adapters."""
        if changes is None or not changes.reaches(self.site):
            return self._multiply(x, after, deterministic)
        return changes.multiplied(self, x, after, deterministic=deterministic)

    def leaves(self) -> tuple[Linear, ...]:
        """Return the weights of one format each that it consists of."""
        return (self,)

    @abstractmethod
    def _multiply(self, x: torch.Tensor, after: Epilogue, deterministic: bool) -> torch.Tensor:
        """Compute a call with checked arguments."""

    def with_change(
        self, x: torch.Tensor, after: Epilogue, deterministic: bool, change: Reduced
    ) -> torch.Tensor:
        """Compute a call with checked arguments, whose rows have adapters, on a GPU: a change is
        added to the float32 sums, before what follows and before they are rounded.

        Raises:
            KernelArgumentError: there are no such kernels for the format.
        """
        raise KernelArgumentError("changes", f"no kernel adds them to {type(self).__name__}")

    def gated(
        self,
        up: Linear,
        x: torch.Tensor,
        *,
        deterministic: bool = False,
        changes: ChangedRows | None = None,
    ) -> torch.Tensor:
        """Compute `silu(self(x)) * up(x)`, `[T, N]`; `changes`: the adapters of the rows."""
        if changes is not None:
            return changes.gated(self, up, x, deterministic=deterministic)
        return self._gated(up, x, deterministic)

    @abstractmethod
    def _gated(self, up: Linear, x: torch.Tensor, deterministic: bool) -> torch.Tensor:
        """Compute `gated` for rows without adapters."""

    def of_norm(
        self,
        x: Normed,
        *,
        gated: bool = False,
        widened: bool = False,
        deterministic: bool = False,
        changes: ChangedRows | None = None,
    ) -> torch.Tensor:
        """Compute the product of rows whose norm is still to come, `[T, N]`.

        Args:
            x: the rows.
            gated: the weight stacks gate's rows and up's; return `silu(gate) * up`, `[T, N / 2]`.
            widened: return float32.
            deterministic, changes: as above.
        """
        out = self(x.rows, deterministic=deterministic, changes=changes)
        if gated:
            out = silu_times(*out.chunk(2, dim=1))
        return out.float() if widened else out

    def partial(
        self,
        x: torch.Tensor,
        *,
        deterministic: bool = False,
        changes: ChangedRows | None = None,
    ) -> torch.Tensor:
        """Compute the product before rounding, float32 `[T, N]`, to be summed over ranks.

        Args:
            x, deterministic, changes: as above.
        """
        out = self._partial(x, deterministic)
        return out if changes is None else changes.added(self, x, out)

    def _partial(self, x: torch.Tensor, deterministic: bool) -> torch.Tensor:
        """Compute `partial` for rows without adapters."""
        return self(x.float(), deterministic=deterministic)

    def record(self) -> ctypes.Structure | None:
        """Return the weight's record for compiled steps, owned by self; None if unsupported."""
        return None

    def takes(self, dtype: torch.dtype) -> bool:
        """Return True if compiled code multiplies this weight with activations of that dtype."""
        return dtype != torch.bfloat16 or self.dtype == torch.bfloat16

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes in memory."""
