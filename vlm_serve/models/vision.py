"""The vision tower: patches of pictures and video frames to embeddings of the language model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F

from vlm_serve.kernels.linear import linear, pack
from vlm_serve.models.sizes import VisionConfig
from vlm_serve.models.vision_grid import axial_angles, interpolate_positions
from vlm_serve.models.weights import Weights

_EPS = 1e-6
_REMEMBERED_GRIDS = 64

Grid = tuple[int, int, int]
"""(1, h, w): one temporal patch, in patches."""


@dataclass(frozen=True, slots=True)
class Affine:
    """Weight and bias of a projection or a layer norm."""

    weight: torch.Tensor
    bias: torch.Tensor


@dataclass(frozen=True, slots=True)
class VisionBlock:
    """Weights of one transformer block."""

    norm1: Affine
    qkv: Affine
    proj: Affine
    norm2: Affine
    fc1: Affine
    fc2: Affine


class VisionTower:
    """The tower of Qwen3.5 (transformers' Qwen3_5VisionModel): attention within one temporal patch,
    interpolated absolute positions, axial rotary embedding, 2x2 merger.

    Args:
        config: sizes.
        weights: where the tensors come from.
    """

    def __init__(self, config: VisionConfig, weights: Weights) -> None:
        self._config = config
        self._device = weights.device
        self._dtype = weights.dtype
        load = _Loader(weights, config)
        self._patch_embed = load.patch_embed()
        self._positions = load.positions()
        self._blocks = tuple(load.block(index) for index in range(config.depth))
        self._merger_norm = load.norm("merger.norm")
        merged = config.hidden_size * config.merge_size**2
        self._merger_fc1 = load.projection("merger.linear_fc1", merged, merged)
        self._merger_fc2 = load.projection("merger.linear_fc2", config.out_hidden_size, merged)
        self._grid_tensors = lru_cache(_REMEMBERED_GRIDS)(self._compute_grid_tensors)

    @torch.inference_mode()
    def encode(
        self, patches: torch.Tensor, grids: Sequence[Grid], *, deterministic: bool = False
    ) -> list[torch.Tensor]:
        """Embed several temporal patches at once; each result equals encoding it alone.

        Args:
            patches: float32 `[sum of h * w, channels * temporal * patch * patch]`, normalised
                pixels in merge-block order, grid after grid.
            grids: (1, h, w) of each, in patches.
            deterministic: equal to the last bit, not only in value.

        Returns:
            `[h * w / merge**2, hidden]` in the model's dtype for each grid.
        """
        sizes = [height * width for _, height, width in grids]
        assert all(frames == 1 for frames, _, _ in grids), "one temporal patch per grid"
        assert patches.shape == (sum(sizes), self._config.patch_dim), "patches do not fit the grids"
        if not grids:
            return []
        tables = [self._grid_tensors(height, width) for _, height, width in grids]
        positions, cos, sin = (torch.cat(parts) for parts in zip(*tables, strict=True))
        x = linear(
            patches.to(self._device, self._dtype),
            self._patch_embed.weight,
            self._patch_embed.bias,
            plus=positions,
            deterministic=deterministic,
        )
        # [n, 1, 1, d]: the same angles for queries, keys and every head.
        angles = (cos[:, None, None], sin[:, None, None])
        for block in self._blocks:
            x = self._attention(block, x, angles, sizes, deterministic)
            x = self._mlp(block, x, deterministic)
        merged = self._merge(x, deterministic)
        rows = [size // self._config.merge_size**2 for size in sizes]
        return list(torch.split_with_sizes(merged, rows))

    def _attention(
        self,
        block: VisionBlock,
        x: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        sizes: list[int],
        deterministic: bool,
    ) -> torch.Tensor:
        tokens, heads = x.shape[0], self._config.heads
        normed = _layer_norm(x, block.norm1)
        qkv = linear(normed, block.qkv.weight, block.qkv.bias, deterministic=deterministic)
        qkv = qkv.view(tokens, 3, heads, -1)
        mixed = _attend(_rotate(qkv[:, :2], *angles), qkv[:, 2], sizes).view(tokens, -1)
        weight, bias = block.proj.weight, block.proj.bias
        return linear(mixed, weight, bias, plus=x, deterministic=deterministic)

    def _mlp(self, block: VisionBlock, x: torch.Tensor, deterministic: bool) -> torch.Tensor:
        hidden = linear(
            _layer_norm(x, block.norm2),
            block.fc1.weight,
            block.fc1.bias,
            activation="gelu_tanh",
            deterministic=deterministic,
        )
        weight, bias = block.fc2.weight, block.fc2.bias
        return linear(hidden, weight, bias, plus=x, deterministic=deterministic)

    def _merge(self, x: torch.Tensor, deterministic: bool) -> torch.Tensor:
        first, second = self._merger_fc1, self._merger_fc2
        rows = x.shape[0] // self._config.merge_size**2
        squares = _layer_norm(x, self._merger_norm).view(rows, -1)
        hidden = linear(
            squares, first.weight, first.bias, activation="gelu", deterministic=deterministic
        )
        return linear(hidden, second.weight, second.bias, deterministic=deterministic)

    def _compute_grid_tensors(
        self, height: int, width: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        config = self._config
        positions = interpolate_positions(self._positions, height, width, config.merge_size)
        head_dim = config.hidden_size // config.heads
        cos, sin = axial_angles(height, width, config.merge_size, head_dim, config.rope_theta)
        return positions, cos.to(self._device), sin.to(self._device)


class _Loader:
    """Names and shapes of the tower's tensors."""

    def __init__(self, weights: Weights, config: VisionConfig) -> None:
        self._weights = weights
        self._config = config
        self._prefix = weights.vision_prefix()

    def positions(self) -> torch.Tensor:
        shape = (self._config.num_positions, self._config.hidden_size)
        return self._weights.tensor(f"{self._prefix}pos_embed.weight", shape)

    def patch_embed(self) -> Affine:
        """A convolution whose stride is its kernel: a projection of flattened patches."""
        config, name = self._config, f"{self._prefix}patch_embed.proj"
        kernel = (config.in_channels, config.temporal_patch_size, *[config.patch_size] * 2)
        weight = self._weights.stacked([f"{name}.weight"], [(config.hidden_size, *kernel)])
        bias = self._weights.tensor(f"{name}.bias", (config.hidden_size,))
        return Affine(pack(weight.flatten(1)), bias)

    def norm(self, name: str) -> Affine:
        shape, name = (self._config.hidden_size,), self._prefix + name
        weight = self._weights.tensor(f"{name}.weight", shape)
        return Affine(weight, self._weights.tensor(f"{name}.bias", shape))

    def projection(self, name: str, rows: int, columns: int) -> Affine:
        name = self._prefix + name
        weight = self._weights.projection([f"{name}.weight"], [(rows, columns)])
        return Affine(weight, self._weights.tensor(f"{name}.bias", (rows,)))

    def block(self, index: int) -> VisionBlock:
        hidden, wide = self._config.hidden_size, self._config.intermediate_size
        name = f"blocks.{index}"
        return VisionBlock(
            norm1=self.norm(f"{name}.norm1"),
            qkv=self.projection(f"{name}.attn.qkv", 3 * hidden, hidden),
            proj=self.projection(f"{name}.attn.proj", hidden, hidden),
            norm2=self.norm(f"{name}.norm2"),
            fc1=self.projection(f"{name}.mlp.linear_fc1", wide, hidden),
            fc2=self.projection(f"{name}.mlp.linear_fc2", hidden, wide),
        )


def _layer_norm(x: torch.Tensor, norm: Affine) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, _EPS)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate `[n, 2, heads, d]` in halves, in float32."""
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return rotated.to(x.dtype)


def _attend(qk: torch.Tensor, v: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Attention of every picture to itself: `[n, 2, heads, d]`, `[n, heads, d]` to `[n, heads, d]`.

    Neighbours of equal size share a call.
    """
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    start = 0
    while sizes:
        size = sizes[0]
        count = next((i for i, other in enumerate(sizes) if other != size), len(sizes))
        part = slice(start, start + count * size)
        q, k, values = (
            tensor[part].view(count, size, *tensor.shape[1:]).transpose(1, 2)
            for tensor in (qk[:, 0], qk[:, 1], v)
        )
        mixed = F.scaled_dot_product_attention(q, k, values)
        out[part] = mixed.transpose(1, 2).flatten(0, 1)
        start, sizes = part.stop, sizes[count:]
    return out
