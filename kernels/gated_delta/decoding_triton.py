"""A Gated DeltaNet mixer between its products on a GPU, in two launches: convolution and gates
(write strengths and decays), then recurrence and gated norm.

For a norm a program needs a head's whole state, in so many registers that it has a multiprocessor
for itself. So with more sequences, which fill the device anyway, recurrence and norm are two
launches. Their sums have another order, and `deterministic` takes them always.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from vlm_serve.kernels.causal_conv.triton import TAIL_TILE, arguments_of, convolve_token
from vlm_serve.kernels.causal_conv.triton import sizes_of as conv_sizes
from vlm_serve.kernels.gated_delta.reference import Tokens
from vlm_serve.kernels.gated_delta.step_triton import advance, sizes_of, softplus, step_arguments
from vlm_serve.kernels.gated_delta.triton import recurrent_gated_delta
from vlm_serve.kernels.metadata import DecodeMeta
from vlm_serve.kernels.norms.triton import gated_rms_norm, gated_rows
from vlm_serve.kernels.triton_support import launch, power_of_two
from vlm_serve.kernels.triton_views import Heads, Rows, heads, moves, rows

if TYPE_CHECKING:
    from vlm_serve.kernels.gated_delta.decoding import Mixing

FEW = 8
"""Most sequences of the launch with recurrence and norm."""
MOST_STATE = 1 << 14
"""Values of a head's state that a program of eight warps holds: 64 registers a thread."""


class Gates(NamedTuple):
    """What the kernels of gates read and write."""

    raw: Rows
    neg_decay: torch.Tensor
    dt_bias: torch.Tensor
    beta: torch.Tensor
    decay: torch.Tensor


@triton.jit
def token_gates(row, gates, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """Store one token's write strengths and decays."""
    heads = tl.arange(0, BLOCK)
    inside = heads < HEADS
    raw = gates.raw.at + row * gates.raw.stride
    strength = tl.load(raw + heads, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(raw + HEADS + heads, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(gates.dt_bias + heads, mask=inside, other=0.0)
    factor = tl.load(gates.neg_decay + heads, mask=inside, other=0.0)
    tl.store(gates.beta + row * HEADS + heads, 1.0 / (1.0 + tl.exp(-strength)), mask=inside)
    tl.store(gates.decay + row * HEADS + heads, factor * softplus(x), mask=inside)


@triton.jit
def _gates_kernel(gates, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    token_gates(tl.program_id(0).to(tl.int64), gates, HEADS, BLOCK)


def gate_arguments(gates: Gates) -> dict[str, Any]:
    """Return the arguments of `token_gates`, by parameter name."""
    heads = len(gates.neg_decay)
    return {"gates": gates, "HEADS": heads, "BLOCK": power_of_two(heads)}


def gates(
    raw: torch.Tensor,
    neg_decay: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute both in one launch; an element's bits depend on it alone, `deterministic` or not."""
    beta, decay = torch.empty(2, len(raw), len(neg_decay), device=raw.device)
    arguments = gate_arguments(Gates(rows(raw), neg_decay, dt_bias, beta, decay))
    launch(_gates_kernel, (len(raw),), arguments, num_warps=1)
    return beta, decay


class HeadNorm(NamedTuple):
    """The norm of a head's output and its gate."""

    gate: Heads
    weight: torch.Tensor
    eps: float


@triton.jit
def _inputs_kernel(
    conv,
    moves,
    gates,
    SIZES: tl.constexpr,
    TILES: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Convolve a tile of a token's channels; behind the tiles one program computes its gates."""
    sequence = tl.program_id(0)
    if tl.program_id(1) < TILES:
        convolve_token(sequence, tl.program_id(1), conv, moves, SIZES)
    else:
        token_gates(sequence.to(tl.int64), gates, HEADS, BLOCK)


@triton.jit
def _normed_step_kernel(tokens, state, out, norm, moves, scale, SIZES: tl.constexpr):
    """Step a head's whole state over one token, then norm the output and gate it."""
    sequence = tl.program_id(1)
    head = tl.program_id(0)
    columns = tl.arange(0, SIZES.columns)
    inside = columns < SIZES.value_dim
    token = sequence.to(tl.int64)
    gate_place = norm.gate.at + token * norm.gate.token + head * norm.gate.head + columns
    gates = tl.load(gate_place, mask=inside, other=0.0)
    factor = tl.load(norm.weight + columns, mask=inside, other=0.0)
    result = advance(sequence, head, columns, tokens, state, moves, scale, SIZES)
    dtype = out.dtype.element_ty
    # Rounded as where the norm reads it from memory.
    values = result.to(dtype)[None, :]
    normed = gated_rows(values, gates[None, :], factor, norm.eps, SIZES.value_dim)
    places = (token * SIZES.heads + head) * SIZES.value_dim + columns
    tl.store(out + places[None, :], normed.to(dtype), mask=inside[None, :])


def mix_decode(
    wide: torch.Tensor, mixing: Mixing, meta: DecodeMeta, *, deterministic: bool
) -> torch.Tensor:
    x, z, raw = mixing.split(wide)
    batch, channels = x.shape
    count, dim = z.shape[1:]
    mixed = torch.empty(batch, channels, dtype=x.dtype, device=x.device)
    beta, decay = torch.empty(2, batch, count, device=x.device)
    tiles = triton.cdiv(channels, TAIL_TILE)
    arguments = {
        "conv": arguments_of(x, mixing.conv, mixing.tails, mixed),
        "moves": moves(meta, x.device),
        **gate_arguments(Gates(rows(raw), mixing.neg_decay, mixing.dt_bias, beta, decay)),
        "SIZES": conv_sizes(mixing.conv),
        "TILES": tiles,
    }
    launch(_inputs_kernel, (batch, tiles + 1), arguments, num_warps=2)
    tokens = Tokens(*mixing.heads(mixed), decay, beta)
    columns = power_of_two(dim)
    wide_state = power_of_two(tokens.q.shape[2]) * columns > MOST_STATE
    if deterministic or batch > FEW or wide_state:
        core = recurrent_gated_delta(tokens, mixing.state, meta)
        return gated_rms_norm(core, z, mixing.norm, mixing.eps).flatten(1)
    out = torch.empty(batch, count, dim, dtype=x.dtype, device=x.device)
    arguments = {
        **step_arguments(tokens, mixing.state, out),
        "norm": HeadNorm(heads(z), mixing.norm, mixing.eps),
        "moves": moves(meta, x.device),
        "SIZES": sizes_of(tokens, columns),
    }
    launch(_normed_step_kernel, (count, batch), arguments, num_warps=8)
    return out.flatten(1)
