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


class DecodeBuffers:
    """Inputs of a decode step of exactly `size` sequences, padding included.

    Attributes:
        batch: what the model is given. The host's values in `batch.decode` are no step's: they are
            the largest that a step may have, since they size grids and scratch memory. All that a
            step has of its own is in tensors.
    """

    def __init__(self, size: int, limits: DecodeLimits, device: torch.device) -> None:
        self._limits = limits
        self._wide = FixedTables(
            {"token_ids": (size,), "positions": (3, size), "slots": (size,)}, torch.int64, device
        )
        self._narrow = FixedTables(
            {
                **dict.fromkeys(("kv_lens", "src_rows", "dst_rows", "snapshot_rows"), (size,)),
                "block_tables": (size, limits.max_blocks),
            },
            torch.int32,
            device,
        )
        self.batch = ForwardBatch(
            token_ids=self._wide.fixed["token_ids"],
            positions=self._wide.fixed["positions"],
            slots=self._wide.fixed["slots"],
            decode=DecodeMeta(
                block_tables=((0,) * limits.max_blocks,) * size,
                kv_lens=(limits.max_blocks * limits.block_size,) * size,
                src_rows=(-1,) * size,
                dst_rows=tuple(range(size)),
                snapshot_rows=(-1,) * size,
                tensors=dict(self._narrow.fixed),
            ),
            prefill=None,
            media=(),
            logit_rows=torch.arange(size, device=device),
        )
        self._pad(0, 0)
        self._wide.send()
        self._narrow.send()

    def fill(self, batch: ForwardBatch) -> None:
        """Takes over a decode step whose tensors are on the host, at most `size` sequences."""
        meta = batch.decode
        assert meta is not None, "only decode steps have fixed inputs"
        count = len(meta)
        wide, narrow = self._wide.staged, self._narrow.staged
        wide["token_ids"][:count] = batch.token_ids
        wide["positions"][:, :count] = batch.positions
        wide["slots"][:count] = batch.slots
        for name in ("kv_lens", "src_rows", "dst_rows", "snapshot_rows"):
            narrow[name][:count] = torch.tensor(getattr(meta, name))
        for row, (table, length) in enumerate(zip(meta.block_tables, meta.kv_lens, strict=True)):
            # What stays behind them names blocks that exist, and nothing reads it.
            used = -(-length // self._limits.block_size)
            narrow["block_tables"][row].numpy()[:used] = table[:used]
        self._pad(count, meta.block_tables[0][0])
        self._wide.send()
        self._narrow.send()

    def _pad(self, first: int, block: int) -> None:
        wide, narrow = self._wide.staged, self._narrow.staged
        wide["token_ids"][first:] = 0
        wide["positions"][:, first:] = 0
        wide["slots"][first:] = -1
        narrow["kv_lens"][first:] = 1
        narrow["src_rows"][first:] = -1
        narrow["dst_rows"][first:] = self._limits.scratch_row
        narrow["snapshot_rows"][first:] = -1
        narrow["block_tables"][first:, 0] = block
