"""Gated delta rule on a GPU: the inverse of every chunk's triangular system.

The system I + A is described in `chunk_triton`. A chunk of 64 tokens is cut into four blocks of 16.
Blocks on the diagonal are inverted by elimination; products of 16 x 16 matrices give the blocks
below. The kernel is apart from the products of a chunk, because its sums are short and depend on
each other: one warp needs no barriers for them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vlm_serve.kernels.checks import MAX_CHUNK
from vlm_serve.kernels.gated_delta.chunk_triton import EPS
from vlm_serve.kernels.gated_delta.tokens import Tokens
from vlm_serve.kernels.metadata import PrefillMeta
from vlm_serve.kernels.triton_support import current_target, dot_dtype, launch, prefill_tables

BLOCK = 16
"""Tokens of a block: the smallest side of a product."""


@triton.jit
def _part(vector, which, PARTS: tl.constexpr, SIZE: tl.constexpr):
    """Return one of the equal parts of a vector."""
    parts = tl.reshape(vector, (PARTS, SIZE))
    return tl.sum(tl.where(tl.arange(0, PARTS)[:, None] == which, parts, 0.0), axis=0)


@triton.jit
def _keys(k, stride, begin, end, which, start, SIZE, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Load some channels of a block's keys; zeros past the chunk's end."""
    tokens = begin + which * BLOCK + tl.arange(0, BLOCK)
    dims = start + tl.arange(0, TILE)
    inside = (tokens < end)[:, None] & (dims < SIZE)[None, :]
    return tl.load(k + tokens[:, None] * stride + dims[None, :], mask=inside, other=0.0)


@triton.jit
def _squares(keys):
    wide = keys.to(tl.float32)
    return tl.sum(wide * wide, axis=1)


@triton.jit
def _block(products, row, column):
    """Scale products of keys to a block of A.

    `row` and `column` are (cumulative log decays, factors) of its tokens. Only places below the
    diagonal are used, where the decay is at most 1; elsewhere it may overflow.
    """
    decays, factors = row
    earlier, lengths = column
    decay = tl.exp(tl.minimum(decays[:, None] - earlier[None, :], 0.0))
    return products * decay * lengths[None, :] * factors[:, None]


