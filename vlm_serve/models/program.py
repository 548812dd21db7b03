"""A forward as a program of operations for compiled code; `native/program.h` defines them."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from vlm_serve.kernels.causal_conv.compiled import MAX_TAPS
from vlm_serve.kernels.causal_conv.reference import Behind
from vlm_serve.kernels.linear import Joined, Linear, WeightRecord
from vlm_serve.kernels.native_layout import constant, struct
from vlm_serve.kernels.native_records import DTYPES, LANES
from vlm_serve.kernels.ranks import ALONE, Ranks

_OF_STATES = ("DeltaNet", "ShortConv", "Scan")


class UnsupportedError(Exception):
    """Compiled code cannot run this model; the message says why."""


class View(NamedTuple):
    """A token's row in a buffer: `stride` elements from one to the next, from `column` on."""

    buffer: int = 0
    column: int = 0
    stride: int = 0

    def at(self, column: int) -> View:
        """Return the same rows from another column on."""
        return View(self.buffer, self.column + column, self.stride)


class Program:
    """Collects operations in order, and keeps everything that they point to alive.

    Args:
        dtype: of activations.
        hidden: width of the residual.
        ranks: the ranks that share the model.
        first_key: slots of a sequence's table before its first key.

    Attributes:
        residual: float32, the sum that layers add to; it begins as the embeddings.
        normed: destination of norms of the residual.
        shared: whether ranks share the model.
        cos, sin: float32, angles of every token, once `rotate` has been called.
        reports_hidden: whether `hidden` has been called.
        looks_up: whether `look_up` has been called.

    Raises:
        UnsupportedError: from every method: a size, dtype or layout that compiled code does not
            support.
    """

    def __init__(
        self, dtype: torch.dtype, hidden: int, ranks: Ranks = ALONE, *, first_key: int = 0
    ) -> None:
        if dtype not in DTYPES:
            raise UnsupportedError(f"activations in {dtype}")
        self.dtype = dtype
        self.first_key = first_key
        self.reports_hidden = self.looks_up = False
        self.shared = ranks.shared
        self._ranks = ranks.record()
        if ranks.shared and self._ranks is None:
            raise UnsupportedError("ranks that do not share memory")
        self._hidden = hidden
        self._vocab = self._deepest = self._expert_layers = self._top_k = 0
        self._embeddings: torch.Tensor | None = None
        self._ops: list[tuple[int, Any]] = []
        self._alive: list[object] = []
        self._names: dict[str, int] = {}
        self._widths: list[int] = []
        self.check_whole(hidden_size=hidden)
        self.residual = self.view("residual", hidden, torch.float32)
        self.normed = self.view("normed", hidden)

    def check_whole(self, **sizes: int) -> None:
        """Check that rows consist of whole vectors."""
        for name, size in sizes.items():
            if size % LANES:
                raise UnsupportedError(f"{name} is {size}, not a multiple of {LANES}")

    def view(self, name: str, width: int, dtype: torch.dtype | None = None) -> View:
        """Return rows of so many elements in the buffer of that name, which is widened as
        needed."""
        index = self._names.setdefault(name, len(self._widths))
        if index == len(self._widths):
            self._widths.append(0)
        stride = -(-width // LANES) * LANES if dtype is None else width
        num_bytes = stride * (dtype or self.dtype).itemsize
        self._widths[index] = max(self._widths[index], num_bytes)
        return View(index, 0, stride)

    def emit(self, operation: str, **arguments: Any) -> None:
        """Append an operation, by the name of its struct, with that struct's fields."""
        kind = struct(operation)
        assert arguments.keys() <= {field[0] for field in kind._fields_}, f"no such {operation}"
        self._ops.append((_number(operation), kind(**arguments)))

    def convolution(
        self,
        conv: torch.Tensor,
        behind: Behind,
        x: View,
        out: View,
        tails: torch.Tensor,
        inputs: torch.Tensor | None,
    ) -> None:
        """Append a convolution: with SiLU, or without it and between the products by element."""
        (channels, taps), bias = conv.shape, behind.bias
        if taps > MAX_TAPS:
            raise UnsupportedError(f"convolutions of {taps} taps")
        self.emit(
            "ShortConv",
            x=x,
            out=out,
            channels=channels,
            taps=taps,
            products=not behind.silu,
            tail_stride=tails.stride(0),
            input_stride=0 if inputs is None else inputs.stride(0),
            conv=self.vector(conv.T),
            bias=None if bias is None else self.vector(bias),
            tails=tails.data_ptr(),
            inputs=None if inputs is None else inputs.data_ptr(),
        )

    def look_up(self, embeddings: torch.Tensor) -> None:
        """Let steps take tokens without embeddings, which are rows of this table: `[known tokens,
        hidden]`, in the dtype of activations."""
        assert embeddings.dtype == self.dtype and embeddings.is_contiguous()
        self._embeddings, self.looks_up = embeddings, True

    def rotate(self, inv_freq: torch.Tensor, axis: torch.Tensor, scale: float = 1.0) -> None:
        """Append the angles of every token: frequencies float32 `[half]`, and int32 `[half]`,
        the row of positions for each. `scale`: factor of cosines and sines."""
        half = len(inv_freq)
        self.cos = self.view("cos", half, torch.float32)
        self.sin = self.view("sin", half, torch.float32)
        self._alive += inv_freq, axis
        tables = {"inv_freq": inv_freq.data_ptr(), "axis": axis.data_ptr()}
        self.emit("Rotations", cos=self.cos, sin=self.sin, half=half, scale=scale, **tables)

    def norm(self, weight: torch.Tensor, eps: float) -> None:
        """Append the residual's norm, to `normed`."""
        factors, width = self.factors(weight), self._hidden
        self.emit("Norm", x=self.residual, out=self.normed, width=width, factors=factors, eps=eps)

    def product(self, weight: Linear, x: View, out: View, use: str = "STORE") -> None:
        """Append a projection of all rows; `use` selects its destination."""
        for part in weight.parts if isinstance(weight, Joined) else (weight,):
            record = self.weight(part)
            self.emit("Product", weight=record, x=x, out=out, use=constant(use), site=part.site)
            out = out.at(part.columns)

    def add(self, weight: Linear, x: View) -> None:
        """Append a projection added to the residual; each rank multiplies its part of x."""
        self.product(weight, x, self.residual, "SHARED" if self.shared else "ADD")
        self.reduce()

    def reduce(self) -> None:
        """Append the sum of all ranks' last results to the residual."""
        if self.shared:
            self.emit("Reduce", out=self.residual, width=self._hidden)

    def logits(self, head: Linear) -> None:
        """Append the step's logits, from `normed`."""
        self._vocab = head.columns
        self.product(head, self.normed, View(), "LOGITS")

    def hidden(self) -> None:
        """Append the step's hidden states, from `normed`."""
        self.reports_hidden = True
        self.emit("Hidden", x=self.normed, width=self._hidden, stride=self._hidden)

    def gated(self, gate: Linear, up: Linear) -> View:
        """Append silu(gate(normed)) * up(normed)."""
        self.check_whole(intermediate_size=gate.columns)
        hidden = self.view("hidden", gate.columns)
        weights = {"gate": self.weight(gate), "up": self.weight(up)}
        _check_alike(*weights.values())
        sites = {"gate_site": gate.site, "up_site": up.site}
        self.emit("Gated", x=self.normed, out=hidden, **weights, **sites)
        return hidden

    def features(self, index: int) -> None:
        """Append the sum of the residual and the media features of that index."""
        column = (1 + index) * self._hidden
        self.emit("Features", out=self.residual, column=column, width=self._hidden)

    def keep(self, x: View, width: int, *, reporting: bool = False) -> None:
        """Restrict the residual and x to the rows with requested logits from here on; in steps that
        report routed experts, or in all others."""
        self.emit(
            "Keep",
            residual=self.residual,
            x=x,
            residual_width=self._hidden,
            width=width,
            reporting=reporting,
        )

    def next_expert_layer(self, top_k: int) -> int:
        """Return the index of another layer's choice in a step's report."""
        self._top_k = top_k
        self._expert_layers += 1
        return self._expert_layers - 1

    def weight(self, weight: Linear) -> ctypes.Structure:
        """Return a projection's record."""
        record = weight.record()
        if record is None:
            raise UnsupportedError("weights that torch multiplies by")
        if not weight.takes(self.dtype):
            raise UnsupportedError(f"bfloat16 activations beside weights in {weight.dtype}")
        self._alive.append(weight)
        self._deepest = max(self._deepest, weight.depth)
        return record

    def weights(self, weights: Sequence[Linear]) -> int:
        """Return the address of several projections' records."""
        records = (WeightRecord * len(weights))(*map(self.weight, weights))
        _check_alike(*records)
        self._alive.append(records)
        return ctypes.addressof(records)

    def sites(self, weights: Sequence[Linear]) -> int:
        """Return the address of the numbers under which adapters know several projections."""
        sites = (ctypes.c_int64 * len(weights))(*(weight.site for weight in weights))
        self._alive.append(sites)
        return ctypes.addressof(sites)

    def factors(self, norm: torch.Tensor | None) -> int:
        """Return the address of a norm's factors; 0: there is no norm."""
        return 0 if norm is None else self.vector(norm.float() + 1.0)

    def vector(self, values: torch.Tensor) -> int:
        """Return the address of a float32 copy."""
        copy = values.float().contiguous()
        self._alive.append(copy)
        return copy.data_ptr()

    def record(self, *, folding: bool = False) -> ctypes.Structure:
        """Return the whole program, or only its operations that fold updates into state rows; it
        lives as long as this object."""
        kind, states = struct("Op"), {_number(name) for name in _OF_STATES}
        chosen = [op for op in self._ops if not folding or op[0] in states]
        table = self._embeddings
        ops = (kind * len(chosen))(*(kind(number, ctypes.addressof(op)) for number, op in chosen))
        widths = (ctypes.c_int64 * len(self._widths))(*self._widths)
        self._alive += ops, widths
        return struct("Program")(
            ops=ctypes.addressof(ops),
            widths=ctypes.addressof(widths),
            count=len(chosen),
            buffers=len(widths),
            hidden=self._hidden,
            vocab=self._vocab,
            residual=self.residual.buffer,
            embeddings=None if table is None else table.data_ptr(),
            known=0 if table is None else len(table),
            deepest=self._deepest,
            expert_layers=self._expert_layers,
            top_k=self._top_k,
            ranks=None if self._ranks is None else ctypes.addressof(self._ranks),
        )


def _check_alike(*records: Any) -> None:
    """Check that the weights have the same operand."""
    if (
        len({(record.type, record.group, record.dynamic, bool(record.zeros)) for record in records})
        > 1
    ):
        raise UnsupportedError("weights of several formats that share an operand")


def _number(operation: str) -> int:
    return constant(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", operation).upper())
