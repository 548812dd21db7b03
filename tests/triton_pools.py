"""Pools of the Triton tests: memory that nobody wrote is NaN in them."""

from __future__ import annotations

import random

import torch
from triton_case import DEVICE, on_cpu, poison, randn

from vlm_serve.kernels.kv_write import write_kv
from vlm_serve.kernels.metadata import KVLayer

BLOCKS, SIZE, LAYERS = 5, 4, 2
FORMS = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8]
"""Stored forms of keys and values."""


def state_pool(
    rows: int, written: set[int], shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """A layer's view of a pool of two layers; rows that nobody wrote hold NaN."""
    pool = poison(rows, 2, *shape, dtype=dtype)
    for row in written:
        pool[row, 1] = randn(*shape, dtype=dtype, seed=row)
    return pool[:, 1]


def layer(
    dtype: torch.dtype, heads: int, dim: int, device: torch.device = DEVICE
) -> tuple[KVLayer, torch.Tensor, torch.Tensor]:
    """The second layer of a pool filled with 0x7f bytes (NaN in every float form)."""
    shape = (BLOCKS, LAYERS, 2, SIZE, heads, dim)
    pool = torch.full((*shape, dtype.itemsize), 0x7F, dtype=torch.uint8, device=device)
    pool = pool.view(dtype).squeeze(-1)
    scales = torch.full(
        (BLOCKS, LAYERS, 4, SIZE, heads), float("nan"), dtype=torch.float16, device=device
    )
    views = [scales[:, 1, i] if dtype == torch.uint8 else None for i in range(4)]
    return KVLayer(pool[:, 1, 0], pool[:, 1, 1], *views), pool, scales


def filled(
    lengths: list[int], heads: int, dim: int, form: torch.dtype, seed: int, size: int = 16
) -> tuple[KVLayer, tuple[tuple[int, ...], ...]]:
    """Pages of sequences in blocks of random order; every row past a sequence's end is NaN (or, for
    int8, has NaN scales), as are blocks that nobody owns."""
    rng = random.Random(seed)
    counts = [-(-length // size) for length in lengths]
    blocks = list(range(sum(counts) + 2))
    rng.shuffle(blocks)
    shape = (len(blocks), 2, 2, size, heads, dim)
    pool = torch.full((*shape, form.itemsize), 0x7F, dtype=torch.uint8, device=DEVICE)
    pool = pool.view(form).squeeze(-1)
    scales = poison(len(blocks), 2, 4, size, heads, dtype=torch.float16)
    parts = [scales[:, 1, i] if form == torch.uint8 else None for i in range(4)]
    kv = KVLayer(pool[:, 1, 0], pool[:, 1, 1], *parts)
    tables = []
    for i, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        table = tuple(blocks.pop() for _ in range(count))
        slots = [table[p // size] * size + p % size for p in range(length)]
        k, v = randn(length, heads, dim, seed=seed + i), randn(length, heads, dim, seed=seed - i)
        slots_there = torch.tensor(slots, dtype=torch.int64)
        stored = on_cpu(kv)
        write_kv(k.cpu(), v.cpu(), stored, slots_there)
        for name, part in vars(kv).items():
            if part is not None:
                part.view(torch.uint8).copy_(getattr(stored, name).view(torch.uint8))
        tables.append(table)
    return kv, tuple(tables)
