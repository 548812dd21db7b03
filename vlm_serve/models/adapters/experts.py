"""Routed experts that PEFT changes in one tensor (`target_parameters`), and their parts by expert.

PEFT's `ParamWrapper` takes a tensor `[experts, i, o]`. A `[experts * rank, i]` lists the ranks of
one expert after the other; B `[o, rank * experts]` the experts of one rank after the other. An
expert's change is the transpose of its B @ A. A module with two changed tensors is wrapped twice:
the first tensor's factors are named by `base_layer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from vlm_serve.errors import CheckpointError
from vlm_serve.kernels.linear.packed import PANEL
from vlm_serve.models.adapters.changes import LowRank
from vlm_serve.models.adapters.fields import CONFIG_FILE, AdapterFields
from vlm_serve.models.adapters.modules import DOWN, GATE_UP

_INNER = ".base_layer"


@dataclass(frozen=True, slots=True)
class FusedExperts:
    """The change of all experts' weights in one tensor.

    Attributes:
        a, b: PEFT's factors.
        rank: of each expert.
        scale: alpha over the rank, or over its root.
    """

    a: torch.Tensor
    b: torch.Tensor
    rank: int
    scale: float

    @property
    def count(self) -> int:
        """Number of experts."""
        return self.a.shape[0] // self.rank

    @property
    def nbytes(self) -> int:
        """Bytes of both factors."""
        return self.a.nbytes + self.b.nbytes

    @property
    def layout_bytes(self) -> int:
        """Bytes of both factors as compiled code takes them, at most."""
        panels = -(-self.rank // PANEL) * PANEL * self.a.itemsize
        wide = max(self.a.shape[1], self.b.shape[0])
        return self.count * (2 * panels + 4 * self.rank) * wide

    def of(self, expert: int, out: int, depth: int) -> LowRank | None:
        """Return an expert's change of its weight `[out, depth]`; None for a tensor of another
        shape. As in transformers, a shape that fits is never transposed."""
        a = self.a[expert * self.rank : (expert + 1) * self.rank]
        b = self.b.view(len(self.b), self.rank, self.count)[:, :, expert]
        if (a.shape[1], len(b)) == (out, depth):
            return LowRank(b.T.contiguous(), a.T.contiguous(), self.scale)
        if (a.shape[1], len(b)) == (depth, out):
            return LowRank(a.contiguous(), b.contiguous(), self.scale)
        return None


def is_fused(module: str) -> bool:
    """Tell whether a module of an adapter's file holds all experts of a layer."""
    return module.removesuffix(_INNER).endswith(".experts")


def fused(
    factors: Mapping[str, Mapping[str, torch.Tensor]], fields: AdapterFields
) -> dict[str, FusedExperts]:
    """Name the tensors changed by factors of all experts.

    Raises:
        CheckpointError: adapter_config.json does not say which tensors, or states another rank.
    """
    found = {}
    for module, own in factors.items():
        experts = module.removesuffix(_INNER)
        wanted = [each for each in (GATE_UP, DOWN) if _targeted(f"{experts}.{each}", fields)]
        wrapped = [each for each in (experts + _INNER, experts) if each in factors]
        if len(wanted) != len(wrapped):
            raise CheckpointError(
                f"{experts} has factors for {len(wrapped)} tensors, but target_parameters of "
                f"{CONFIG_FILE} names {len(wanted)} of {GATE_UP} and {DOWN}"
            )
        name = f"{experts}.{wanted[wrapped.index(module)]}"
        rank = fields.rank_of(name)
        if len(own["A"]) % rank or own["B"].shape[1] != len(own["A"]):
            raise CheckpointError(
                f"{name} has {len(own['A'])} rows in lora_A and {own['B'].shape[1]} columns in "
                f"lora_B, but {CONFIG_FILE} says rank {rank} for every expert"
            )
        found[name] = FusedExperts(own["A"], own["B"], rank, fields.scale_of(name, rank))
    return found


def _targeted(parameter: str, fields: AdapterFields) -> bool:
    return any(f".{parameter}".endswith(f".{each}") for each in fields.parameters)


def split(
    name: str, change: FusedExperts, sizes: Mapping[str, tuple[int, int]]
) -> dict[str, LowRank]:
    """Return the changes of every expert's own projections.

    Args:
        name: of the tensor.
        change: of all experts.
        sizes: (out, in) of the model's experts, by expert and projection.

    Raises:
        CheckpointError: the tensor is of another model.
    """
    experts, _, kind = name.rpartition(".")
    found: dict[str, LowRank] = {}
    for expert in range(change.count):
        own = [f"{experts}.{expert}.{each}" for each in _parts(kind)]
        if any(each not in sizes for each in own):
            raise CheckpointError(f"the adapter is of another model: {name} has expert {expert}")
        (size, depth), parts = sizes[own[0]], len(own)
        whole = change.of(expert, parts * size, depth)
        if whole is None:
            raise CheckpointError(
                f"the adapter is of another model: an expert's {kind} has {change.a.shape[1]} x "
                f"{len(change.b)} numbers, the model's has {parts * size} x {depth}"
            )
        for place, each in enumerate(own):
            up = whole.up[place * size : (place + 1) * size]
            found[each] = LowRank(whole.down, up, whole.scale)
    return found


def _parts(kind: str) -> tuple[str, ...]:
    return ("gate_proj", "up_proj") if kind == GATE_UP else (DOWN,)
