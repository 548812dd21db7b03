"""Dense weights multiplied by torch: on GPUs, and on CPUs without compiled code.

On a CPU the weight goes through oneDNN, in its opaque blocked layout. oneDNN applies an activation,
a factor or a residual while the product is still in registers, in float32. That saves a pass over
the activations and keeps a row's bits independent of its batch. torch's own silu, sigmoid and gelu
would not: they compute the last elements of each thread's share on a scalar path with other bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import itemgetter

import torch
import torch.nn.functional as F

from vlm_serve.kernels.elementwise import silu_times
from vlm_serve.kernels.linear.base import Activation, ChangedRows, Epilogue, Linear
from vlm_serve.kernels.linear.few_rows import Around, few_rows, serves
from vlm_serve.kernels.linear.low_rank_factors import Reduced
from vlm_serve.kernels.norms.pending import Normed

MIN_ROWS = 16
MIN_COLUMNS = 16
ROWS_AT_ONCE = 128
"""Rows of a deterministic product on a GPU."""

_ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
_POST_OPS = {"silu": ("swish", ""), "gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh")}


class TorchDense(Linear):
    """A dense weight, multiplied by torch.

    Args:
        weight: `[N, K]`.
        bias: `[N]` or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.columns, self.depth = weight.shape
        self.dtype = weight.dtype
        self._bias = bias
        self._weight = weight
        self._bytes = weight.nbytes
        if weight.device.type == "cpu" and weight.dtype in _packable_dtypes():
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), MIN_ROWS)

    @classmethod
    def of(
        cls,
        pieces: Iterable[torch.Tensor],
        columns: int,
        depth: int,
        dtype: torch.dtype,
        bias: torch.Tensor | None,
        device: torch.device,
    ) -> TorchDense:
        """Stack `[n, K]` pieces by rows."""
        weight = torch.empty(columns, depth, dtype=dtype, device=device)
        first = 0
        for piece in pieces:
            weight[first : first + piece.shape[0]] = piece
            first += piece.shape[0]
        return cls(weight, None if bias is None else bias.to(device, dtype))

    def _multiply(self, x: torch.Tensor, after: Epilogue, deterministic: bool) -> torch.Tensor:
        """Multiply; `deterministic` pads rows and columns to whole tiles.

        A GEMM library picks another algorithm for a handful of rows. A row's last bits then depend
        on the number of rows in the call, and in some code on its place in a partial tile. In whole
        tiles of 16 rows they do not (measured, float32 and bfloat16). One exception remains:
        one-column products of a plain weight take a GEMV path. `deterministic` pads both away. On a
        GPU, algorithms depend on the number of rows at every size, so products always have the same
        number.
        """
        if not deterministic:
            if after.activation is None and after.times is None and self._few(x):
                around = Around(plus=after.plus, overwrite=after.overwrite)
                return few_rows(x, self._weight, around)
            return self._product(x, self._weight, self._bias, after)
        rows, weight, bias = x.shape[0], self._weight, self._bias
        if self.columns == 1 and not weight.is_mkldnn:
            weight = with_rows(weight, MIN_COLUMNS)
            bias = None if bias is None else with_rows(bias, MIN_COLUMNS)
        after = after.of(lambda part: with_rows(part, _padded(rows, x.device)))
        out = in_tiles(
            x, lambda tile, own: self._product(tile, weight, bias, after.of(itemgetter(own)))
        )
        return out[:, : self.columns]

    def of_norm(
        self, x: Normed, *, deterministic: bool = False, changes: ChangedRows | None = None
    ) -> torch.Tensor:
        if deterministic or not self._few_normed(x):
            return super().of_norm(x, deterministic=deterministic, changes=changes)
        change = self._change(x, changes)
        return few_rows(x.raw, self._weight, Around(x.weight, x.eps, change=change))

    def gated_of_norm(
        self, x: Normed, *, deterministic: bool = False, changes: ChangedRows | None = None
    ) -> torch.Tensor:
        if deterministic or not self._few_normed(x):
            return super().gated_of_norm(x, deterministic=deterministic, changes=changes)
        change = self._change(x, changes)
        return few_rows(x.raw, self._weight, Around(x.weight, x.eps, gated=True, change=change))

    def logits(
        self, x: Normed, *, deterministic: bool = False, changes: ChangedRows | None = None
    ) -> torch.Tensor:
        if deterministic or not self._few_normed(x):
            return super().logits(x, deterministic=deterministic, changes=changes)
        change = self._change(x, changes)
        return few_rows(x.raw, self._weight, Around(x.weight, x.eps, widened=True, change=change))

    def _changed(
        self, x: torch.Tensor, after: Epilogue, deterministic: bool, changes: ChangedRows | None
    ) -> torch.Tensor:
        plain = after.activation is None and after.times is None
        if changes is None or deterministic or not plain or not self._few(x):
            return super()._changed(x, after, deterministic, changes)
        change = changes.few(self.site, x)
        around = Around(plus=after.plus, overwrite=after.overwrite, change=change)
        return few_rows(x, self._weight, around)

    def _change(self, x: Normed, changes: ChangedRows | None) -> Reduced | None:
        return None if changes is None else changes.few(self.site, x.raw, x.weight)

    def _few(self, x: torch.Tensor) -> bool:
        """Return True if `few_rows` multiplies; decoders' projections have no bias."""
        return self._bias is None and not self._weight.is_mkldnn and serves(x, self._weight)

    def _few_normed(self, x: Normed) -> bool:
        """Return True if one launch takes the norm too; float16 has no room for rows before it."""
        return x.raw.dtype != torch.float16 and self._few(x.raw)

    def _gated(self, up: Linear, x: torch.Tensor, deterministic: bool) -> torch.Tensor:
        if not self._weight.is_mkldnn:
            gate = self(x, deterministic=deterministic)
            return silu_times(gate, up(x, deterministic=deterministic))
        gate = self(x, activation="silu", deterministic=deterministic)
        return up(x, times=gate, deterministic=deterministic)

    def _partial(self, x: torch.Tensor, deterministic: bool) -> torch.Tensor:
        if x.dtype == torch.float32:
            return self(x, deterministic=deterministic)
        weight = self._weight.to_dense() if self._weight.is_mkldnn else self._weight
        wide = weight.float() if x.device.type == "cpu" else None

        def product(rows: torch.Tensor, _: slice) -> torch.Tensor:
            if wide is not None:
                return F.linear(rows.float(), wide)
            return torch.mm(rows, weight.T, out_dtype=torch.float32)

        out = in_tiles(x, product) if deterministic else product(x, slice(None))
        return out if self._bias is None else out + self._bias.float()

    @property
    def nbytes(self) -> int:
        return self._bytes + (0 if self._bias is None else self._bias.nbytes)

    def _product(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, after: Epilogue
    ) -> torch.Tensor:
        activation, times, plus, overwrite = after
        out: torch.Tensor
        if not weight.is_mkldnn:
            if plus is not None and bias is None and x.device.type != "cpu":
                # Rounded once. Out of place, torch copies `plus` first, in a launch of its own.
                return plus.addmm_(x, weight.T) if overwrite else torch.addmm(plus, x, weight.T)
            out = F.linear(x, weight, bias)
            if activation is not None:
                out = _ACTIVATIONS[activation](out)
            if times is not None:
                out = out * times
            return out if plus is None else out + plus
        if times is not None:
            out = _packed_binary(x, times, weight, bias, "mul")
        elif plus is not None:
            out = _packed_binary(x, plus, weight, bias, "add")
        else:
            post_op, algorithm = ("none", "") if activation is None else _POST_OPS[activation]
            out = _packed_unary(x, weight, bias, post_op, [], algorithm)
        return out


