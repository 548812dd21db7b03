"""The compiled vision tower: pictures as one call into `native/step.cpp`.

A small picture takes a hundred short operations. Each one releases the interpreter lock and waits
to acquire it again. Between threads that are busy in Python, that takes far longer than the work.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch

from vlm_serve.kernels.linear.low_rank import AdapterChanges, RowChanges
from vlm_serve.kernels.native_layout import constant, struct
from vlm_serve.kernels.native_library import call, load
from vlm_serve.kernels.native_records import LANES
from vlm_serve.models.compiled_step import StepChanges
from vlm_serve.models.program import Program, UnsupportedError, View
from vlm_serve.models.vision_parts import EPS, Affine, Merger, VisionBlock

_Step = struct("Step")
_MAX_DIM = constant("MAX_DIM")


class CompiledTower:
    """Runs the blocks and mergers of a tower. A patch's bits depend on its own picture alone.

    Args:
        blocks, merger: weights.
        late: mergers of features, by the index of the block before them.
        dtype: of activations.
        hidden, heads: of the blocks.
        merge: patches per side of a square that becomes one token.
        inv_freq: float32 `[head_dim / 4]`, the rotary embedding's frequencies of each axis.

    Attributes:
        width: of its result, embeddings and features.

    Raises:
        UnsupportedError: a size, dtype or layout that compiled code does not support.
        BuildError: the library can be neither found nor built.
    """

    def __init__(
        self,
        blocks: Sequence[VisionBlock],
        merger: Merger,
        late: Mapping[int, Merger],
        *,
        dtype: torch.dtype,
        hidden: int,
        heads: int,
        merge: int,
        inv_freq: torch.Tensor,
    ) -> None:
        self._program = Program(dtype, hidden)
        self._hidden, self._heads, self._dim = hidden, heads, hidden // heads
        self._area = merge * merge
        if self._dim > _MAX_DIM:
            raise UnsupportedError(f"heads of {self._dim} dims, more than {_MAX_DIM}")
        self.width = merger.fc2.columns * (1 + len(late))
        axes = torch.arange(2, dtype=torch.int32).repeat_interleave(len(inv_freq))
        self._program.rotate(inv_freq.repeat(2), axes)
        features = 0
        for index, block in enumerate(blocks):
            self._add_attention(block)
            self._add_mlp(block)
            if index in late:
                features += 1
                self._add_merger(late[index], features)
        self._add_merger(merger, 0)
        self._record, self._bits = self._program.record(), 8 * dtype.itemsize
        load()

    def run(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        sizes: Sequence[int],
        changes: AdapterChanges | None = None,
    ) -> torch.Tensor:
        """Encode pictures one after the other.

        Args:
            x: `[patches, hidden]` embedded patches in the dtype of activations, contiguous.
            positions: int64 `[2, patches]`, row and column of each.
            sizes: patches of each picture.
            changes: the adapter of all of them.

        Returns:
            `[patches / merge**2, width]` in the dtype of activations.

        Raises:
            MemoryError: for pictures that are too large.
        """
        patches = len(x)
        out = torch.empty(patches // self._area, self.width, dtype=x.dtype)
        first_token = array("q", accumulate(sizes, initial=0))
        # Every patch is its own block of keys, in order.
        blocks = array("i", range(patches))
        tables = array("q", (blocks.buffer_info()[0] + 4 * first for first in first_token[:-1]))
        start = array("q", [0]) * len(sizes)
        rows = RowChanges.of_all(changes, patches)
        adapters = None if rows is None else StepChanges(rows)
        step = _Step(
            tokens=patches,
            sequences=len(sizes),
            threads=torch.get_num_threads(),
            x=x.data_ptr(),
            positions=positions.data_ptr(),
            first_token=first_token.buffer_info()[0],
            start=start.buffer_info()[0],
            tables=tables.buffer_info()[0],
            hidden=out.data_ptr(),
            **({} if adapters is None else adapters.fields()),
        )
        call("vlm_step", ctypes.byref(self._record), ctypes.byref(step), self._bits)
        return out

    def _add_attention(self, block: VisionBlock) -> None:
        program, heads, dim = self._program, self._heads, self._dim
        room = -(-dim // LANES) * LANES
        qkv = program.view("wide", 3 * self._hidden)
        turned = program.view("turned", 3 * heads * room)
        mixed = program.view("mixed", heads * room)
        self._add_norm(block.norm1, program.residual, self._hidden)
        program.product(block.qkv, program.normed, qkv)
        own = {"heads": heads, "head_dim": dim, "padded_dim": room}
        program.emit("Turn", x=qkv, cos=program.cos, sin=program.sin, out=turned, **own)
        program.emit("SeeAll", x=turned, out=mixed, heads=heads, padded_dim=room, scale=dim**-0.5)
        if room != dim:
            program.emit("Narrow", x=mixed, out=program.normed, **own)
            mixed = program.normed
        program.add(block.proj, mixed)

    def _add_mlp(self, block: VisionBlock) -> None:
        program = self._program
        wide = program.view("wide", block.fc1.columns)
        self._add_norm(block.norm2, program.residual, self._hidden)
        program.product(block.fc1, program.normed, wide, "STORE_GELU_TANH")
        program.add(block.fc2, wide)

    def _add_merger(self, merger: Merger, place: int) -> None:
        """Write a merger's tokens to its place in the step's rows."""
        program, area = self._program, self._area
        merged, columns = area * self._hidden, merger.fc2.columns
        squares = View(program.normed.buffer, 0, merged)
        wide, out = program.view("wide", merged), program.view("turned", columns)
        if not merger.late:
            self._add_norm(merger.norm, program.residual, self._hidden)
        program.emit("Squares", size=area)
        if merger.late:
            self._add_norm(merger.norm, View(program.residual.buffer, 0, merged), merged)
        program.product(merger.fc1, squares, wide, "STORE_GELU")
        program.product(merger.fc2, wide, out)
        at = {"width": columns, "column": place * columns, "stride": self.width}
        program.emit("Hidden", x=out, **at)
        program.emit("Squares", size=1)

    def _add_norm(self, norm: Affine, x: View, width: int) -> None:
        program = self._program
        program.check_whole(width=width)
        factors, offsets = program.vector(norm.weight), program.vector(norm.bias)
        out = View(program.normed.buffer, 0, x.stride)
        program.emit(
            "LayerNorm", x=x, out=out, width=width, factors=factors, offsets=offsets, eps=EPS
        )
