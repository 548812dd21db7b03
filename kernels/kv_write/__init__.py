"""Writing this step's keys and values into their pages, also with the norm and the rotation of
queries and keys, and copying rows of pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vlm_serve.kernels import rope
from vlm_serve.kernels.checks import FLOAT_DTYPES, KernelArgumentError, check_kv_layer, check_tensor
from vlm_serve.kernels.dispatch import Op
from vlm_serve.kernels.kv_write import reference
from vlm_serve.kernels.metadata import KVLayer
from vlm_serve.kernels.rope import Rotation

_TRITON = "vlm_serve.kernels.kv_write.triton"
_write = Op(reference.write_kv, triton=f"{_TRITON}:write_kv")
_copy = Op(reference.copy_kv_rows, triton=f"{_TRITON}:copy_kv_rows")


def write_kv(k: torch.Tensor, v: torch.Tensor, kv: KVLayer, slots: torch.Tensor) -> None:
    """Store one layer's keys and values at their slots; quantise them if the pages are quantised.

    Args:
        k, v: `[T, Hkv, D]`, float32, bfloat16 or float16, dense last dimension.
        kv: the layer's pages; float8 saturates, int8 has a scale and zero point per token and
            head (`kv_quant.quantise`).
        slots: int64 `[T]`, `block * block_size + offset`, unique; -1 skips the token. Slots are
            device values, not checked against the pool here; the engine asserts them on the host.

    Raises:
        KernelArgumentError: naming the argument at fault.
    """
    check_kv_layer(kv, k.device)
    _check_rows(k, v, kv, slots)
    _write(k.device, k, v, kv, slots)


def _check_rows(k: torch.Tensor, v: torch.Tensor, kv: KVLayer, slots: torch.Tensor) -> None:
    heads, dim = kv.k.shape[2:]
    check_tensor("k", k, (None, heads, dim), FLOAT_DTYPES, k.device)
    check_tensor("v", v, k.shape, (k.dtype,), k.device)
    check_tensor("slots", slots, (k.shape[0],), (torch.int64,), k.device)


def copy_kv_rows(
    kv_pool: torch.Tensor,
    scales: torch.Tensor | None,
    copies: Sequence[tuple[int, int, int]],
) -> None:
    """Copy the first rows of blocks to other blocks, in all layers, as stored.

    Args:
        kv_pool: `[num_blocks, layers, 2, block_size, kv_heads, head_dim]`, any dtype; written in
            place.
        scales: `[num_blocks, layers, 4, block_size, kv_heads]` for int8, else None.
        copies: (source block, destination block, rows); destinations unique and no source.

    Raises:
        KernelArgumentError: naming the argument at fault, before anything is copied.
    """
    blocks, size = kv_pool.shape[0], kv_pool.shape[3]
    sources = [src for src, _, _ in copies]
    destinations = [dst for _, dst, _ in copies]
    for block in (*sources, *destinations):
        if not 0 <= block < blocks:
            raise KernelArgumentError("copies", f"block {block} outside 0..{blocks - 1}")
    if any(not 0 <= rows <= size for _, _, rows in copies):
        raise KernelArgumentError("copies", f"rows outside 0..{size}")
    if len(set(destinations)) != len(destinations):
        raise KernelArgumentError("copies", "a block is written twice")
    if not set(destinations).isdisjoint(sources):
        raise KernelArgumentError("copies", "a block is both source and destination")
    if scales is not None and scales.shape[:2] != kv_pool.shape[:2]:
        raise KernelArgumentError("scales", "blocks or layers differ from the pool's")
    _copy(kv_pool.device, kv_pool, scales, copies)


def _by_ops(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rotation: Rotation,
    kv: KVLayer,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Run both ops, each by the kernels that it has."""
    q, k = rope.qk_norm_rope(q, k, rotation)
    write_kv(k, v, kv, slots)
    return q


_rotate = Op(_by_ops, triton=f"{_TRITON}:rotate_and_write")


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
    rope.check_heads(q, k, rotation)
    _check_rows(k, v, kv, slots)
    return _rotate(q.device, q, k, v, rotation, kv, slots)
