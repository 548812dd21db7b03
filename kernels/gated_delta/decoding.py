"""All of a Gated DeltaNet mixer between its two products, for one token per sequence."""

from __future__ import annotations

from typing import NamedTuple

import torch

from vlm_serve.kernels import causal_conv, gated_delta, norms
from vlm_serve.kernels.checks import (
    FLOAT_DTYPES,
    KernelArgumentError,
    check_meta,
    check_tensor,
)
from vlm_serve.kernels.dispatch import Op
from vlm_serve.kernels.metadata import DecodeMeta


class Mixing(NamedTuple):
    """A mixer's small weights, and its states.

    Attributes:
        conv: `[C, K]`, C channels of queries, keys and values.
        neg_decay, dt_bias: float32 `[Hv]`.
        norm, eps: `[Dv]`, of the gated norm.
        tails: `[rows, C, K - 1]`, written in place.
        state: `[rows, Hv, Dk, Dv]`, written in place.
    """

    conv: torch.Tensor
    neg_decay: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    eps: float
    tails: torch.Tensor
    state: torch.Tensor

    def split(self, wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries with keys and values, z `[B, Hv, Dv]`, and b beside a, as views."""
        heads, dim = self.neg_decay.shape[0], self.norm.shape[0]
        widths = (self.conv.shape[0], heads * dim, 2 * heads)
        mixed, z, raw = torch.split_with_sizes(wide, widths, 1)
        return mixed, z.view(-1, heads, dim), raw

    def heads(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values of convolved channels, `[B, heads, dim]` views."""
        rows, key_dim = mixed.shape[0], self.state.shape[2]
        heads, dim = self.neg_decay.shape[0], self.norm.shape[0]
        width = (self.conv.shape[0] - heads * dim) // 2
        q, k, v = torch.split_with_sizes(mixed, (width, width, heads * dim), 1)
        return q.view(rows, -1, key_dim), k.view(rows, -1, key_dim), v.view(rows, heads, dim)


def _by_ops(
    wide: torch.Tensor, mixing: Mixing, meta: DecodeMeta, *, deterministic: bool
) -> torch.Tensor:
    """Run the ops one by one, each by the kernels that it has."""
    mixed, z, raw = mixing.split(wide)
    beta, decay = gated_delta.gates(
        raw, mixing.neg_decay, mixing.dt_bias, deterministic=deterministic
    )
    mixed = causal_conv.causal_conv_decode(mixed, mixing.conv, mixing.tails, meta)
    q, k, v = mixing.heads(mixed)
    core = gated_delta.recurrent_gated_delta(q, k, v, decay, beta, mixing.state, meta)
    return norms.gated_rms_norm(core, z, mixing.norm, mixing.eps).flatten(1)


_mix = Op(_by_ops, triton="vlm_serve.kernels.gated_delta.decoding_triton:mix_decode")


def mix_decode(
    wide: torch.Tensor, mixing: Mixing, meta: DecodeMeta, *, deterministic: bool = False
) -> torch.Tensor:
    """Compute gates, convolution, recurrence and gated norm of one new token per sequence.

    Args:
        wide: `[B, C + Hv * Dv + 2 * Hv]`: queries, keys and values; z; b and a side by side.
        mixing: weights and states.
        meta: the sequences' rows.
        deterministic: make an element's bits independent of its neighbours.

    Returns:
        `[B, Hv * Dv]` in the dtype of `wide`.

    Raises:
        KernelArgumentError: naming the argument at fault.
    """
    conv, tails, state = mixing.conv, mixing.tails, mixing.state
    heads, dim, device = mixing.neg_decay.shape[0], mixing.norm.shape[0], wide.device
    columns = conv.shape[0] + heads * dim + 2 * heads
    check_tensor("wide", wide, (None, columns), FLOAT_DTYPES, device)
    check_tensor("conv", conv, (None, None), (wide.dtype,), device)
    check_tensor("tails", tails, (None, *_tail(conv)), (wide.dtype,), device)
    check_tensor("state", state, (None, heads, None, dim), FLOAT_DTYPES, device)
    if not state[:1].is_contiguous():
        raise KernelArgumentError("state", "a row must be contiguous")
    check_meta(meta, wide.shape[0], min(tails.shape[0], state.shape[0]))
    return _mix(device, wide, mixing, meta, deterministic=deterministic)


def _tail(conv: torch.Tensor) -> tuple[int, int]:
    return conv.shape[0], conv.shape[1] - 1
