"""A Gated DeltaNet mixer between its products on a GPU, in two launches: convolution and gates,
then recurrence and gated norm.

For a norm a program needs a head's whole state, in so many registers that it has a multiprocessor
for itself. So with more sequences, which fill the device anyway, recurrence and norm are two
launches. Their sums have another order, and `deterministic` takes them always.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from vlm_serve.kernels.causal_conv.triton import TAIL_TILE, convolve_token, token_arguments
from vlm_serve.kernels.gated_delta.gates_triton import token_gates
from vlm_serve.kernels.gated_delta.step_triton import advance, step_arguments
from vlm_serve.kernels.gated_delta.tokens import Tokens
from vlm_serve.kernels.gated_delta.triton import recurrent_gated_delta
from vlm_serve.kernels.metadata import DecodeMeta
from vlm_serve.kernels.norms.triton import gated_rms_norm, gated_rows
from vlm_serve.kernels.triton_support import decode_tables, launch, power_of_two

if TYPE_CHECKING:
    from vlm_serve.kernels.gated_delta.decoding import Mixing

FEW = 8
"""Most sequences of the launch with recurrence and norm."""
MOST_STATE = 1 << 14
"""Values of a head's state that a program of eight warps holds: 64 registers a thread."""


@triton.jit
def _inputs_kernel(
    x,
    weight,
    tails,
    out,
    src_rows,
    dst_rows,
    snapshot_rows,
    x_stride,
    weight_stride,
    tail_row_stride,
    tail_channel_stride,
    raw,
    neg_decay,
    dt_bias,
    beta,
    decay,
    raw_stride,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_TAPS: tl.constexpr,
    CHANNEL_TILE: tl.constexpr,
    TILES: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Convolve a tile of a token's channels; behind the tiles one program computes its gates."""
    sequence = tl.program_id(0)
    if tl.program_id(1) < TILES:
        convolve_token(
            sequence,
            tl.program_id(1),
            x,
            weight,
            tails,
            out,
            src_rows,
            dst_rows,
            snapshot_rows,
            x_stride,
            weight_stride,
            tail_row_stride,
            tail_channel_stride,
            CHANNELS,
            TAPS,
            BLOCK_TAPS,
            CHANNEL_TILE,
        )
    else:
        row = sequence.to(tl.int64)
        token_gates(row, raw, neg_decay, dt_bias, beta, decay, raw_stride, HEADS, BLOCK)


@triton.jit
def _normed_step_kernel(
    q,
    k,
    v,
    g,
    beta,
    state,
    out,
    gate,
    norm,
    src_rows,
    dst_rows,
    snapshot_rows,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    g_stride,
    beta_stride,
    state_row_stride,
    gate_token_stride,
    gate_head_stride,
    scale,
    eps,
    RATIO: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Step a head's whole state over one token, then norm the output and gate it."""
    sequence = tl.program_id(1)
    head = tl.program_id(0)
    columns = tl.arange(0, COLUMNS)
    inside = columns < VALUE_DIM
    token = sequence.to(tl.int64)
    gate_place = gate + token * gate_token_stride + head * gate_head_stride + columns
    gates = tl.load(gate_place, mask=inside, other=0.0)
    factor = tl.load(norm + columns, mask=inside, other=0.0)
    result = advance(
        sequence,
        head,
        columns,
        q,
        k,
        v,
        g,
        beta,
        state,
        src_rows,
        dst_rows,
        snapshot_rows,
        q_token_stride,
        q_head_stride,
        k_token_stride,
        k_head_stride,
        v_token_stride,
        v_head_stride,
        g_stride,
        beta_stride,
        state_row_stride,
        scale,
        RATIO,
        HEADS,
        KEY_DIM,
        VALUE_DIM,
        BLOCK_KEY,
    )
    dtype = out.dtype.element_ty
    # Rounded as where the norm reads it from memory.
    values = result.to(dtype)[None, :]
    normed = gated_rows(values, gates[None, :], factor, eps, VALUE_DIM)
    places = (token * HEADS + head) * VALUE_DIM + columns
    tl.store(out + places[None, :], normed.to(dtype), mask=inside[None, :])


def mix_decode(
    wide: torch.Tensor, mixing: Mixing, meta: DecodeMeta, *, deterministic: bool
) -> torch.Tensor:
    x, z, raw = mixing.split(wide)
    batch, channels = x.shape
    heads, dim = z.shape[1:]
    mixed = torch.empty(batch, channels, dtype=x.dtype, device=x.device)
    beta, decay = torch.empty(2, batch, heads, device=x.device)
    tiles = triton.cdiv(channels, TAIL_TILE)
    arguments = {
        **token_arguments(x, mixing.conv, mixing.tails, meta, mixed),
        "raw": raw,
        "neg_decay": mixing.neg_decay,
        "dt_bias": mixing.dt_bias,
        "beta": beta,
        "decay": decay,
        "raw_stride": raw.stride(0),
        "TILES": tiles,
        "HEADS": heads,
        "BLOCK": power_of_two(heads),
    }
    launch(_inputs_kernel, (batch, tiles + 1), arguments, num_warps=2)
    tokens = Tokens(*mixing.heads(mixed), decay, beta)
    columns = power_of_two(dim)
    wide_state = power_of_two(tokens.q.shape[2]) * columns > MOST_STATE
    if deterministic or batch > FEW or wide_state:
        core = recurrent_gated_delta(tokens, mixing.state, meta)
        return gated_rms_norm(core, z, mixing.norm, mixing.eps).flatten(1)
    tables = decode_tables(meta, x.device)
    out = torch.empty(batch, heads, dim, dtype=x.dtype, device=x.device)
    arguments = {
        **step_arguments(tokens, mixing.state, out),
        "gate": z,
        "norm": mixing.norm,
        "src_rows": tables["src_rows"],
        "dst_rows": tables["dst_rows"],
        "snapshot_rows": tables["snapshot_rows"],
        "gate_token_stride": z.stride(0),
        "gate_head_stride": z.stride(1),
        "eps": mixing.eps,
        "COLUMNS": columns,
    }
    launch(_normed_step_kernel, (heads, batch), arguments, num_warps=8)
    return out.flatten(1)
