"""The gated delta net of Qwen3.5 on padded batches."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from demo_shape import DemoShape
from torch import Tensor, nn


class GatedRMSNorm(nn.Module):
    """Scales by weight, then gates."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, 1e-6) * F.silu(gate)


def gated_delta(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, chunk: int) -> Tensor:
    """Apply the gated delta rule from a zero state, in chunks.

    q, k, v [B, H, T, D], decay (log) and beta [B, H, T]; T is a multiple of `chunk`.
    """
    batch, heads, length, dim = q.shape
    q = F.normalize(q, dim=-1, eps=1e-6) * dim**-0.5
    k = F.normalize(k, dim=-1, eps=1e-6)
    q, k, v = (x.reshape(batch, heads, -1, chunk, dim) for x in (q, k, v))
    decay, beta = (x.reshape(batch, heads, -1, chunk) for x in (decay, beta))
    total = decay.cumsum(-1)
    later = torch.ones(chunk, chunk, dtype=torch.bool).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()
    k_beta = k * beta[..., None]
    keys = k.transpose(-1, -2)
    lower = ((k_beta @ keys) * between).tril(-1)
    within = (q @ keys) * between
    right = torch.cat((v * beta[..., None], k_beta * total.exp()[..., None]), dim=-1)
    fresh, reads = torch.split(_unit_inverse(lower) @ right, dim, dim=-1)
    q_decayed = q * total.exp()[..., None]
    k_decayed = (k * (total[..., -1:] - total).exp()[..., None]).transpose(-1, -2)
    kept = total[..., -1].exp()[..., None, None]
    state = torch.zeros(batch, heads, dim, dim)
    outputs = []
    for i in range(length // chunk):
        written = fresh[:, :, i] - reads[:, :, i] @ state
        outputs.append(q_decayed[:, :, i] @ state + within[:, :, i] @ written)
        state = state * kept[:, :, i] + k_decayed[:, :, i] @ written
    return torch.stack(outputs, dim=2).reshape(batch, heads, length, dim)


def _unit_inverse(lower: Tensor) -> Tensor:
    """Invert I + lower for strictly lower triangular matrices by doubling.

    A handful of batched products is far cheaper than many small triangular solves.
    """
    size = lower.shape[-1]
    identity = torch.eye(size)
    power = -lower
    inverse = identity + power
    done = 2
    while done < size:
        power = power @ power
        inverse = inverse + power @ inverse
        done *= 2
    return inverse


class GatedDeltaNet(nn.Module):
    def __init__(self, shape: DemoShape) -> None:
        super().__init__()
        self.shape = shape
        keys = shape.key_heads * shape.state_dim
        values = shape.value_heads * shape.state_dim
        self.widths = (keys, keys, values)
        channels = sum(self.widths)
        kernel = shape.conv_kernel
        self.conv1d = nn.Conv1d(channels, channels, kernel, groups=channels, bias=False)
        self.dt_bias = nn.Parameter(torch.ones(shape.value_heads))
        # Long memories: the published initialisation forgets within a few tokens.
        rates = torch.logspace(-3, -0.3, shape.value_heads)
        self.A_log = nn.Parameter(torch.log(rates))
        self.norm = GatedRMSNorm(shape.state_dim)
        self.out_proj = nn.Linear(values, shape.hidden, bias=False)
        self.in_proj_qkv = nn.Linear(shape.hidden, channels, bias=False)
        self.in_proj_z = nn.Linear(shape.hidden, values, bias=False)
        self.in_proj_b = nn.Linear(shape.hidden, shape.value_heads, bias=False)
        self.in_proj_a = nn.Linear(shape.hidden, shape.value_heads, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        mixed = self._convolve(self.in_proj_qkv(x))
        q, k, v = (
            part.view(batch, length, -1, self.shape.state_dim).transpose(1, 2)
            for part in torch.split(mixed, list(self.widths), dim=-1)
        )
        decay = -self.A_log.exp() * F.softplus(self.in_proj_a(x) + self.dt_bias)
        beta = self.in_proj_b(x).sigmoid()
        decay, beta = decay.transpose(1, 2), beta.transpose(1, 2)
        pad = -length % self.shape.chunk
        q, k, v = (F.pad(part, (0, 0, 0, pad)) for part in (q, k, v))
        decay, beta = F.pad(decay, (0, pad)), F.pad(beta, (0, pad))
        out = gated_delta(q, k, v, decay, beta, self.shape.chunk)[:, :, :length].transpose(1, 2)
        gate = self.in_proj_z(x).view(batch, length, -1, self.shape.state_dim)
        return cast(Tensor, self.out_proj(self.norm(out, gate).reshape(batch, length, -1)))

    def _convolve(self, x: Tensor) -> Tensor:
        """Apply a depthwise causal convolution as a sum of shifted products."""
        kernel = self.shape.conv_kernel
        padded = F.pad(x, (0, 0, kernel - 1, 0))
        length = x.shape[1]
        weight = self.conv1d.weight[:, 0]
        total = padded[:, :length] * weight[:, 0]
        for tap in range(1, kernel):
            total = total + padded[:, tap : tap + length] * weight[:, tap]
        return F.silu(total)
