"""The vision tower for pictures that share one grid: no mask and no packing."""

from __future__ import annotations

import math
from typing import cast

import torch
import torch.nn.functional as F
from demo_shape import DemoShape
from torch import Tensor, nn


class VisionAttention(nn.Module):
    def __init__(self, shape: DemoShape) -> None:
        super().__init__()
        self.heads = shape.vision_heads
        self.qkv = nn.Linear(shape.vision_hidden, 3 * shape.vision_hidden)
        self.proj = nn.Linear(shape.vision_hidden, shape.vision_hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = rotate(qkv[0], cos, sin), rotate(qkv[1], cos, sin)
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
        """Resample the learned grid bilinearly with aligned corners."""
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
    """Return row and column of every patch in spatial-merge order."""
    row = torch.arange(rows * merge)[:, None].expand(-1, columns * merge)
    column = torch.arange(columns * merge)[None].expand(rows * merge, -1)
    ordered = [
        axis.reshape(rows, merge, columns, merge).transpose(1, 2).reshape(-1)
        for axis in (row, column)
    ]
    return ordered[0], ordered[1]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
