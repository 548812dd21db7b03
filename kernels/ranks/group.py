"""Ranks of a torch.distributed process group: NCCL between GPUs, gloo between CPUs."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from vlm_serve.kernels.native_library import RanksApartError
from vlm_serve.kernels.ranks.base import Ranks, in_order


class GroupRanks(Ranks):
    """Ranks of a process group; see `Ranks`. They meet in a file and bind to loopback alone.

    Parts are gathered and then added by us. With three ranks or more, a library's own sum takes
    them in an order that depends on the size of the message, and so on the rest of the step.

    Args:
        rank, size: as in `Ranks`.
        store: file for the rendezvous, the same for all; the first rank creates it.
        device: of the tensors to exchange.
        limit: seconds that a rank waits for the others. After a timeout the group is unusable.
    """

    # Collectives carry no number of their step: the first one of the next step would meet those
    # that other ranks have queued for the failed one, and sum what does not belong together.
    begins_again = False

    def __init__(
        self, rank: int, size: int, store: Path, device: torch.device, *, limit: float
    ) -> None:
        super().__init__(rank, size)
        self._device = device
        gloo = device.type == "cpu"
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "gloo" if gloo else "nccl",
            store=FileStore(str(store), size),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=limit),
            device_id=None if gloo else device,
        )

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        return in_order(self._gather(part.contiguous(), [part.shape[1]] * self.size))

    def columns(self, part: torch.Tensor, count: int) -> torch.Tensor:
        widths = [len(Ranks(rank, self.size).share(count)) for rank in range(self.size)]
        widest = max(widths)
        padded = part.new_zeros(len(part), widest)
        padded[:, : part.shape[1]] = part
        parts = self._gather(padded, [widest] * self.size)
        if self.rank:
            return part
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], 1)

    def broadcast(self, tensor: torch.Tensor | None, root: int, like: torch.Tensor) -> torch.Tensor:
        out = tensor
        if out is None:
            out = torch.empty(like.shape, dtype=like.dtype, device=self._device)
        out = out.contiguous()
        try:
            dist.broadcast(out, root)
        except RuntimeError as error:
            raise RanksApartError(str(error)) from error
        return out

    def close(self) -> None:
        dist.destroy_process_group()

    def _gather(self, part: torch.Tensor, widths: list[int]) -> list[torch.Tensor]:
        parts = [part.new_empty(len(part), width) for width in widths]
        try:
            dist.all_gather(parts, part)
        except RuntimeError as error:
            raise RanksApartError(str(error)) from error
        return parts
