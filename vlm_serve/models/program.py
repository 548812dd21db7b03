"""A forward as a program of operations, for compiled code; `native/program.h` says what they do."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import ClassVar

import torch

from vlm_serve.kernels.linear import Linear, WeightRecord
from vlm_serve.kernels.native_layout import constant, mirrors
from vlm_serve.kernels.native_records import DTYPES, LANES, fields

STORE, ADD = constant("STORE", 0), constant("ADD", 1)
SCORES, LOGITS = constant("SCORES", 2), constant("LOGITS", 3)


class UnsupportedError(Exception):
    """Compiled code cannot run this model; the message says why."""


@mirrors("View")
class View(ctypes.Structure):
    """`stride` elements of a buffer are a token's row; the view begins at `column`."""

    _fields_ = fields(ctypes.c_int64, "buffer", "column", "stride")
    buffer: int
    column: int
    stride: int

    def at(self, column: int) -> View:
        """The same rows from another column on."""
        return View(self.buffer, self.column + column, self.stride)


class Record(ctypes.Structure):
    """The arguments of an operation."""

    kind: ClassVar[int]


@mirrors("Norm")
class NormRecord(Record):
    kind = constant("NORM", 0)
    _fields_ = (
        *fields(View, "x", "out"),
        ("width", ctypes.c_int64),
        ("factors", ctypes.c_void_p),
        ("eps", ctypes.c_double),
    )


@mirrors("Rotations")
class RotationsRecord(Record):
    kind = constant("ROTATIONS", 1)
    _fields_ = (
        *fields(View, "cos", "sin"),
        ("half", ctypes.c_int64),
        *fields(ctypes.c_void_p, "inv_freq", "axis"),
    )


@mirrors("Product")
class ProductRecord(Record):
    kind = constant("PRODUCT", 2)
    _fields_ = (("weight", WeightRecord), *fields(View, "x", "out"), ("use", ctypes.c_int64))


@mirrors("Gated")
class GatedRecord(Record):
    kind = constant("GATED", 3)
    _fields_ = (*fields(WeightRecord, "gate", "up"), *fields(View, "x", "out"))


@mirrors("DeltaNet")
class DeltaNetRecord(Record):
    kind = constant("DELTA_NET", 4)
    _fields_ = (
        *fields(View, "x", "out"),
        *fields(ctypes.c_int64, "key_heads", "value_heads", "key_dim", "value_dim", "taps"),
        *fields(ctypes.c_int64, "tail_stride", "state_stride"),
        *fields(ctypes.c_void_p, "conv", "neg_decay", "dt_bias", "norm", "tails", "states"),
        ("eps", ctypes.c_double),
    )


@mirrors("Heads")
class HeadsRecord(Record):
    kind = constant("HEADS", 5)
    _fields_ = (
        *fields(View, "x", "cos", "sin"),
        *fields(ctypes.c_int64, "heads", "kv_heads", "head_dim", "half"),
        *fields(ctypes.c_int64, "block_size", "block_stride", "token_stride"),
        *fields(ctypes.c_void_p, "q_norm", "k_norm", "k_pages", "v_pages"),
        ("eps", ctypes.c_double),
    )


@mirrors("Attend")
class AttendRecord(Record):
    kind = constant("ATTEND", 6)
    _fields_ = (
        *fields(View, "q", "out"),
        *fields(ctypes.c_int64, "heads", "kv_heads", "head_dim"),
        *fields(ctypes.c_int64, "block_size", "block_stride", "token_stride"),
        *fields(ctypes.c_void_p, "k_pages", "v_pages"),
        ("scale", ctypes.c_double),
    )


@mirrors("Sigmoid")
class SigmoidRecord(Record):
    kind = constant("SIGMOID", 7)
    _fields_ = (*fields(View, "x", "gate"), ("width", ctypes.c_int64))


@mirrors("Keep")
class KeepRecord(Record):
    kind = constant("KEEP", 8)
    _fields_ = (
        *fields(View, "residual", "x"),
        *fields(ctypes.c_int64, "residual_width", "width", "reporting"),
    )


@mirrors("Experts")
class ExpertsRecord(Record):
    kind = constant("EXPERTS", 9)
    _fields_ = (
        *fields(View, "x", "scores", "shared", "out"),
        *fields(ctypes.c_int64, "experts", "top_k", "hidden", "index"),
        *fields(ctypes.c_void_p, "gate_up", "down"),
        ("shared_down", WeightRecord),
    )


@mirrors("Op")
class OpRecord(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int64), ("args", ctypes.c_void_p))


@mirrors("Program")
class ProgramRecord(ctypes.Structure):
    _fields_ = (
        *fields(ctypes.c_void_p, "ops", "widths"),
        *fields(ctypes.c_int64, "count", "buffers", "hidden", "vocab", "residual", "deepest"),
        *fields(ctypes.c_int64, "expert_layers", "top_k"),
    )


