"""Dense weights in our own layout (`native/product.h`), multiplied by compiled CPU code.

One layout and one arithmetic serve one row and thousands: a row's bits depend on the row and the
weight alone. The weight stays in its own type; where the processor has no products of it, values
are widened in registers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import torch

from vlm_serve.kernels.checks import KernelArgumentError
from vlm_serve.kernels.elementwise import compiled, torch_cpu
from vlm_serve.kernels.linear.base import Activation, Linear, WeightRecord
from vlm_serve.kernels.native_layout import constant, struct
from vlm_serve.kernels.native_library import call
from vlm_serve.kernels.native_records import DTYPES, bits

PANEL = constant("PANEL")
"""Columns of a panel; the last one is filled up with zeros."""
_TYPES = {
    torch.float32: constant("FLOAT32"),
    torch.bfloat16: constant("BFLOAT16"),
    torch.float16: constant("FLOAT16"),
}
_PLAIN, _TIMES, _PLUS = constant("PLAIN"), constant("TIMES"), constant("PLUS")
_ACTIVATIONS: dict[Activation, int] = {
    "silu": constant("SILU"),
    "gelu": constant("GELU"),
    "gelu_tanh": constant("GELU_TANH"),
}

_Projection = struct("Projection")
_Packing = struct("Packing")


class PackedDense(Linear):
    """A packed weight: `[ceil(N / 32), K, 32]`, or `[ceil(N / 32), ceil(K / 2), 32, 2]` of
    bfloat16.

    Args:
        packed: one-dimensional, as `of` makes it.
        columns, depth: N and K.
        bias: float32 `[N]` or None.
    """

    def __init__(
        self, packed: torch.Tensor, columns: int, depth: int, bias: torch.Tensor | None
    ) -> None:
        self.columns, self.depth, self.dtype = columns, depth, packed.dtype
        self._packed, self._bias = packed, bias
        self._record = WeightRecord(
            packed.data_ptr(),
            None if bias is None else bias.data_ptr(),
            columns,
            depth,
            _TYPES[packed.dtype],
        )

    @classmethod
    def of(
        cls,
        pieces: Iterable[torch.Tensor],
        columns: int,
        depth: int,
        dtype: torch.dtype,
        bias: torch.Tensor | None = None,
        device: torch.device | None = None,
    ) -> PackedDense:
        """Packs `[n, K]` pieces of `dtype`, one below the other.

        Raises:
            BuildError: there is no compiled code.
        """
        padded = -(-depth // 2) * 2 if dtype == torch.bfloat16 else depth
        packed = torch.zeros(-(-columns // PANEL) * PANEL * padded, dtype=dtype)
        first = 0
        for piece in pieces:
            piece = piece if piece.stride(-1) == 1 else piece.contiguous()
            job = _Packing(
                source=piece.data_ptr(),
                packed=packed.data_ptr(),
                rows=piece.shape[0],
                stride=piece.stride(0),
                depth=depth,
                first=first,
                type=_TYPES[dtype],
                threads=torch.get_num_threads(),
            )
            call("vlm_pack", ctypes.byref(job))
            first += piece.shape[0]
        return cls(packed, columns, depth, None if bias is None else bias.float().contiguous())

    def __call__(
        self,
        x: torch.Tensor,
        *,
        activation: Activation | None = None,
        times: torch.Tensor | None = None,
        plus: torch.Tensor | None = None,
        deterministic: bool = False,
    ) -> torch.Tensor:
        self._check(x, activation, times, plus)
        if x.dtype not in DTYPES or (x.dtype == torch.bfloat16 != self.dtype):
            raise KernelArgumentError("x", f"{x.dtype} beside a weight in {self.dtype}")
        x = x if x.stride(1) == 1 else x.contiguous()
        other = plus if times is None else times
        if other is not None and (other.dtype != x.dtype or other.stride(1) != 1):
            other = other.to(x.dtype).contiguous()
        use = _TIMES if times is not None else _PLUS if plus is not None else _PLAIN
        out = x.new_empty(x.shape[0], self.columns)
        job = _Projection(
            weight=self._record,
            rows=x.shape[0],
            x_stride=x.stride(0),
            other_stride=0 if other is None else other.stride(0),
            use=use if activation is None else _ACTIVATIONS[activation],
            threads=torch.get_num_threads(),
            x=x.data_ptr(),
            other=None if other is None else other.data_ptr(),
            out=out.data_ptr(),
        )
        call("vlm_linear", ctypes.byref(job), bits(x))
        return out

    def gated(self, up: Linear, x: torch.Tensor, *, deterministic: bool = False) -> torch.Tensor:
        gate, other = self(x), up(x)
        out = compiled.silu_times(gate, other)
        return torch_cpu.silu_times(gate, other) if out is None else out

    def record(self) -> ctypes.Structure:
        return self._record

    @property
    def nbytes(self) -> int:
        return self._packed.nbytes + (0 if self._bias is None else self._bias.nbytes)

    def plain(self) -> torch.Tensor:
        """The weight as it was, `[N, K]`."""
        pair = 2 if self.dtype == torch.bfloat16 else 1
        panels = self._packed.view(-(-self.columns // PANEL), -1, PANEL, pair)
        rows = panels.transpose(1, 2).flatten(2).flatten(0, 1)
        return rows[: self.columns, : self.depth]
