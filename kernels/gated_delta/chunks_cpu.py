"""State-independent factors of the gated delta rule, for many pieces of chunks at once.

With G the cumulative log decay of a piece, D the lower triangle of exp(G_i - G_j) and S the state
before it, the piece's writes u solve

    (I + diag(beta) tril(K K^T * D, -1)) u = diag(beta) (v - exp(G) K S)

(the UT transform of Yang et al. 2024). The triangular matrix is inverted here, which leaves three
matrix products per piece to the sequential scan.

A chunk is processed in pieces of 32 tokens from its start. The last piece is padded with empty
tokens (k = q = beta = g = 0) to 16 or 32; on a CPU this is a quarter faster than pieces of 64.
Every operation used here gives a matrix the same bits however many others share its batch (tested),
so a piece's factors depend on its chunk alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

PIECE = 32
BASE = 8
EPS = 1e-6


@dataclass(frozen=True)
class Inputs:
    """The packed step, `[N, ...]`, with the inverse norms of its keys and queries.

    `k_scale` and `q_scale`, `[N, Hk]`, turn keys into unit vectors and queries into vectors of
    length `Dk ** -0.5`.
    """

    q: torch.Tensor
    k: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    q_scale: torch.Tensor
    k_scale: torch.Tensor


@dataclass(frozen=True)
class Factors:
    """Factors of b pieces of padded length L.

    Attributes:
        kq: `[b, Hv, 2 L, Dk]`, unit keys above scaled queries, repeated for each value head.
        mix: `[b, Hv, 2 L, L]`, multiplies (v - exp(G) K S). The upper half gives the writes,
            decayed to the piece's end; the lower half the own tokens' share of the outputs.
        growth: `[b, Hv, L, 1]`, exp(G).
        decay: `[b, Hv, 1, 1]`, exp(G) of the last token.
    """

    kq: torch.Tensor
    mix: torch.Tensor
    growth: torch.Tensor
    decay: torch.Tensor


def padded_size(length: int) -> int:
    """Return the padded length of a piece of 1 to 32 tokens."""
    return PIECE if 2 * length > PIECE else PIECE // 2


def inverse_norm(x: torch.Tensor) -> torch.Tensor:
    """Compute `rsqrt(sum(x ** 2) + eps)` over the last dimension, float32."""
    norm: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32)
    return norm.square_().add_(EPS).rsqrt_()


def piece_factors(inputs: Inputs, pieces: Sequence[tuple[int, int]], size: int) -> Factors:
    """Compute the factors of pieces with one padded size.

    Args:
        inputs: the step.
        pieces: (begin, end) of each piece in the packed tokens.
        size: padded length, >= every piece's length.
    """
    count, heads = len(pieces), inputs.g.shape[1]
    key_heads, key_dim = inputs.k.shape[1:]
    shared = heads // key_heads
    kq = torch.empty(count, key_heads, shared, 2 * size, key_dim)
    total = torch.empty(count, heads, size)
    beta = torch.empty(count, heads, size)
    first = 0
    for begin, end, number in _runs(pieces, size):
        _load(inputs, begin, end, number, kq[first:], total[first:], beta[first:])
        first += number
    total = total.cumsum(-1)

    unrepeated = kq.view(count * key_heads, shared, 2 * size, key_dim)[:, 0]
    products = torch.bmm(unrepeated, unrepeated[:, :size].mT)
    products = products.view(count, key_heads, 1, 2 * size, size)
    # The upper triangle may overflow to inf; tril_ overwrites it before any product.
    decays = (total.unsqueeze(-1) - total.unsqueeze(-2)).exp_().tril_()
    decays = decays.view(count, key_heads, shared, size, size)
    reads = torch.mul(decays, products[..., size:, :]).view(count * heads, size, size)
    system = decays.mul_(products[..., :size, :]).view(count, heads, size, size)
    system.mul_(beta.unsqueeze(-1))
    inverse = unit_lower_inverse(system.view(count * heads, size, size))
    inverse.view(count, heads, size, size).mul_(beta.unsqueeze(-2))

    mix = torch.empty(count, heads, 2 * size, size)
    mix[:, :, size:] = torch.bmm(reads, inverse).view(count, heads, size, size)
    rest = (total[..., -1:] - total).exp_().unsqueeze(-1)
    torch.mul(inverse.view(count, heads, size, size), rest, out=mix[:, :, :size])
    growth = total.exp_().unsqueeze(-1)
    return Factors(kq.flatten(1, 2), mix, growth, growth[:, :, -1:])


def _runs(pieces: Sequence[tuple[int, int]], size: int) -> list[tuple[int, int, int]]:
    """Join neighbouring full pieces into (begin, end, number); short ones stay single."""
    runs: list[tuple[int, int, int]] = []
    for begin, end in pieces:
        full = end - begin == size
        if full and runs and runs[-1][1] == begin and (begin - runs[-1][0]) % size == 0:
            runs[-1] = (runs[-1][0], end, runs[-1][2] + 1)
        else:
            runs.append((begin, end, 1))
    return runs


def _load(
    inputs: Inputs,
    begin: int,
    end: int,
    number: int,
    kq: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
) -> None:
    """Load tokens begin:end into the first `number` pieces of the padded buffers."""
    size, length = g.shape[-1], (end - begin) // number
    kq, g, beta = kq[:number], g[:number], beta[:number]
    if length < size:
        kq.zero_()
        g.zero_()
        beta.zero_()
    for x, scale, offset in (
        (inputs.k, inputs.k_scale, 0),
        (inputs.q, inputs.q_scale, size),
    ):
        heads = x[begin:end].view(number, length, *x.shape[1:]).permute(0, 2, 1, 3).unsqueeze(2)
        scales = scale[begin:end].view(number, length, -1).mT
        target = kq[:, :, :, offset : offset + length]
        torch.mul(heads.expand_as(target), scales[:, :, None, :, None], out=target)
    g[..., :length] = inputs.g[begin:end].view(number, length, -1).mT
    beta[..., :length] = inputs.beta[begin:end].view(number, length, -1).mT


def unit_lower_inverse(system: torch.Tensor) -> torch.Tensor:
    """Invert `I + tril(system, -1)` for a batch of matrices.

    The diagonal blocks of 8 are inverted by forward substitution, side by side in the last
    dimension. Then pairs of blocks are merged: the lower left block of the inverse of
    [[A, 0], [C, B]] is -B^-1 C A^-1. This is as stable as substitution, at the speed of matrix
    products.

    Args:
        system: float32 `[B, n, n]`, n one of 8, 16, 32, 64; read below the diagonal only.

    Returns:
        float32 `[B, n, n]`, zero above the diagonal.
    """
    batch, size = system.shape[:2]
    inverse = system.new_zeros(batch, size, size)
    blocks = size // BASE
    shape = (batch, blocks, BASE, blocks, BASE)
    base = system.view(shape).diagonal(dim1=1, dim2=3).permute(1, 2, 0, 3)
    base = base.reshape(BASE, BASE, batch * blocks).neg()
    solved = torch.zeros_like(base)
    for i in range(BASE):
        solved[i, i] = 1.0
        solved[i, :i] = base[i, :i]
        for j in range(1, i):
            solved[i, :j].addcmul_(base[i, j], solved[j, :j])
    solved = solved.view(BASE, BASE, batch, blocks)
    inverse.view(shape).diagonal(dim1=1, dim2=3).copy_(solved.permute(2, 0, 1, 3))
    width = BASE
    while width < size:
        for start in range(0, size, 2 * width):
            upper = slice(start, start + width)
            lower = slice(start + width, start + 2 * width)
            product = torch.bmm(system[:, lower, upper], inverse[:, upper, upper])
            inverse[:, lower, upper] = torch.bmm(inverse[:, lower, lower], product).neg_()
        width *= 2
    return inverse
