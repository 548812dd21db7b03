"""Norm and rotation of queries and keys, and this step's keys and values into their pages."""

from __future__ import annotations

from typing import NamedTuple

import torch

from vlm_serve.kernels import kv_write, rope
from vlm_serve.kernels.checks import FLOAT_DTYPES, check_kv_layer, check_tensor
from vlm_serve.kernels.dispatch import Op
from vlm_serve.kernels.metadata import KVLayer


class Rotation(NamedTuple):
    """What norms and rotates the heads of tokens; as `qk_norm_rope` takes it."""

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    eps: float


def _by_ops(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rotation: Rotation,
    kv: KVLayer,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Run both ops, each by the kernels that it has."""
    q, k = rope.qk_norm_rope(q, k, *rotation)
    kv_write.write_kv(k, v, kv, slots)
    return q


_rotate = Op(_by_ops, triton="vlm_serve.kernels.kv_write.rotated_triton:rotate_and_write")


def rotate_and_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rotation: Rotation,
    kv: KVLayer,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Norm and rotate queries and keys; store keys and values at their slots.

    Args:
        q, k: `[T, heads, D]`, as `qk_norm_rope` takes them.
        v: `[T, Hkv, D]`, as k.
        rotation: norms and angles.
        kv, slots: as `write_kv` takes them.

    Returns:
        The queries, a new contiguous tensor.

    Raises:
        KernelArgumentError: naming the argument at fault.
    """
    check_kv_layer(kv, q.device)
    heads, dim = kv.k.shape[2:]
    rope.check_heads(q, k, *rotation[:4])
    check_tensor("k", k, (None, heads, dim), FLOAT_DTYPES, q.device)
    check_tensor("v", v, k.shape, (k.dtype,), q.device)
    check_tensor("slots", slots, (k.shape[0],), (torch.int64,), q.device)
    return _rotate(q.device, q, k, v, rotation, kv, slots)
