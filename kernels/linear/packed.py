"""Base of packed weights, which compiled CPU code multiplies by.

One layout and one arithmetic serve one row and thousands: a row's bits depend on the row and the
weight alone.
"""

from __future__ import annotations

import ctypes

import torch

from vlm_serve.kernels.checks import KernelArgumentError
from vlm_serve.kernels.elementwise import compiled, reference
from vlm_serve.kernels.linear.base import Activation, Epilogue, Linear
from vlm_serve.kernels.native_layout import constant, struct
from vlm_serve.kernels.native_library import call
from vlm_serve.kernels.native_records import DTYPES, bits

PANEL = constant("PANEL")
"""Columns of a panel; the last one is padded with zeros."""
_PLAIN, _TIMES, _PLUS = constant("PLAIN"), constant("TIMES"), constant("PLUS")
_ACTIVATIONS: dict[Activation, int] = {
    "silu": constant("SILU"),
    "gelu": constant("GELU"),
    "gelu_tanh": constant("GELU_TANH"),
    "relu2": constant("RELU2"),
}

_Projection = struct("Projection")


class PackedLinear(Linear):
    """A packed weight.

    Args:
        record: describes it to compiled code.
        dtype: of its values, or of their codes.
        tensors: everything that the record points to.
    """

    def __init__(
        self, record: ctypes.Structure, dtype: torch.dtype, *tensors: torch.Tensor | None
    ) -> None:
        self.columns, self.depth, self.dtype = record.columns, record.depth, dtype
        self._record = record
        self._tensors = [tensor for tensor in tensors if tensor is not None]

    def _multiply(self, x: torch.Tensor, after: Epilogue, deterministic: bool) -> torch.Tensor:
        activation, times, plus, _ = after
        if x.dtype not in DTYPES or not self.takes(x.dtype):
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

    def _gated(self, up: Linear, x: torch.Tensor, deterministic: bool) -> torch.Tensor:
        gate, other = self(x), up(x)
        out = compiled.silu_times(gate, other)
        return reference.silu_times(gate, other) if out is None else out

    def record(self) -> ctypes.Structure:
        return self._record

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors)
