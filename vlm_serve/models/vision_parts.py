"""Common parts of vision towers: reading their tensors, layer norms, attention by picture."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar
from weakref import WeakMethod

import torch
import torch.nn.functional as F

from vlm_serve.kernels.linear import Activation, Linear, Part
from vlm_serve.kernels.linear.low_rank import AdapterChanges, RowChanges
from vlm_serve.models.weights import Weights

EPS = 1e-6
"""Of layer norms."""


Value = TypeVar("Value")
Attend = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Attention of every picture to itself: queries and keys `[n, 2, heads, d]`, values `[n, heads, d]`
to `[n, heads, d]`."""
REMEMBERED_PATCHES = 32768
"""Patches of all grids whose values are kept; a grid of more is computed each time. A patch takes
some kilobytes of a device's memory."""


@dataclass(frozen=True, slots=True)
class Affine:
    """Weight and bias of a layer norm, and its `eps`; without a bias it is a root-mean-square
    norm."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float = EPS


@dataclass(frozen=True, slots=True)
class Products:
    """How a tower multiplies: `deterministic` as in `Linear`, and the adapter of all rows."""

    deterministic: bool
    changes: AdapterChanges | None = None
    _of_rows: dict[int, RowChanges | None] = field(default_factory=dict, init=False, repr=False)

    def __call__(
        self,
        weight: Linear,
        x: torch.Tensor,
        *,
        activation: Activation | None = None,
        times: torch.Tensor | None = None,
        plus: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute a projection; arguments as in `Linear.__call__`."""
        count = len(x)
        if count not in self._of_rows:
            # Kept, since a GPU gets tables of the rows.
            self._of_rows[count] = RowChanges.of_all(self.changes, count)
        return weight(
            x,
            activation=activation,
            times=times,
            plus=plus,
            deterministic=self.deterministic,
            changes=self._of_rows[count],
        )


@dataclass(frozen=True, slots=True)
class AttentionPart:
    """Weights of one attention, with the norm before it.

    Attributes:
        qk_norms: of queries and of keys, over all heads; None: there are none.
        scale: of what it adds, by channel; None: 1.
    """

    norm: Affine
    qkv: Linear
    out: Linear
    qk_norms: tuple[Affine, Affine] | None = None
    scale: torch.Tensor | None = None

    def __call__(
        self, x: torch.Tensor, heads: int, attention: Attend, how: Products
    ) -> torch.Tensor:
        """Add to x what its pictures attend to."""
        qkv = how(self.qkv, layer_norm(x, self.norm)).view(len(x), 3, heads, -1)
        qk = qkv[:, :2]
        if self.qk_norms is not None:
            rows = zip(qk.flatten(2).unbind(1), self.qk_norms, strict=True)
            qk = torch.stack([layer_norm(*row) for row in rows], dim=1).view_as(qk)
        mixed = attention(qk, qkv[:, 2]).view(len(x), -1)
        return _added(how, self.out, mixed, x, self.scale)


@dataclass(frozen=True, slots=True)
class MlpPart:
    """Weights of two products, with the norm before them; `scale`: as of `AttentionPart`."""

    norm: Affine
    wide: Linear
    narrow: Linear
    scale: torch.Tensor | None = None

    def __call__(
        self,
        x: torch.Tensor,
        activation: Activation,
        how: Products,
        *,
        plus: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute both products of x, with the activation between them and the sum behind them."""
        return self.of_normed(layer_norm(x, self.norm), activation, how, plus=plus)

    def of_normed(
        self,
        x: torch.Tensor,
        activation: Activation,
        how: Products,
        *,
        plus: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the same of rows behind the norm."""
        return _added(how, self.narrow, how(self.wide, x, activation=activation), plus, self.scale)


def _added(
    how: Products,
    weight: Linear,
    x: torch.Tensor,
    plus: torch.Tensor | None,
    scale: torch.Tensor | None,
) -> torch.Tensor:
    """Return the product of x, scaled by channel, and added to `plus` if it is given."""
    if scale is None:
        return how(weight, x, plus=plus)
    scaled = scale * how(weight, x)
    # No fused form: its bits differ at the ends of vectors, so with the other pictures of a run.
    return scaled if plus is None else scaled + plus


@dataclass(frozen=True, slots=True)
class VisionBlock:
    """Weights of one transformer block."""

    attention: AttentionPart
    mlp: MlpPart


@dataclass(frozen=True, slots=True)
class Merger:
    """Squares of patches to tokens. The norm applies to patches, or to squares if `postshuffle`."""

    mlp: MlpPart
    postshuffle: bool


class TowerReader:
    """Tensors of a tower by name; all names start with `prefix`."""

    def __init__(self, source: Weights, prefix: str) -> None:
        self._source = source
        self._prefix = prefix

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """Return a tensor in the dtype of activations."""
        return self._source.tensor(self._prefix + name, shape)

    def norm(self, name: str, size: int, *, bias: bool = True) -> Affine:
        """Load a norm over `size` numbers."""
        weight = self.tensor(f"{name}.weight", size)
        return Affine(weight, self.tensor(f"{name}.bias", size) if bias else None)

    def projection(self, name: str, *shape: int, bias: bool = True) -> Linear:
        """Load a projection; all dimensions but the rows are flattened."""
        return self.fused([name], *shape, bias=bias)

    def fused(self, names: list[str], *shape: int, bias: bool = True) -> Linear:
        """Load several projections of one shape as one, with their rows stacked."""
        starts = [self._prefix + name for name in names]
        biases = [Part(f"{start}.bias", shape[:1]) for start in starts] if bias else None
        return self._source.linear(*(Part(f"{s}.weight", shape) for s in starts), bias=biases)


def layer_norm(x: torch.Tensor, norm: Affine) -> torch.Tensor:
    """Normalise over the last dim."""
    if norm.bias is None:
        return F.rms_norm(x, x.shape[-1:], norm.weight, norm.eps)
    return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)


