"""Gated delta rule, torch CPU path."""

from __future__ import annotations

import torch

from vlm_serve.kernels.metadata import DecodeMeta, PrefillMeta

EPS = 1e-6


def _normalise(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + EPS)


def chunk_gated_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    meta: PrefillMeta,
) -> torch.Tensor:
    ratio = v.shape[1] // k.shape[1]
    q = (_normalise(q) * q.shape[-1] ** -0.5).repeat_interleave(ratio, dim=1).transpose(0, 1)
    k = _normalise(k).repeat_interleave(ratio, dim=1).transpose(0, 1)
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    wide_v, beta, g = v.float().transpose(0, 1), beta.float().T, g.float().T
    rows = {(sequence, chunk): row for sequence, chunk, row in meta.snapshots}
    for i in range(len(meta)):
        src = meta.src_rows[i]
        current = torch.zeros(state.shape[1:]) if src < 0 else state[src].float()
        begin = meta.cu_seqlens[i]
        for chunk, end in enumerate(meta.chunk_ends[i]):
            piece = slice(begin, end)
            result, current = _one_chunk(
                q[:, piece], k[:, piece], wide_v[:, piece], g[:, piece], beta[:, piece], current
            )
            current = current.to(state.dtype).float()
            out[piece] = result.transpose(0, 1)
            if (i, chunk) in rows:
                state[rows[i, chunk]] = current
            begin = end
        state[meta.dst_rows[i]] = current
    return out


def _one_chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    total = g.cumsum(-1)
    decay = (total.unsqueeze(2) - total.unsqueeze(1)).exp().tril()
    growth = total.exp().unsqueeze(2)
    system = (k @ k.mT) * decay * beta.unsqueeze(2)
    seen = (v - growth * (k @ state)) * beta.unsqueeze(2)
    new = torch.linalg.solve_triangular(system, seen, upper=False, unitriangular=True)
    out = growth * (q @ state) + ((q @ k.mT) * decay) @ new
    rest = (total[:, -1:] - total).exp().unsqueeze(2)
    return out, state * growth[:, -1:] + (k * rest).mT @ new


def recurrent_gated_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    meta: DecodeMeta,
) -> torch.Tensor:
    ratio = v.shape[1] // k.shape[1]
    q = (_normalise(q) * q.shape[-1] ** -0.5).repeat_interleave(ratio, dim=1)
    k = _normalise(k).repeat_interleave(ratio, dim=1)
    current = torch.stack(
        [torch.zeros(state.shape[1:]) if src < 0 else state[src].float() for src in meta.src_rows]
    )
    current = current * g.float().exp()[..., None, None]
    read = (k.unsqueeze(2) @ current).squeeze(2)
    change = (v.float() - read) * beta.float().unsqueeze(-1)
    current = current + k.unsqueeze(-1) * change.unsqueeze(-2)
    for i, (dst, snapshot) in enumerate(zip(meta.dst_rows, meta.snapshot_rows, strict=True)):
        state[dst] = current[i]
        if snapshot >= 0:
            state[snapshot] = current[i]
    return (q.unsqueeze(2) @ current).squeeze(2).to(v.dtype)
