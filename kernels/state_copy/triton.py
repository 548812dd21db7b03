"""Row copies on a GPU: one launch per pool, whatever the number of rows."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from vlm_serve.kernels.checks import KernelArgumentError
from vlm_serve.kernels.triton_support import launch, to_device

# Bytes per program: enough loads in flight to hide latency, few enough that one row of a large
# pool (tens of MiB) still spreads over every multiprocessor.
TILE_BYTES = 16384


@triton.jit
def _copy_kernel(pool, pairs, row_stride, row_size, TILE: tl.constexpr):
    pair = tl.program_id(1)
    src = tl.load(pairs + 2 * pair).to(tl.int64) * row_stride
    dst = tl.load(pairs + 2 * pair + 1).to(tl.int64) * row_stride
    places = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = places < row_size
    values = tl.load(pool + src + places, mask=inside)
    tl.store(pool + dst + places, values, mask=inside)


def copy_runs(tensors: Sequence[torch.Tensor], runs: Sequence[tuple[int, int, int]]) -> None:
    """Copy (source row, destination row, number of rows) runs in every tensor.

    Raises:
        KernelArgumentError: a pool's row is not contiguous.
    """
    pools = [words(tensor) for tensor in tensors]
    pairs = [row for src, dst, count in runs for i in range(count) for row in (src + i, dst + i)]
    table = to_device({"pairs": pairs}, tensors[0].device)["pairs"]
    for pool in pools:
        row_size = pool.shape[1]
        tile = TILE_BYTES // pool.element_size()
        arguments = {
            "pool": pool,
            "pairs": table,
            "row_stride": pool.stride(0),
            "row_size": row_size,
            "TILE": tile,
        }
        grid = (triton.cdiv(row_size, tile), len(pairs) // 2)
        launch(_copy_kernel, grid, arguments, num_warps=8)


def words(pool: torch.Tensor) -> torch.Tensor:
    """View a pool `[rows, ...]` as `[rows, words]` of the widest integer that divides its bytes.

    A copy is then the same for every dtype and keeps every bit, also those of a NaN.
    """
    if not pool[:1].is_contiguous():
        raise KernelArgumentError("tensors", "a row must be contiguous")
    size = pool.element_size()
    row_bytes = pool[0].numel() * size
    stride_bytes = pool.stride(0) * size
    flat = pool.as_strided((pool.shape[0], pool[0].numel()), (pool.stride(0), 1))
    for dtype in (torch.int64, torch.int32, torch.int16):
        if all(n % dtype.itemsize == 0 for n in (row_bytes, stride_bytes, pool.data_ptr())):
            return flat.view(dtype) if dtype.itemsize >= size else flat
    return flat.view(torch.uint8)
