"""Ranks that share one model: who holds which part of it, and what they tell each other.

base.py    what every way of sharing has in common; a model that is not shared
shared.py  processes of one host, in memory that they share
group.py   torch.distributed: NCCL between GPUs, gloo where there are no compiled kernels
"""

from __future__ import annotations

from vlm_serve.kernels.ranks.base import ALONE, Ranks
from vlm_serve.kernels.ranks.group import GroupRanks
from vlm_serve.kernels.ranks.shared import SharedRanks

__all__ = ["ALONE", "GroupRanks", "Ranks", "SharedRanks"]
