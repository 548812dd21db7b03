"""The inputs of a decode step at addresses that never change, so that a captured graph reads them.

A step's sequences are followed by padding up to the size that was captured. Padding is harmless: it
starts from zero state, leaves its state in a scratch row that no sequence reads, attends to the
first key of the first sequence and writes no K and V. Nothing in it is random memory, so it stays
finite.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from vlm_serve.kernels.metadata import DecodeMeta
from vlm_serve.models.batch import ForwardBatch

_ALIGNMENT = 16
"""Bytes at which tables start: Triton specialises kernels on the alignment of their pointers."""


class FixedTables:
    """Integer tables of fixed shapes on a device, sent from the host in one transfer.

    Attributes:
        staged: the tables on the host, to be filled.
        fixed: the tables on the device.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device
    ) -> None:
        step = _ALIGNMENT // dtype.itemsize
        places, total = {}, 0
        for name, shape in shapes.items():
            places[name] = total
            total += -(-torch.Size(shape).numel() // step) * step
        # Both are read and written inside and outside of inference mode.
        with torch.inference_mode(False):
            self._host = torch.zeros(total, dtype=dtype, pin_memory=device.type == "cuda")
            self._device = torch.zeros(total, dtype=dtype, device=device)

        def carve(flat: torch.Tensor) -> dict[str, torch.Tensor]:
            return {
                name: flat[place : place + torch.Size(shapes[name]).numel()].view(shapes[name])
                for name, place in places.items()
            }

        self.staged, self.fixed = carve(self._host), carve(self._device)

    def send(self) -> None:
        """Starts the transfer. The host's tables may be filled again once work queued behind it has
        finished: a step reads its tokens back before the next one begins."""
        self._device.copy_(self._host, non_blocking=True)


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """What the sequences of every step stay within.

    Attributes:
        block_size: tokens per KV block.
        max_blocks: blocks of the longest sequence.
        scratch_row: state row that padding writes to.
    """

    block_size: int
    max_blocks: int
    scratch_row: int


class DecodeTables:
    """The tables of `size` decoding sequences, padding included.

    Attributes:
        meta: what ops are given. Its host values are no step's: they are the largest that a step
            may have, since they size grids and scratch memory. All that a step has of its own is
            in tensors.
    """

    def __init__(self, size: int, limits: DecodeLimits, device: torch.device) -> None:
        self._limits = limits
        self._tables = FixedTables(
            {
                **dict.fromkeys(("kv_lens", "src_rows", "dst_rows", "snapshot_rows"), (size,)),
                "block_tables": (size, limits.max_blocks),
            },
            torch.int32,
            device,
        )
        self.meta = DecodeMeta(
            block_tables=((0,) * limits.max_blocks,) * size,
            kv_lens=(limits.max_blocks * limits.block_size,) * size,
            src_rows=(-1,) * size,
            dst_rows=tuple(range(size)),
            snapshot_rows=(-1,) * size,
            tensors=dict(self._tables.fixed),
        )
        self.fill(None)

    def fill(self, meta: DecodeMeta | None) -> None:
        """Takes over at most `size` sequences, or none."""
        count, staged = 0 if meta is None else len(meta), self._tables.staged
        if meta is not None:
            for name in ("kv_lens", "src_rows", "dst_rows", "snapshot_rows"):
                staged[name][:count] = torch.tensor(getattr(meta, name))
            for row, (table, length) in enumerate(
                zip(meta.block_tables, meta.kv_lens, strict=True)
            ):
                # What stays behind them names blocks that exist, and nothing reads it.
                used = -(-length // self._limits.block_size)
                staged["block_tables"][row].numpy()[:used] = table[:used]
        staged["kv_lens"][count:] = 1
        staged["src_rows"][count:] = -1
        staged["dst_rows"][count:] = self._limits.scratch_row
        staged["snapshot_rows"][count:] = -1
        staged["block_tables"][count:, 0] = meta.block_tables[0][0] if meta is not None else 0
        self._tables.send()


class TokenBuffers:
    """Token ids, positions and slots of `size` tokens; a slot of -1 is written nowhere.

    Attributes:
        token_ids, positions, slots: on the device, see `ForwardBatch`.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._tables = FixedTables(
            {"token_ids": (size,), "positions": (3, size), "slots": (size,)}, torch.int64, device
        )
        fixed = self._tables.fixed
        self.token_ids, self.positions = fixed["token_ids"], fixed["positions"]
        self.slots = fixed["slots"]

    def fill(self, batch: ForwardBatch | None, *places: tuple[slice, int]) -> None:
        """Takes over runs of a batch's tokens, each to begin at a place; the others are padding."""
        staged = self._tables.staged
        staged["token_ids"].zero_()
        staged["positions"].zero_()
        staged["slots"].fill_(-1)
        for run, first in places:
            assert batch is not None
            own = slice(first, first + run.stop - run.start)
            staged["token_ids"][own] = batch.token_ids[run]
            staged["positions"][:, own] = batch.positions[:, run]
            staged["slots"][own] = batch.slots[run]
        self._tables.send()


class DecodeBuffers:
    """Inputs of a decode step of exactly `size` sequences, padding included.

    Attributes:
        batch: what the model is given.
    """

    def __init__(self, size: int, limits: DecodeLimits, device: torch.device) -> None:
        self._tokens = TokenBuffers(size, device)
        self._decode = DecodeTables(size, limits, device)
        self.batch = ForwardBatch(
            token_ids=self._tokens.token_ids,
            positions=self._tokens.positions,
            slots=self._tokens.slots,
            decode=self._decode.meta,
            prefill=None,
            media=(),
            logit_rows=torch.arange(size, device=device),
        )
        self._tokens.fill(None)

    def fill(self, batch: ForwardBatch) -> None:
        """Takes over a decode step whose tensors are on the host, at most `size` sequences."""
        assert batch.decode is not None, "only decode steps have fixed inputs"
        self._tokens.fill(batch, (slice(0, len(batch.decode)), 0))
        self._decode.fill(batch.decode)