@triton.jit
def _lower(a, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    return tl.where(index[:, None] > index[None, :], a, 0.0)


@triton.jit
def _eliminate(inverse, a, step, BLOCK: tl.constexpr):
    """Take a step of elimination: row `step` of the inverse is final, and leaves those below."""
    index = tl.arange(0, BLOCK)
    column = tl.sum(tl.where((index == step)[None, :], a, 0.0), axis=1)
    row = tl.sum(tl.where((index == step)[:, None], inverse, 0.0), axis=0)
    return inverse - column[:, None] * row[None, :]


@triton.jit
def _store(inverse, place, row, column, block, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    rows = row * BLOCK + index[:, None]
    places = place + rows * CHUNK + column * BLOCK + index[None, :]
    tl.store(inverse + places, block.to(inverse.dtype.element_ty))


@triton.jit
def _inverse_kernel(
    k,
    g,
    beta,
    inverse,
    chunk_bounds,
    k_token_stride,
    k_head_stride,
    g_stride,
    beta_stride,
    RATIO: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Invert I + A for one chunk and head.

    Block `a21` is that of the third row and the second column of blocks, and so on.
    """
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    begin = tl.load(chunk_bounds + chunk).to(tl.int64)
    end = tl.load(chunk_bounds + chunk + 1).to(tl.int64)
    # A captured step is padded with empty chunks, which nothing reads.
    if begin < end:
        k += (head // RATIO) * k_head_stride
        zero = tl.zeros((BLOCK, BLOCK), tl.float32)
        a00, a10, a11, a20, a21 = zero, zero, zero, zero, zero
        a22, a30, a31, a32, a33 = zero, zero, zero, zero, zero
        none = tl.zeros((BLOCK,), tl.float32)
        n0, n1, n2, n3 = none, none, none, none
        for start in range(0, KEY_DIM, KEY_TILE):
            k0 = _keys(k, k_token_stride, begin, end, 0, start, KEY_DIM, BLOCK, KEY_TILE)
            k1 = _keys(k, k_token_stride, begin, end, 1, start, KEY_DIM, BLOCK, KEY_TILE)
            k2 = _keys(k, k_token_stride, begin, end, 2, start, KEY_DIM, BLOCK, KEY_TILE)
            k3 = _keys(k, k_token_stride, begin, end, 3, start, KEY_DIM, BLOCK, KEY_TILE)
            n0, n1, n2, n3 = (
                n0 + _squares(k0),
                n1 + _squares(k1),
                n2 + _squares(k2),
                n3 + _squares(k3),
            )
            k0, k1, k2, k3 = k0.to(DOT), k1.to(DOT), k2.to(DOT), k3.to(DOT)
            turned = tl.trans(k0)
            a00 = tl.dot(k0, turned, a00, input_precision=PRECISION)
            a10 = tl.dot(k1, turned, a10, input_precision=PRECISION)
            a20 = tl.dot(k2, turned, a20, input_precision=PRECISION)
            a30 = tl.dot(k3, turned, a30, input_precision=PRECISION)
            turned = tl.trans(k1)
            a11 = tl.dot(k1, turned, a11, input_precision=PRECISION)
            a21 = tl.dot(k2, turned, a21, input_precision=PRECISION)
            a31 = tl.dot(k3, turned, a31, input_precision=PRECISION)
            turned = tl.trans(k2)
            a22 = tl.dot(k2, turned, a22, input_precision=PRECISION)
            a32 = tl.dot(k3, turned, a32, input_precision=PRECISION)
            a33 = tl.dot(k3, tl.trans(k3), a33, input_precision=PRECISION)
        tokens = begin + tl.arange(0, CHUNK)
        inside = tokens < end
        total = tl.cumsum(tl.load(g + tokens * g_stride + head, mask=inside, other=0.0), axis=0)
        strength = tl.load(beta + tokens * beta_stride + head, mask=inside, other=0.0)
        strength = strength.to(tl.float32)
        PARTS: tl.constexpr = CHUNK // BLOCK
        g0, g1 = _part(total, 0, PARTS, BLOCK), _part(total, 1, PARTS, BLOCK)
        g2, g3 = _part(total, 2, PARTS, BLOCK), _part(total, 3, PARTS, BLOCK)
        n0, n1 = tl.rsqrt(n0 + EPS), tl.rsqrt(n1 + EPS)
        n2, n3 = tl.rsqrt(n2 + EPS), tl.rsqrt(n3 + EPS)
        f0, f1 = _part(strength, 0, PARTS, BLOCK) * n0, _part(strength, 1, PARTS, BLOCK) * n1
        f2, f3 = _part(strength, 2, PARTS, BLOCK) * n2, _part(strength, 3, PARTS, BLOCK) * n3
        a00 = _lower(_block(a00, (g0, f0), (g0, n0)), BLOCK)
        a11 = _lower(_block(a11, (g1, f1), (g1, n1)), BLOCK)
        a22 = _lower(_block(a22, (g2, f2), (g2, n2)), BLOCK)
        a33 = _lower(_block(a33, (g3, f3), (g3, n3)), BLOCK)
        a10 = _block(a10, (g1, f1), (g0, n0))
        a20 = _block(a20, (g2, f2), (g0, n0))
        a21 = _block(a21, (g2, f2), (g1, n1))
        a30 = _block(a30, (g3, f3), (g0, n0))
        a31 = _block(a31, (g3, f3), (g1, n1))
        a32 = _block(a32, (g3, f3), (g2, n2))

        index = tl.arange(0, BLOCK)
        t0 = tl.where(index[:, None] == index[None, :], 1.0, 0.0)
        t1, t2, t3 = t0, t0, t0
        for step in range(0, BLOCK - 1):
            t0 = _eliminate(t0, a00, step, BLOCK)
            t1 = _eliminate(t1, a11, step, BLOCK)
            t2 = _eliminate(t2, a22, step, BLOCK)
            t3 = _eliminate(t3, a33, step, BLOCK)

        # Errors of the inverse would enter every later token, so it is float32 for all inputs.
        t10 = -tl.dot(t1, tl.dot(a10, t0, input_precision=PRECISION), input_precision=PRECISION)
        t21 = -tl.dot(t2, tl.dot(a21, t1, input_precision=PRECISION), input_precision=PRECISION)
        t32 = -tl.dot(t3, tl.dot(a32, t2, input_precision=PRECISION), input_precision=PRECISION)
        sum20 = tl.dot(a20, t0, input_precision=PRECISION)
        sum20 = tl.dot(a21, t10, sum20, input_precision=PRECISION)
        t20 = -tl.dot(t2, sum20, input_precision=PRECISION)
        sum31 = tl.dot(a31, t1, input_precision=PRECISION)
        sum31 = tl.dot(a32, t21, sum31, input_precision=PRECISION)
        t31 = -tl.dot(t3, sum31, input_precision=PRECISION)
        sum30 = tl.dot(a30, t0, input_precision=PRECISION)
        sum30 = tl.dot(a31, t10, sum30, input_precision=PRECISION)
        sum30 = tl.dot(a32, t20, sum30, input_precision=PRECISION)
        t30 = -tl.dot(t3, sum30, input_precision=PRECISION)

        place = (chunk.to(tl.int64) * HEADS + head) * CHUNK * CHUNK
        _store(inverse, place, 0, 0, t0, BLOCK, CHUNK)
        _store(inverse, place, 1, 1, t1, BLOCK, CHUNK)
        _store(inverse, place, 2, 2, t2, BLOCK, CHUNK)
        _store(inverse, place, 3, 3, t3, BLOCK, CHUNK)
        _store(inverse, place, 1, 0, t10, BLOCK, CHUNK)
        _store(inverse, place, 2, 0, t20, BLOCK, CHUNK)
        _store(inverse, place, 2, 1, t21, BLOCK, CHUNK)
        _store(inverse, place, 3, 0, t30, BLOCK, CHUNK)
        _store(inverse, place, 3, 1, t31, BLOCK, CHUNK)
        _store(inverse, place, 3, 2, t32, BLOCK, CHUNK)
        zero = tl.zeros((BLOCK, BLOCK), tl.float32)
        _store(inverse, place, 0, 1, zero, BLOCK, CHUNK)
        _store(inverse, place, 0, 2, zero, BLOCK, CHUNK)
        _store(inverse, place, 0, 3, zero, BLOCK, CHUNK)
        _store(inverse, place, 1, 2, zero, BLOCK, CHUNK)
        _store(inverse, place, 1, 3, zero, BLOCK, CHUNK)
        _store(inverse, place, 2, 3, zero, BLOCK, CHUNK)


def invert_chunks(
    packed: Tokens, meta: PrefillMeta, warps: int = 1, key_tile: int = 32
) -> torch.Tensor:
    """Return (I + A)^-1 of every chunk and head, `[C, Hv, 64, 64]`, in the dtype of products.

    Args:
        packed, meta: of the step.
        warps: of a program.
        key_tile: channels of keys at a time.
    """
    k, g, beta = packed.k, packed.g, packed.beta
    chunk_bounds = prefill_tables(meta, k.device)["chunk_bounds"]
    chunks, heads = chunk_bounds.shape[0] - 1, packed.v.shape[1]
    target = current_target()
    dtype = torch.float32 if target.backend == "interpreter" else k.dtype
    inverse = torch.empty(chunks, heads, MAX_CHUNK, MAX_CHUNK, dtype=dtype, device=k.device)
    arguments = {
        "k": k,
        "g": g,
        "beta": beta,
        "inverse": inverse,
        "chunk_bounds": chunk_bounds,
        "k_token_stride": k.stride(0),
        "k_head_stride": k.stride(1),
        "g_stride": g.stride(0),
        "beta_stride": beta.stride(0),
        "RATIO": heads // k.shape[1],
        "HEADS": heads,
        "KEY_DIM": k.shape[2],
        "KEY_TILE": key_tile,
        "BLOCK": BLOCK,
        "CHUNK": MAX_CHUNK,
        "DOT": dot_dtype(k.dtype),
        "PRECISION": target.dot_precision,
    }
    launch(_inverse_kernel, (chunks, heads), arguments, num_warps=warps)
    return inverse
