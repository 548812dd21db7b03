"""Ranks that share one model: their parts of it, and the exchanges between them.

base.py    the interface, and a model that is not shared
shared.py  processes of one host, in shared memory
group.py   torch.distributed: NCCL between GPUs, gloo where there are no compiled kernels
"""

from __future__ import annotations

from vlm_serve.kernels.ranks.base import ALONE, Ranks
from vlm_serve.kernels.ranks.group import GroupRanks
from vlm_serve.kernels.ranks.shared import SharedRanks

__all__ = ["ALONE", "GroupRanks", "Ranks", "SharedRanks"]
