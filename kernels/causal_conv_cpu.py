"""Causal depthwise convolution, torch CPU path."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from vlm_serve.kernels.metadata import DecodeMeta, PrefillMeta


def causal_conv_prefill(
    x: torch.Tensor, weight: torch.Tensor, tails: torch.Tensor, meta: PrefillMeta
) -> torch.Tensor:
    kept = weight.shape[1] - 1
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    snapshots: dict[int, list[tuple[int, int]]] = {}
    for sequence, chunk, row in meta.snapshots:
        snapshots.setdefault(sequence, []).append((meta.chunk_ends[sequence][chunk], row))
    for i in range(len(meta)):
        begin, end = meta.cu_seqlens[i], meta.cu_seqlens[i + 1]
        src = meta.src_rows[i]
        tail = x.new_zeros(kept, x.shape[1]) if src < 0 else tails[src].T
        padded = torch.cat([tail, x[begin:end]])
        _convolve(padded, weight, out[begin:end])
        for stop, row in (*snapshots.get(i, ()), (end, meta.dst_rows[i])):
            tails[row].copy_(padded[stop - begin : stop - begin + kept].T)
    return out


def _convolve(padded: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """`padded` is `[K - 1 + n, C]`, out `[n, C]`."""
    rows = out.shape[0]
    total = padded[:rows] * weight[:, 0]
    for tap in range(1, weight.shape[1]):
        total.addcmul_(padded[tap : tap + rows], weight[:, tap])
    torch.mul(total, total.sigmoid(), out=out)


def causal_conv_decode(
    x: torch.Tensor, weight: torch.Tensor, tails: torch.Tensor, meta: DecodeMeta
) -> torch.Tensor:
    kept = weight.shape[1] - 1
    window = x.new_zeros(x.shape[0], x.shape[1], kept + 1)
    window[:, :, kept] = x
    for i, src in enumerate(meta.src_rows):
        if src >= 0:
            window[i, :, :kept] = tails[src]
    for i, dst in enumerate(meta.dst_rows):
        tails[dst].copy_(window[i, :, 1:])
        if meta.snapshot_rows[i] >= 0:
            tails[meta.snapshot_rows[i]].copy_(window[i, :, 1:])
    return F.silu((window * weight).sum(-1))
