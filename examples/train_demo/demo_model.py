"""The Qwen3.5 architecture for training on short, equally long sequences.

Same mathematics and same weight names as the published model (dense and mixture of experts), but
plain batched tensors: pictures of a batch share one grid, sequences are padded at the end. That is
several times as fast on a CPU as the general model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from demo_data import Batch
from demo_experts import SparseMLP
from torch import Tensor, nn


@dataclass(frozen=True)
class DemoShape:
    """Sizes of a demo model. `experts == 0` is the dense model."""

    vocab: int
    hidden: int = 128
    layers: int = 4
    attention_every: int = 2
    intermediate: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    rope_dims: int = 16
    rope_sections: tuple[int, int, int] = (4, 2, 2)
    rope_theta: float = 10_000.0
    key_heads: int = 4
    value_heads: int = 4
    state_dim: int = 32
    conv_kernel: int = 4
    chunk: int = 32
    experts: int = 0
    experts_per_token: int = 2
    expert_intermediate: int = 64
    vision_hidden: int = 128
    vision_depth: int = 3
    vision_heads: int = 4
    vision_intermediate: int = 256
    vision_grid: int = 10
    patch_values: int = 384
    merge: int = 2

    def is_attention(self, layer: int) -> bool:
        return (layer + 1) % self.attention_every == 0


class RMSNorm(nn.Module):
    """Zero-centred: scales by 1 + weight."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], 1.0 + self.weight, 1e-6)


class GatedRMSNorm(nn.Module):
    """Scales by weight, then gates."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, 1e-6) * F.silu(gate)


class VisionAttention(nn.Module):
    def __init__(self, shape: DemoShape) -> None:
        super().__init__()
        self.heads = shape.vision_heads
        self.qkv = nn.Linear(shape.vision_hidden, 3 * shape.vision_hidden)
        self.proj = nn.Linear(shape.vision_hidden, shape.vision_hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = _rotate(qkv[0], cos, sin), _rotate(qkv[1], cos, sin)
        out = F.scaled_dot_product_attention(q, k, qkv[2])
        return cast(Tensor, self.proj(out.transpose(1, 2).reshape(batch, length, width)))


class VisionMLP(nn.Module):
    def __init__(self, shape: DemoShape) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(shape.vision_hidden, shape.vision_intermediate)
        self.linear_fc2 = nn.Linear(shape.vision_intermediate, shape.vision_hidden)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.linear_fc2(F.gelu(self.linear_fc1(x), approximate="tanh")))


class VisionBlock(nn.Module):
    def __init__(self, shape: DemoShape) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.vision_hidden, eps=1e-6)
        self.norm2 = nn.LayerNorm(shape.vision_hidden, eps=1e-6)
        self.attn = VisionAttention(shape)
        self.mlp = VisionMLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin)
        return x + cast(Tensor, self.mlp(self.norm2(x)))


class PatchEmbed(nn.Module):
    def __init__(self, shape: DemoShape) -> None:
        super().__init__()
        side = math.isqrt(shape.patch_values // 6)
        size = (2, side, side)
        self.proj = nn.Conv3d(3, shape.vision_hidden, kernel_size=size, stride=size)

    def forward(self, patches: Tensor) -> Tensor:
        return F.linear(patches, self.proj.weight.flatten(1), self.proj.bias)


class Merger(nn.Module):
    def __init__(self, shape: DemoShape) -> None:
        super().__init__()
        self.width = shape.vision_hidden * shape.merge**2
        self.norm = nn.LayerNorm(shape.vision_hidden, eps=1e-6)
        self.linear_fc1 = nn.Linear(self.width, self.width)
        self.linear_fc2 = nn.Linear(self.width, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        merged = self.norm(x).view(len(x), -1, self.width)
        return cast(Tensor, self.linear_fc2(F.gelu(self.linear_fc1(merged))))


class Vision(nn.Module):
    """Patches [n, rows * columns * 4, values] of pictures with one grid -> [n, cells, hidden]."""

    def __init__(self, shape: DemoShape) -> None:
        super().__init__()
        self.shape = shape
        self.patch_embed = PatchEmbed(shape)
        self.pos_embed = nn.Embedding(shape.vision_grid**2, shape.vision_hidden)
        self.blocks = nn.ModuleList(VisionBlock(shape) for _ in range(shape.vision_depth))
        self.merger = Merger(shape)

    def forward(self, patches: Tensor, rows: int, columns: int) -> Tensor:
        row, column = _merge_order(rows, columns, self.shape.merge)
        x = self.patch_embed(patches) + self._position(row, column, rows, columns)
        cos, sin = self._rotation(row, column)
        for block in self.blocks:
            x = block(x, cos, sin)
        return cast(Tensor, self.merger(x))

    def _position(self, row: Tensor, column: Tensor, rows: int, columns: int) -> Tensor:
        """The learned grid, resampled bilinearly with aligned corners."""
        side = self.shape.vision_grid
        grid = self.pos_embed.weight.view(1, side, side, -1).permute(0, 3, 1, 2)
        size = (rows * self.shape.merge, columns * self.shape.merge)
        resampled = F.interpolate(grid, size=size, mode="bilinear", align_corners=True)
        return resampled[0].permute(1, 2, 0)[row, column]

    def _rotation(self, row: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
        half = self.shape.vision_hidden // self.shape.vision_heads // 2
        frequencies = 10_000.0 ** -(torch.arange(0, half, 2).float() / half)
        angles = torch.cat((row[:, None] * frequencies, column[:, None] * frequencies), dim=-1)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


def _merge_order(rows: int, columns: int, merge: int) -> tuple[Tensor, Tensor]:
    """Row and column of every patch, in spatial-merge order."""
    row = torch.arange(rows * merge)[:, None].expand(-1, columns * merge)
    column = torch.arange(columns * merge)[None].expand(rows * merge, -1)
    ordered = [
        axis.reshape(rows, merge, columns, merge).transpose(1, 2).reshape(-1)
        for axis in (row, column)
    ]
    return ordered[0], ordered[1]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, shape: DemoShape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, 2 * width, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden, bias=False)
        self.q_norm = RMSNorm(shape.head_dim)
        self.k_norm = RMSNorm(shape.head_dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        dim, turned = self.shape.head_dim, self.shape.rope_dims
        q, gate = self.q_proj(x).view(batch, length, -1, 2 * dim).chunk(2, dim=-1)
        q = self.q_norm(q).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(batch, length, -1, dim)).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, -1, dim).transpose(1, 2)
        q, k = (
            torch.cat((_rotate(part[..., :turned], cos, sin), part[..., turned:]), dim=-1)
            for part in (q, k)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out = out.transpose(1, 2) * torch.sigmoid(gate)
        return cast(Tensor, self.o_proj(out.reshape(batch, length, -1)))


def gated_delta(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, chunk: int) -> Tensor:
    """The gated delta rule from a zero state, in chunks.

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
    """(I + lower)^-1 of strictly lower triangular matrices, by doubling: a handful of batched
    products, far cheaper than that many small triangular solves."""
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
        """Depthwise causal convolution as a sum of shifted products."""
        kernel = self.shape.conv_kernel
        padded = F.pad(x, (0, 0, kernel - 1, 0))
        length = x.shape[1]
        weight = self.conv1d.weight[:, 0]
        total = padded[:, :length] * weight[:, 0]
        for tap in range(1, kernel):
            total = total + padded[:, tap : tap + length] * weight[:, tap]
        return F.silu(total)


