"""Causal depthwise convolution, torch CPU path."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F

from vlm_serve.kernels.derived import derived
from vlm_serve.kernels.metadata import DecodeMeta, PrefillMeta

# Elements processed at a time: a block stays in the cache for all taps and the activation.
BLOCK = 1 << 17


def causal_conv_prefill(
    x: torch.Tensor, weight: torch.Tensor, tails: torch.Tensor, meta: PrefillMeta
) -> torch.Tensor:
    # The activation needs exp(-y) first, so taps are negated; see `_convolve`.
    taps = derived(weight, "prefill taps", lambda w: w.float().neg().T.contiguous())
    kept = taps.shape[0] - 1
    out = torch.empty(x.shape, dtype=x.dtype)
    rows = max(kept, BLOCK // x.shape[1])
    stops = _tail_stops(meta)
    for i in range(len(meta)):
        begin, end = meta.cu_seqlens[i], meta.cu_seqlens[i + 1]
        src = meta.src_rows[i]
        old = x.new_zeros(kept, x.shape[1]) if src < 0 else tails[src].T
        # The first tokens need the old tail; the others find all their inputs in x.
        head = torch.cat([old, x[begin : min(begin + kept, end)]])
        _convolve(head, taps, out[begin : min(begin + kept, end)])
        for first in range(begin + kept, end, rows):
            last = min(first + rows, end)
            _convolve(x[first - kept : last], taps, out[first:last])
        for stop, row in stops[i]:
            whole = stop - begin >= kept
            window = x[stop - kept : stop] if whole else head[stop - begin : stop - begin + kept]
            tails[row].copy_(window.T)
    return out


def _tail_stops(meta: PrefillMeta) -> list[list[tuple[int, int]]]:
    """Return for each sequence (packed offset, state row) of every tail to store."""
    stops = [[(meta.cu_seqlens[i + 1], row)] for i, row in enumerate(meta.dst_rows)]
    for sequence, chunk, row in meta.snapshots:
        stops[sequence].append((meta.chunk_ends[sequence][chunk], row))
    return stops


def _convolve(padded: torch.Tensor, taps: torch.Tensor, out: torch.Tensor) -> None:
    """Convolve `padded` `[K - 1 + n, C]` with `taps` `[K, C]` into out `[n, C]`.

    silu(y) is computed as -y / (-1 - exp(-y)). Unlike sigmoid and silu, where the last elements
    take another path, these operations give an element the same bits at every place.
    """
    rows = out.shape[0]
    padded = padded.float()
    total = padded[:rows] * taps[0]
    for tap in range(1, taps.shape[0]):
        total.addcmul_(padded[tap : tap + rows], taps[tap])
    torch.div(total, torch.rsub(total.exp(), -1.0), out=out)


def causal_conv_decode(
    x: torch.Tensor, weight: torch.Tensor, tails: torch.Tensor, meta: DecodeMeta
) -> torch.Tensor:
    kept = weight.shape[1] - 1
    src, dst = _row_index(meta)
    old = tails.index_select(0, src)
    for i, row in enumerate(meta.src_rows):
        if row < 0:
            old[i].zero_()
    old_taps = derived(weight, "old taps", lambda w: w[:, :kept].float().contiguous())
    new_tap = derived(weight, "new tap", lambda w: w[:, kept].float().contiguous())
    # torch's sum over so short a dimension is slow: sum over taps by a matrix-vector product.
    total = (old * old_taps).view(-1, kept) @ _ones(kept)
    total = torch.addcmul(total.view(x.shape), x, new_tap)
    new = torch.empty_like(old)
    new.flatten(1)[:, :-1] = old.flatten(1)[:, 1:]
    new[:, :, -1] = x
    tails.index_copy_(0, dst, new)
    for i, row in enumerate(meta.snapshot_rows):
        if row >= 0:
            tails[row].copy_(new[i])
    return F.silu(total).to(x.dtype)


@cache
def _ones(size: int) -> torch.Tensor:
    return torch.ones(size)


def _row_index(meta: DecodeMeta) -> tuple[torch.Tensor, torch.Tensor]:
    """Return source rows (-1 as 0) and destination rows, made once per step."""
    if "cpu_src_rows" not in meta.tensors:
        meta.tensors["cpu_src_rows"] = torch.tensor(
            [max(row, 0) for row in meta.src_rows], dtype=torch.int64
        )
        meta.tensors["cpu_dst_rows"] = torch.tensor(meta.dst_rows, dtype=torch.int64)
    return meta.tensors["cpu_src_rows"], meta.tensors["cpu_dst_rows"]