def in_tiles(
    x: torch.Tensor, product: Callable[[torch.Tensor, slice], torch.Tensor]
) -> torch.Tensor:
    """Multiply x `[T, K]`, padded with zeros, in calls whose number of rows does not change a row's
    bits.

    Args:
        x: the rows.
        product: of some rows, which are these of the padded ones.
    """
    rows, padded = x.shape[0], _padded(x.shape[0], x.device)
    x = with_rows(x, padded)
    step = padded if x.device.type == "cpu" else ROWS_AT_ONCE
    tiles = [
        product(x[own], own)
        for own in (slice(first, first + step) for first in range(0, padded, step))
    ]
    return (tiles[0] if len(tiles) == 1 else torch.cat(tiles))[:rows]


def _padded(rows: int, device: torch.device) -> int:
    """Return the rows of whole tiles, at least one."""
    least = MIN_ROWS if device.type == "cpu" else ROWS_AT_ONCE
    return max(1, -(-rows // least)) * least


def with_rows(part: torch.Tensor, rows: int) -> torch.Tensor:
    if part.shape[0] == rows:
        return part
    return torch.cat([part, part.new_zeros(rows - part.shape[0], *part.shape[1:])])


def _packable_dtypes() -> tuple[torch.dtype, ...]:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return ()
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return (torch.float32, torch.bfloat16)
    return (torch.float32,)


# Resolved once: the lookup of an overload costs more than a small product.
_packed_unary = torch.ops.mkldnn._linear_pointwise.default
_packed_binary = torch.ops.mkldnn._linear_pointwise.binary
