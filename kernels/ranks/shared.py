"""Ranks of one host in shared memory; compiled steps and ops use the same slots and barrier."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import tempfile
from pathlib import Path

import torch

from vlm_serve.kernels.native_layout import constant, struct
from vlm_serve.kernels.native_library import call
from vlm_serve.kernels.ranks.base import Ranks, in_order

_HEADER = constant("HEADER_BYTES")
_Record = struct("Ranks")
MAX_RANKS = constant("MAX_RANKS")
_SPINS = 2000
ENDED = (1 << 63) // constant("MAX_BARRIERS") - 1
"""A step after every other: aborting it ends all steps."""


class SharedMemory:
    """The shared file, mapped by this rank. Untouched pages cost nothing.

    Args:
        path: file made by `create`.
        size: number of ranks.
        slot_bytes: size of a slot; each rank has two.
    """

    def __init__(self, path: Path, size: int, slot_bytes: int) -> None:
        self.path, self.size, self.slot_bytes = path, size, slot_bytes
        with path.open("r+b") as file:
            self.memory = mmap.mmap(file.fileno(), _bytes(size, slot_bytes))

    @classmethod
    def create(cls, size: int, slot_bytes: int) -> SharedMemory:
        """Create a file of zeros that only this user can open, and map it."""
        slot_bytes = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        descriptor, name = tempfile.mkstemp(prefix=f"vlm-serve-ranks-{os.getpid()}-", dir=folder)
        try:
            with os.fdopen(descriptor, "r+b") as file:
                file.truncate(_bytes(size, slot_bytes))
            return cls(Path(name), size, slot_bytes)
        except BaseException:
            # Too many bytes: the file would stay in memory until the machine ends.
            os.unlink(name)
            raise

    def unlink(self) -> None:
        """Unlink the file: no other process can open it; it lasts as long as its mappings."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()


def _bytes(size: int, slot_bytes: int) -> int:
    return _HEADER + 2 * size * slot_bytes


class SharedRanks(Ranks):
    """Ranks in shared memory; see `Ranks` and `native/ranks.h`.

    Only one thread of a process takes part in exchanges.

    Args:
        rank: 0 ... size - 1.
        memory: shared by all ranks.
        limit: seconds that a rank waits for the others.
        threads: threads of each rank's model.

    Raises:
        BuildError: there are no compiled kernels.
    """

    def __init__(self, rank: int, memory: SharedMemory, *, limit: float, threads: int = 1) -> None:
        super().__init__(rank, memory.size)
        self._memory = memory
        self._bytes = torch.frombuffer(memory.memory, dtype=torch.uint8)
        self._record = _Record(
            rank=rank,
            size=memory.size,
            slot_bytes=memory.slot_bytes,
            limit=int(limit * 1e9),
            spins=_SPINS if threads * memory.size <= len(os.sched_getaffinity(0)) else 0,
            shared=self._bytes.data_ptr(),
        )
        self._step = 0

    def begin(self, step: int) -> None:
        self._step = step
        call("vlm_ranks_begin", ctypes.byref(self._record), step)

    def abort(self) -> None:
        call("vlm_ranks_give_up", ctypes.byref(self._record), self._step)

    def end(self) -> None:
        """Abort this step and all later ones; callable from any thread."""
        call("vlm_ranks_give_up", ctypes.byref(self._record), ENDED)

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        if not len(part):
            return part
        return torch.cat([self._sum(some) for some in torch.split(part, self._rows(part))])

    def _sum(self, part: torch.Tensor) -> torch.Tensor:
        slots = self._exchange(part)
        return in_order([slot.view(torch.float32).view(part.shape) for slot in slots])

    def columns(self, part: torch.Tensor, count: int) -> torch.Tensor:
        widest = -(-count // self.size)
        rows = max(1, self._memory.slot_bytes // (4 * widest))
        out = part if self.rank else part.new_empty(len(part), count)
        for first in range(0, len(part), rows):
            some = part[first : first + rows].contiguous()
            self._place(some)
            self._barrier()
            if self.rank == 0:
                self._take(out[first : first + rows], count)
        return out

    def _take(self, out: torch.Tensor, count: int) -> None:
        for rank in range(self.size):
            share = Ranks(rank, self.size).share(count)
            size = 4 * len(out) * len(share)
            values = self._slot(rank, self._record.count - 1)[:size].view(torch.float32)
            out[:, share.start : share.stop] = values.view(len(out), len(share))

    def broadcast(self, tensor: torch.Tensor | None, root: int, like: torch.Tensor) -> torch.Tensor:
        out = torch.empty(like.shape, dtype=like.dtype) if tensor is None else tensor.contiguous()
        whole, size = out.view(-1).view(torch.uint8), self._memory.slot_bytes
        for piece in torch.split(whole, size):
            if self.rank == root:
                self._slot(root, self._record.count)[: len(piece)] = piece
            self._barrier()
            if self.rank != root:
                piece.copy_(self._slot(root, self._record.count - 1)[: len(piece)])
        return out

    def record(self) -> ctypes.Structure:
        return self._record

    def _rows(self, part: torch.Tensor) -> int:
        return max(1, self._memory.slot_bytes // (4 * part.shape[1]))

    def _exchange(self, part: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's part; the views are valid until the next exchange but one."""
        size = self._place(part)
        self._barrier()
        count = self._record.count - 1
        return [self._slot(rank, count)[:size] for rank in range(self.size)]

    def _place(self, part: torch.Tensor) -> int:
        raw = part.contiguous().view(-1).view(torch.uint8)
        self._slot(self.rank, self._record.count)[: len(raw)] = raw
        return len(raw)

    def _barrier(self) -> None:
        call("vlm_ranks_barrier", ctypes.byref(self._record))

    def _slot(self, rank: int, count: int) -> torch.Tensor:
        size = self._memory.slot_bytes
        first = _HEADER + (2 * rank + count % 2) * size
        return self._bytes[first : first + size]
