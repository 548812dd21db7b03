"""The state-independent part of chunks with an early exit for empty chunks, and inverses from a
kernel of their own."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vlm_serve.kernels.checks import MAX_CHUNK
from vlm_serve.kernels.gated_delta.chunk_triton import (
    _invert_unit_lower,
    _products,
    _times_rows,
)
from vlm_serve.kernels.gated_delta.tokens import Tokens
from vlm_serve.kernels.metadata import PrefillMeta
from vlm_serve.kernels.triton_support import (
    current_target,
    dot_dtype,
    launch,
    prefill_tables,
)


@triton.jit
def _prepare_kernel(
    q,
    k,
    v,
    g,
    beta,
    inverses,
    w,
    u,
    attention,
    q_factor,
    k_factor,
    chunk_factor,
    chunk_bounds,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    g_stride,
    beta_stride,
    scale,
    RATIO: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_TILE: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    APART: tl.constexpr,
):
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    begin = tl.load(chunk_bounds + chunk).to(tl.int64)
    end = tl.load(chunk_bounds + chunk + 1).to(tl.int64)
    # A captured step is padded with empty chunks, which nothing reads.
    if begin < end:
        index = tl.arange(0, CHUNK)
        tokens = begin + index
        inside = tokens < end
        total = tl.cumsum(tl.load(g + tokens * g_stride + head, mask=inside, other=0.0), axis=0)
        strength = tl.load(beta + tokens * beta_stride + head, mask=inside, other=0.0).to(
            tl.float32
        )
        k += (head // RATIO) * k_head_stride
        q += (head // RATIO) * q_head_stride
        q_rows, k_rows = tokens * q_token_stride, tokens * k_token_stride
        scores, system, query_norm, key_norm = _products(
            q, k, q_rows, k_rows, inside, KEY_DIM, KEY_TILE, DOT, PRECISION
        )
        query_norm *= scale
        # Only j <= i is ever used; above the diagonal the difference may overflow exp.
        visible = index[:, None] >= index[None, :]
        decay = tl.exp(tl.where(visible, total[:, None] - total[None, :], 0.0)) * key_norm[None, :]
        scores = tl.where(visible, scores * decay * query_norm[:, None], 0.0)
        places = (chunk.to(tl.int64) * HEADS + head) * CHUNK * CHUNK
        places += index[:, None] * CHUNK + index[None, :]
        tl.store(attention + places, scores.to(attention.dtype.element_ty))
        if APART:
            inverse = tl.load(inverses + places).to(DOT)
        else:
            system = system * decay * (key_norm * strength)[:, None]
            system = tl.where(index[:, None] > index[None, :], system, 0.0)
            inverse = _invert_unit_lower(system, CHUNK // 2, "ieee").to(DOT)

        rows = tokens * HEADS + head
        growth = tl.exp(total)
        last = tl.sum(tl.where(tokens == end - 1, total, 0.0), axis=0)
        tl.store(q_factor + rows, query_norm * growth, mask=inside)
        tl.store(k_factor + rows, key_norm * tl.exp(last - total), mask=inside)
        tl.store(chunk_factor + chunk * HEADS + head, tl.exp(last))
        factors, places = strength * growth * key_norm, rows * KEY_DIM
        _times_rows(inverse, factors, k, k_rows, w, places, inside, KEY_DIM, COLUMN_TILE, PRECISION)
        v += head * v_head_stride
        v_rows, places = tokens * v_token_stride, rows * VALUE_DIM
        _times_rows(
            inverse, strength, v, v_rows, u, places, inside, VALUE_DIM, COLUMN_TILE, PRECISION
        )


def prepare_chunks(
    packed: Tokens, meta: PrefillMeta, inverses: torch.Tensor | None, warps: int
) -> dict[str, torch.Tensor]:
    """Do what the kernel that serves does, with inverses from `invert_chunks` if they are given."""
    q, k, v, g, beta = packed
    tables = prefill_tables(meta, q.device)
    chunks = tables["chunk_sequence"].shape[0]
    tokens, heads, value_dim = v.shape
    key_dim = q.shape[2]
    target = current_target()
    # float32 operands are split in three for tensor cores: narrower tiles keep them in registers.
    tile = 32 if q.dtype == torch.float32 or min(key_dim, value_dim) < 64 else 64
    dtype = torch.float32 if target.backend == "interpreter" else q.dtype
    made = {
        "w": torch.empty(tokens, heads, key_dim, dtype=dtype, device=q.device),
        "u": torch.empty(tokens, heads, value_dim, dtype=dtype, device=q.device),
        "attention": torch.empty(chunks, heads, MAX_CHUNK, MAX_CHUNK, dtype=dtype, device=q.device),
        "q_factor": torch.empty(tokens, heads, device=q.device),
        "k_factor": torch.empty(tokens, heads, device=q.device),
        "chunk_factor": torch.empty(chunks, heads, device=q.device),
    }
    arguments = {
        **packed._asdict(),
        **made,
        "inverses": made["attention"] if inverses is None else inverses,
        "chunk_bounds": tables["chunk_bounds"],
        "q_token_stride": q.stride(0),
        "q_head_stride": q.stride(1),
        "k_token_stride": k.stride(0),
        "k_head_stride": k.stride(1),
        "v_token_stride": v.stride(0),
        "v_head_stride": v.stride(1),
        "g_stride": g.stride(0),
        "beta_stride": beta.stride(0),
        "scale": key_dim**-0.5,
        "RATIO": heads // q.shape[1],
        "HEADS": heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "KEY_TILE": tile,
        "COLUMN_TILE": tile,
        "CHUNK": MAX_CHUNK,
        "DOT": dot_dtype(q.dtype),
        "PRECISION": target.dot_precision,
        "APART": inverses is not None,
    }
    launch(_prepare_kernel, (chunks, heads), arguments, num_warps=warps)
    return made
