"""What the tests of the CPU ops share: seeded tensors, poisoned pools, transformers' modules."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from oracle import prepare_models

EPS = 1e-6


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1_000_003 * seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def poisoned_layer(rows: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A layer's view of a pool of three layers, all NaN."""
    return torch.full((rows, 3, *shape), float("nan"), dtype=dtype)[:, 1]


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal bits, NaN equal to NaN."""
    return torch.equal(left.nan_to_num(12345.0), right.nan_to_num(12345.0))


@cache
def modeling() -> Any:
    """transformers' module with Qwen3.5-MoE's layers; the dense model's are the same."""
    prepare_models()
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe

    return modeling_qwen3_5_moe


@cache
def modeling_mamba2() -> Any:
    """transformers' module with Nemotron-H's Mamba2 layers."""
    prepare_models()
    from transformers.models.nemotron_h import modeling_nemotron_h

    return modeling_nemotron_h