class Program:
    """Takes operations one after the other, and keeps all that they point to.

    Args:
        dtype: of activations.
        hidden: width of the residual.

    Attributes:
        residual: float32, what layers add to; it begins as the embeddings.
        normed: where norms of the residual go.
        cos, sin: float32, angles of every token, once `rotate` has been called.

    Raises:
        UnsupportedError: from every method: a size, type or layout that compiled code does not
            know.
    """

    def __init__(self, dtype: torch.dtype, hidden: int) -> None:
        if dtype not in DTYPES:
            raise UnsupportedError(f"activations in {dtype}")
        self.dtype = dtype
        self._hidden = hidden
        self._vocab = self._deepest = self._expert_layers = self._top_k = 0
        self._ops: list[Record] = []
        self._alive: list[object] = []
        self._names: dict[str, int] = {}
        self._widths: list[int] = []
        self.check_whole(hidden_size=hidden)
        self.residual = self.view("residual", hidden, torch.float32)
        self.normed = self.view("normed", hidden)

    def check_whole(self, **sizes: int) -> None:
        """Rows are worked on in whole vectors."""
        for name, size in sizes.items():
            if size % LANES:
                raise UnsupportedError(f"{name} is {size}, not a multiple of {LANES}")

    def view(self, name: str, width: int, dtype: torch.dtype | None = None) -> View:
        """Rows of so many elements in the buffer of that name, which is made wide enough."""
        index = self._names.setdefault(name, len(self._widths))
        if index == len(self._widths):
            self._widths.append(0)
        stride = -(-width // LANES) * LANES if dtype is None else width
        num_bytes = stride * (dtype or self.dtype).itemsize
        self._widths[index] = max(self._widths[index], num_bytes)
        return View(index, 0, stride)

    def emit(self, record: Record) -> None:
        """Adds an operation."""
        self._ops.append(record)

    def rotate(self, inv_freq: torch.Tensor, axis: torch.Tensor) -> None:
        """Angles of every token: frequencies float32 `[half]`, and int32 `[half]`, the row of the
        positions that each takes."""
        half = len(inv_freq)
        self.cos = self.view("cos", half, torch.float32)
        self.sin = self.view("sin", half, torch.float32)
        self._alive += inv_freq, axis
        tables = {"inv_freq": inv_freq.data_ptr(), "axis": axis.data_ptr()}
        self.emit(RotationsRecord(cos=self.cos, sin=self.sin, half=half, **tables))

    def norm(self, weight: torch.Tensor, eps: float) -> None:
        """The residual's norm, to `normed`."""
        factors = self.factors(weight)
        self.emit(NormRecord(self.residual, self.normed, self._hidden, factors, eps))

    def product(self, weight: Linear, x: View, out: View, use: int = STORE) -> None:
        """A projection of all rows."""
        self.emit(ProductRecord(self.weight(weight), x, out, use))

    def add(self, weight: Linear, x: View) -> None:
        """Adds a projection to the residual."""
        self.product(weight, x, self.residual, ADD)

    def logits(self, head: Linear) -> None:
        """The step's logits, from `normed`."""
        self._vocab = head.columns
        self.product(head, self.normed, View(), LOGITS)

    def gated(self, gate: Linear, up: Linear) -> View:
        """silu(gate(normed)) * up(normed)."""
        self.check_whole(intermediate_size=gate.columns)
        hidden = self.view("hidden", gate.columns)
        self.emit(GatedRecord(self.weight(gate), self.weight(up), self.normed, hidden))
        return hidden

    def keep(self, x: View, width: int, *, reporting: bool = False) -> None:
        """From here on only rows with wanted logits matter, of the residual and of x; in steps that
        report routed experts, or in all others."""
        self.emit(KeepRecord(self.residual, x, self._hidden, width, reporting))

    def next_expert_layer(self, top_k: int) -> int:
        """The place of another layer's choice in what a step reports."""
        self._top_k = top_k
        self._expert_layers += 1
        return self._expert_layers - 1

    def weight(self, weight: Linear) -> WeightRecord:
        """A projection's record."""
        record = weight.record()
        if record is None:
            raise UnsupportedError("weights that torch multiplies by")
        if self.dtype == torch.bfloat16 != weight.dtype:
            raise UnsupportedError(f"bfloat16 activations beside weights in {weight.dtype}")
        self._alive.append(weight)
        self._deepest = max(self._deepest, weight.depth)
        return record

    def weights(self, weights: Sequence[Linear]) -> int:
        """The address of several projections' records."""
        records = (WeightRecord * len(weights))(*map(self.weight, weights))
        self._alive.append(records)
        return ctypes.addressof(records)

    def factors(self, norm: torch.Tensor) -> int:
        """The address of a norm's factors."""
        return self.vector(norm.float() + 1.0)

    def vector(self, values: torch.Tensor) -> int:
        """The address of a float32 copy."""
        own = values.float().contiguous()
        self._alive.append(own)
        return own.data_ptr()

    def record(self) -> ProgramRecord:
        """The whole program; it lives as long as this."""
        ops = (OpRecord * len(self._ops))(
            *(OpRecord(each.kind, ctypes.addressof(each)) for each in self._ops)
        )
        widths = (ctypes.c_int64 * len(self._widths))(*self._widths)
        self._alive += ops, widths
        return ProgramRecord(
            ops=ctypes.addressof(ops),
            widths=ctypes.addressof(widths),
            count=len(ops),
            buffers=len(widths),
            hidden=self._hidden,
            vocab=self._vocab,
            residual=self.residual.buffer,
            deepest=self._deepest,
            expert_layers=self._expert_layers,
            top_k=self._top_k,
        )
