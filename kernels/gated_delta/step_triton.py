"""One token of the gated delta rule, or of Mamba2's recurrence, on a GPU: shared by the decode step
and drafted tokens."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from vlm_serve.kernels.gated_delta.reference import Tokens
from vlm_serve.kernels.triton_support import power_of_two
from vlm_serve.kernels.triton_views import Heads, Rows, constants, heads, rows

EPS = tl.constexpr(1e-6)
STEP_COLUMNS = 32
"""Value columns of a state's tile."""


class StepSizes(NamedTuple):
    """Constants: value heads of a key head and in all, head dims, the tile of a state, and whether
    the recurrence is the delta rule."""

    ratio: int
    heads: int
    key_dim: int
    value_dim: int
    block_key: int
    columns: int
    delta: bool


class Views(NamedTuple):
    """Tokens of the delta rule as one argument, see `Tokens`."""

    q: Heads
    k: Heads
    v: Heads
    g: Rows
    beta: Rows


def views(tokens: Tokens) -> Views | Tokens:
    """Return tokens as one argument, with `skip` behind them if they have it."""
    q, k, v, g, beta, skip = tokens
    own = heads(q), heads(k), heads(v), rows(g), rows(beta)
    return Views(*own) if skip is None else Tokens._make((*own, skip))


def sizes_of(tokens: Tokens, columns: int = STEP_COLUMNS, least: int = 1) -> StepSizes:
    """Return the constants for tiles of so many value columns, and at least so many key dims."""
    (count, value_dim), (keys, key_dim) = tokens.v.shape[1:], tokens.q.shape[1:]
    block = power_of_two(key_dim, least)
    ratio, delta = count // keys, tokens.skip is None
    return constants(StepSizes, ratio, count, key_dim, value_dim, block, columns, delta)


@triton.jit
def softplus(x):
    """Compute log(1 + exp(x)) without overflow. If 1 + exp(-|x|) rounds to 1, its logarithm is
    exp(-|x|)."""
    small = tl.exp(-tl.abs(x))
    grown = 1.0 + small
    tail = tl.where(grown == 1.0, small, tl.log(grown) * (small / (grown - 1.0)))
    return tl.maximum(x, 0.0) + tail


@triton.jit
def step(current, query, key, value, gate, strength, scale, DELTA: tl.constexpr):
    """Step the recurrence over one token, for decode and drafts alike.

    Return the state after it (not rounded), the output read from it, and the key that the token is
    written under, its change and its decay.
    """
    if DELTA:
        query *= tl.rsqrt(tl.sum(query * query, axis=0) + EPS) * scale
        key *= tl.rsqrt(tl.sum(key * key, axis=0) + EPS)
    decay = tl.exp(gate)
    current *= decay
    if DELTA:
        change = (value - tl.sum(current * key[:, None], axis=0)) * strength
    else:
        change = value * strength
    current += key[:, None] * change[None, :]
    result = tl.sum(current * query[:, None], axis=0)
    return current, result, key, change, decay


@triton.jit
def load_token(tokens, token, head, dims, columns, SIZES: tl.constexpr):
    """Load a token's query, key, value, log decay and write strength of a head, in float32."""
    q, k, v = tokens.q, tokens.k, tokens.v
    inside = dims < SIZES.key_dim
    query_place = q.at + token * q.token + (head // SIZES.ratio) * q.head + dims
    key_place = k.at + token * k.token + (head // SIZES.ratio) * k.head + dims
    value_place = v.at + token * v.token + head * v.head + columns
    return (
        tl.load(query_place, mask=inside, other=0.0).to(tl.float32),
        tl.load(key_place, mask=inside, other=0.0).to(tl.float32),
        tl.load(value_place, mask=columns < SIZES.value_dim, other=0.0).to(tl.float32),
        tl.load(tokens.g.at + token * tokens.g.stride + head),
        tl.load(tokens.beta.at + token * tokens.beta.stride + head).to(tl.float32),
    )


@triton.jit
def advance(sequence, head, columns, tokens, state, moves, scale, SIZES: tl.constexpr):
    """Step one token of a sequence and store the state's columns; return the output of the
    columns."""
    token = sequence.to(tl.int64)
    dims = tl.arange(0, SIZES.block_key)
    inside, inside_columns = dims < SIZES.key_dim, columns < SIZES.value_dim
    tile_inside = inside[:, None] & inside_columns[None, :]
    tile = head * SIZES.key_dim * SIZES.value_dim
    tile = tile + dims[:, None] * SIZES.value_dim + columns[None, :]

    current = tl.zeros((SIZES.block_key, columns.shape[0]), tl.float32)
    src = tl.load(moves.src + sequence).to(tl.int64)
    if src >= 0:
        stored = tl.load(state.at + src * state.stride + tile, mask=tile_inside, other=0.0)
        current = stored.to(tl.float32)
    query, key, value, gate, strength = load_token(tokens, token, head, dims, columns, SIZES)
    current, result, _key, _change, _decay = step(
        current, query, key, value, gate, strength, scale, SIZES.delta
    )
    if not SIZES.delta:
        result += tl.load(tokens.skip + head) * value
    rounded = current.to(state.at.dtype.element_ty)
    dst = tl.load(moves.dst + sequence).to(tl.int64)
    tl.store(state.at + dst * state.stride + tile, rounded, mask=tile_inside)
    snapshot = tl.load(moves.snapshot + sequence).to(tl.int64)
    if snapshot >= 0:
        tl.store(state.at + snapshot * state.stride + tile, rounded, mask=tile_inside)
    return result


def step_arguments(tokens: Tokens, state: torch.Tensor, out: torch.Tensor) -> dict[str, Any]:
    """Return the arguments that kernels of single steps share, by parameter name."""
    return {
        "tokens": views(tokens),
        "state": rows(state),
        "out": out,
        "scale": tokens.q.shape[2] ** -0.5,
    }
