"""Copies of whole state rows between slots of one pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vlm_serve.kernels.checks import KernelArgumentError
from vlm_serve.kernels.dispatch import Op
from vlm_serve.kernels.state_copy import reference

_copy_runs = Op(reference.copy_runs, triton="vlm_serve.kernels.state_copy.triton:copy_runs")


def copy_rows(
    tensors: Sequence[torch.Tensor], src_rows: Sequence[int], dst_rows: Sequence[int]
) -> None:
    """Copy `tensor[dst_rows[i]] = tensor[src_rows[i]]` for every i and every tensor, in place.

    Pairs are sorted and neighbours coalesced into runs, so that adjacent rows are one copy. Rows
    are host integers; nothing is read back from the device.

    Args:
        tensors: pools that share a row index, `[rows, ...]`, any dtype, the same number of rows.
        src_rows, dst_rows: equally long; destinations unique; no row in both.

    Raises:
        KernelArgumentError: naming the argument at fault, before anything is copied.
    """
    if len(src_rows) != len(dst_rows):
        raise KernelArgumentError("dst_rows", f"{len(dst_rows)} rows for {len(src_rows)} sources")
    if not tensors or not src_rows:
        return
    rows, device = tensors[0].shape[0], tensors[0].device
    if any(tensor.shape[0] != rows or tensor.device != device for tensor in tensors):
        raise KernelArgumentError("tensors", "must have the same number of rows on one device")
    for name, values in (("src_rows", src_rows), ("dst_rows", dst_rows)):
        if min(values) < 0 or max(values) >= rows:
            raise KernelArgumentError(name, f"row outside 0..{rows - 1}")
    if len(set(dst_rows)) != len(dst_rows):
        raise KernelArgumentError("dst_rows", "a row is written twice")
    if not set(dst_rows).isdisjoint(src_rows):
        raise KernelArgumentError("dst_rows", "a row is both source and destination")
    _copy_runs(device, tensors, coalesce(src_rows, dst_rows))


def coalesce(src_rows: Sequence[int], dst_rows: Sequence[int]) -> list[tuple[int, int, int]]:
    """Sort pairs by source and join consecutive ones: (source, destination, count)."""
    runs: list[tuple[int, int, int]] = []
    for src, dst in sorted(zip(src_rows, dst_rows, strict=True)):
        if runs:
            first_src, first_dst, count = runs[-1]
            if src == first_src + count and dst == first_dst + count:
                runs[-1] = (first_src, first_dst, count + 1)
                continue
        runs.append((src, dst, 1))
    return runs
