"""Gated delta rule by torch, token by token: in prefill, decoding and verification alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from vlm_serve.kernels.elementwise import softplus
from vlm_serve.kernels.elementwise.reference import times_sigmoid
from vlm_serve.kernels.metadata import DecodeMeta, PrefillMeta, Updates, VerifyMeta
from vlm_serve.kernels.plain import sequences, widened

EPS = 1e-6
Step = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Tokens(NamedTuple):
    """Inputs of the packed tokens; shapes and dtypes as `chunk_gated_delta` takes them.

    Attributes:
        q, k: queries and keys, not normalised.
        v: values.
        g: log decay.
        beta: write strength.
        skip: `[Hv]`, what part of v is added to the outputs. With it the recurrence is Mamba2's: a
            value is written as it is, and q and k are read as they are. None: the delta rule.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    skip: torch.Tensor | None = None

    def part(self, begin: int, end: int) -> Tokens:
        """Return the tokens from `begin` to before `end`."""
        q, k, v, g, beta = (tensor[begin:end] for tensor in self[:5])
        return Tokens(q, k, v, g, beta, self.skip)

    def keys(self) -> torch.Tensor:
        """Return the keys that values are written under, `[N, Hk, Dk]`."""
        return unit(self.k) if self.skip is None else widened(self.k)


def gated_delta(
    tokens: Tokens, state: torch.Tensor, meta: PrefillMeta | DecodeMeta
) -> torch.Tensor:
    """Step through prefill and decode alike: a decode token is a slice of one."""
    out = torch.empty(tokens.v.shape, dtype=tokens.v.dtype)
    for begin, end, source, kept in sequences(meta):
        current = torch.zeros_like(state[0]) if source < 0 else state[source]
        steps = steps_of(tokens.part(begin, end), current)
        for place in range(begin, end + 1):
            for row in (row for token, row in kept if token == place):
                state[row] = current
            if place < end:
                result, _, current = next(steps)
                out[place] = result[:, 0]
    return out


def steps_of(tokens: Tokens, state: torch.Tensor) -> Iterator[Step]:
    """Step through one sequence from a state `[Hv, Dk, Dv]`, in whose dtype states are kept.

    Yields:
        (output `[Hv, 1, Dv]`, change `[Hv, 1, Dv]`, state after the token).
    """
    shared = tokens.v.shape[1] // tokens.k.shape[1]
    scale = tokens.q.shape[2] ** -0.5
    q = unit(tokens.q) * scale if tokens.skip is None else widened(tokens.q)
    q, k = (heads.repeat_interleave(shared, 1) for heads in (q, tokens.keys()))
    inputs = (q, k, widened(tokens.v))
    heads = (widened(tokens.g).exp()[..., None], widened(tokens.beta)[..., None])
    for query, key, value, decay, strength in zip(
        *(operand.unsqueeze(2) for operand in (*inputs, *heads)), strict=True
    ):
        before = widened(state) * decay
        written = value if tokens.skip is not None else value - torch.bmm(key, before)
        change = strength * written
        after = before + key.mT * change
        state = after.to(state.dtype)
        result = torch.bmm(query, after)
        if tokens.skip is not None:
            result = result + tokens.skip[:, None, None] * value
        yield result, change, state


def unit(x: torch.Tensor) -> torch.Tensor:
    """Return keys or queries `[N, Hk, Dk]` at unit length."""
    wide = widened(x)
    return wide * (wide.square().sum(-1, keepdim=True) + EPS).rsqrt()


def verify_gated_delta(
    tokens: Tokens, state: torch.Tensor, updates: Updates, meta: VerifyMeta
) -> torch.Tensor:
    fold_gated_delta(state, updates, meta.folds)
    out = torch.empty(tokens.v.shape, dtype=tokens.v.dtype)
    slices = zip(meta.rows, meta.updates, pairwise(meta.cu_seqlens), strict=True)
    for row, first, (begin, end) in slices:
        slice_tokens = tokens.part(begin, end)
        updates.keys[first : first + end - begin] = slice_tokens.keys()
        updates.decays[first : first + end - begin] = slice_tokens.g.exp()
        for place, (result, change, _) in enumerate(steps_of(slice_tokens, state[row])):
            out[begin + place], updates.changes[first + place] = result[:, 0], change[:, 0]
    return out


def fold_gated_delta(
    state: torch.Tensor, updates: Updates, folds: Sequence[tuple[int, int, int]]
) -> None:
    shared = state.shape[1] // updates.keys.shape[1]
    for row, first, count in folds:
        for entry in range(first, first + count):
            keys = updates.keys[entry].repeat_interleave(shared, 0)[:, :, None]
            before = state[row].float() * updates.decays[entry][:, None, None]
            state[row] = before + keys * updates.changes[entry][:, None]


def gates(
    raw: torch.Tensor,
    neg_decay: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    wide, heads = raw.float(), neg_decay.shape[0]
    b, a = wide[:, :heads], wide[:, heads:] + dt_bias
    return times_sigmoid(torch.ones_like(b), b), neg_decay * softplus(a)


def step_lengths(
    raw: torch.Tensor, neg_decay: torch.Tensor, dt_bias: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = softplus(raw.float() + dt_bias).clamp_(low, high)
    return lengths, neg_decay * lengths