class MLP(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


class Layer(nn.Module):
    def __init__(self, shape: DemoShape, index: int) -> None:
        super().__init__()
        self.attends = shape.is_attention(index)
        if self.attends:
            self.self_attn = Attention(shape)
        else:
            self.linear_attn = GatedDeltaNet(shape)
        if shape.experts:
            self.mlp: nn.Module = SparseMLP(shape)
        else:
            self.mlp = MLP(shape.hidden, shape.intermediate)
        self.input_layernorm = RMSNorm(shape.hidden)
        self.post_attention_layernorm = RMSNorm(shape.hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.input_layernorm(x)
        x = x + (self.self_attn(normed, cos, sin) if self.attends else self.linear_attn(normed))
        return x + cast(Tensor, self.mlp(self.post_attention_layernorm(x)))


class LanguageModel(nn.Module):
    def __init__(self, shape: DemoShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape, index) for index in range(shape.layers))
        self.norm = RMSNorm(shape.hidden)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Embeddings [B, T, hidden] and M-RoPE positions [3, B, T] -> hidden states."""
        cos, sin = self._rotation(positions)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return cast(Tensor, self.norm(x))

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        dims = self.shape.rope_dims
        frequencies = self.shape.rope_theta ** -(torch.arange(0, dims, 2).float() / dims)
        angles = positions[..., None] * frequencies
        mixed = angles[0].clone()
        for axis in (1, 2):
            chosen = slice(axis, 3 * self.shape.rope_sections[axis], 3)
            mixed[..., chosen] = angles[axis][..., chosen]
        mixed = torch.cat((mixed, mixed), dim=-1)[:, None]
        return mixed.cos(), mixed.sin()


class DemoModel(nn.Module):
    """Vision tower and language model under the names of the published checkpoints."""

    def __init__(self, shape: DemoShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = nn.Module()
        self.model.visual = Vision(shape)
        self.model.language_model = LanguageModel(shape)
        self._initialise()

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2 and "norm" not in name:
                fan_in = parameter[0].numel()
                plain = {"embed_tokens": 0.02, "pos_embed": 0.3}
                std = plain.get(name.split(".")[-2], 0.7 * fan_in**-0.5)
                nn.init.normal_(parameter, std=std)
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)

    @property
    def visual(self) -> Vision:
        return cast(Vision, self.model.visual)

    @property
    def language_model(self) -> LanguageModel:
        return cast(LanguageModel, self.model.language_model)

    def see(self, batch: Batch) -> list[Tensor]:
        """Embeddings [pictures, cells, hidden] of every slot."""
        return [self.visual(slot.patches, slot.rows, slot.columns) for slot in batch.slots]

    def read(self, batch: Batch, seen: list[Tensor]) -> Tensor:
        """Hidden states [B, T, hidden]."""
        table = self.language_model.embed_tokens
        x = table(batch.ids)
        if batch.slots:
            flat = x.flatten(0, 1)
            for slot, embeddings in zip(batch.slots, seen, strict=True):
                flat = flat.index_copy(0, slot.places, embeddings.flatten(0, 1))
            x = flat.view_as(x)
        return cast(Tensor, self.language_model(x, batch.positions))

    def logits(self, hidden: Tensor) -> Tensor:
        """Tied output projection."""
        return F.linear(hidden, self.language_model.embed_tokens.weight)
