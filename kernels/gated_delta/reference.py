"""Reference gated delta rule, the oracle of tests."""

from __future__ import annotations

import torch


def gated_delta_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one sequence, token by token and head by head, in float64; the oracle of tests.

    Args:
        q, k, v, g, beta: as in `chunk_gated_delta`, n tokens.
        state: `[Hv, Dk, Dv]` or None for zeros.

    Returns:
        (output `[n, Hv, Dv]`, states after 1 ... n tokens `[n, Hv, Dk, Dv]`), float64.
    """
    q, k, v, g, beta = (tensor.double() for tensor in (q, k, v, g, beta))
    tokens, heads, width = v.shape
    q = q / (q.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() * q.shape[-1] ** -0.5
    k = k / (k.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()
    out = v.new_zeros(tokens, heads, width)
    states = v.new_zeros(tokens, heads, k.shape[-1], width)
    for head in range(heads):
        shared = head * k.shape[1] // heads
        current = v.new_zeros(k.shape[-1], width) if state is None else state[head].double()
        for t in range(tokens):
            current = g[t, head].exp() * current
            change = beta[t, head] * (v[t, head] - k[t, shared] @ current)
            current = current + torch.outer(k[t, shared], change)
            out[t, head] = q[t, shared] @ current
            states[t, head] = current
    return out, states