def attend(qk: torch.Tensor, v: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Compute attention of every picture to itself: `[n, 2, heads, d]`, `[n, heads, d]` to `[n,
    heads, d]`.

    Neighbours of equal size share a call.
    """
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    start = 0
    while sizes:
        size = sizes[0]
        count = next((i for i, other in enumerate(sizes) if other != size), len(sizes))
        part = slice(start, start + count * size)
        q, k, values = (
            tensor[part].view(count, size, *tensor.shape[1:]).transpose(1, 2)
            for tensor in (qk[:, 0], qk[:, 1], v)
        )
        mixed = F.scaled_dot_product_attention(q, k, values)
        out[part] = mixed.transpose(1, 2).flatten(0, 1)
        start, sizes = part.stop, sizes[count:]
    return out


class GridMemory(Generic[Value]):
    """The values of the grids that were used last.

    Args:
        compute: method that returns the value of a grid: of its height, its width and its merge if
            there are several. Its object, which has this memory, is not kept alive: weights are
            freed with the last use, not by the garbage collector, which may never come.
    """

    def __init__(self, compute: Callable[..., Value]) -> None:
        self._compute = WeakMethod(compute)
        self._known: OrderedDict[tuple[int, ...], Value] = OrderedDict()
        self._patches = 0

    def __call__(self, *grid: int) -> Value:
        """Return the value of a grid."""
        if grid in self._known:
            self._known.move_to_end(grid)
            return self._known[grid]
        compute = self._compute()
        assert compute is not None
        value, patches = compute(*grid), grid[0] * grid[1]
        if patches <= REMEMBERED_PATCHES:
            self._known[grid] = value
            self._patches += patches
        while self._patches > REMEMBERED_PATCHES:
            (height, width, *_), _ = self._known.popitem(last=False)
            self._patches -= height * width
        return value


def block_order(height: int, width: int, merge: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return row and column of every patch, in the processor's order of patches.

    Patches come in squares of `merge * merge`, which later become one token: squares row by row,
    and row by row within a square.

    Args:
        height, width: the grid in patches, multiples of `merge`.

    Returns:
        (rows, columns), int64 `[height * width]` each.
    """
    rows = torch.arange(height).view(height // merge, 1, merge, 1)
    columns = torch.arange(width).view(1, width // merge, 1, merge)
    shape = (height // merge, width // merge, merge, merge)
    return rows.expand(shape).reshape(-1), columns.expand(shape).reshape(-1)


def interpolate_positions(table: torch.Tensor, height: int, width: int, merge: int) -> torch.Tensor:
    """Resample the learned square grid of position embeddings to a picture's grid.

    Bilinear with aligned corners (transformers' get_vision_interpolation_indices_and_weights).

    Args:
        table: `[side * side, hidden]`, any float dtype.
        height, width, merge: as for `block_order`.

    Returns:
        `[height * width, hidden]` in the dtype of the table, computed in float32.
    """
    side = int(table.shape[0] ** 0.5)
    rows, columns = block_order(height, width, merge)
    row_taps, row_weights = _taps(rows, height, side)
    column_taps, column_weights = _taps(columns, width, side)
    taps = (row_taps[:, :, None] * side + column_taps[:, None, :]).reshape(-1, 4)
    weights = (row_weights[:, :, None] * column_weights[:, None, :]).reshape(-1, 4, 1)
    gathered = table[taps.to(table.device)].float() * weights.to(table.device)
    return gathered.sum(1).to(table.dtype)


def _taps(index: torch.Tensor, size: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the two grid lines around each position, and their weights."""
    place = index.float() * (side - 1) / max(size - 1, 1)
    below = place.floor()
    taps = torch.stack([below, below + 1], dim=1).clamp(max=side - 1).long()
    above_weight = place - below
    return taps, torch.stack([1 - above_weight, above_weight], dim=1)


def axial_frequencies(head_dim: int, theta: float) -> torch.Tensor:
    """Return the frequencies of the axial rotary embedding: float32 `[head_dim / 4]`. Half of a
    head's angles follow the row, half the column."""
    spatial = head_dim // 2
    return 1.0 / (theta ** (torch.arange(0, spatial, 2, dtype=torch.float) / spatial))


def nested_order(height: int, width: int, merge: int) -> torch.Tensor:
    """Return the order of a picture's patches: squares of `merge * merge`, which later become one
    token, row by row; within them squares of half the side, and so on.

    Args:
        height, width: the grid in patches, multiples of `merge`, a power of two.

    Returns:
        int64 `[height * width]`, patches counted row by row.
    """
    order = torch.arange(height * width).view(1, height, width)
    side = merge
    while side > 1:
        count, rows, columns = order.shape
        order = order.view(count, rows // side, side, columns // side, side)
        order = order.transpose(2, 3).reshape(-1, side, side)
        side //= 2
    return order.flatten()


def nearest_positions(height: int, width: int, side: int) -> torch.Tensor:
    """Return the index in a learned `side * side` grid for each patch of a picture, rounded down
    from its position (transformers' get_vision_nearest_position_ids, with its rounding).

    Returns:
        int64 `[height * width]`, patches counted row by row.
    """
    edges = torch.arange(1 / side, 1.0, 1 / side)
    rows, columns = (
        torch.bucketize(torch.arange(length) / length, edges, right=True)
        for length in (height, width)
    )
    return (rows[:, None] * side + columns).flatten()
