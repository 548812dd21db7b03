"""The vision tower of MiniCPM-V: attention within one slice, nearest learned positions, a merger of
2x2 windows between its layers and one behind the last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from vlm_serve.kernels.linear import Activation, Linear
from vlm_serve.kernels.linear.low_rank import AdapterChanges
from vlm_serve.models.spec import Vision
from vlm_serve.models.vision_parts import (
    Affine,
    AttentionPart,
    GridMemory,
    MlpPart,
    Products,
    TowerReader,
    VisionBlock,
    attend,
    layer_norm,
    nearest_positions,
    nested_order,
)
from vlm_serve.models.weights import Weights

_WINDOW = 4
"""Patches per window, and windows per token."""

Grid = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class WindowVisionSpec(Vision):
    """The tower of MiniCPM-V.

    Attributes:
        side: of the square of learned position embeddings.
        merged_layer: behind this layer windows of 2x2 patches become one, if a token covers 4x4 of
            them.
        merge_size: patches per side that become one token, unless a picture overrides it: 2 or 4.
    """

    anchor = "vision_tower.post_layernorm.weight"
    layers = "vision_tower.encoder.layers."

    side: int
    merged_layer: int

    def load(self, source: Weights, prefix: str, dtype: torch.dtype) -> WindowVisionTower:
        return WindowVisionTower(self, source, prefix, dtype)


class WindowVisionTower:
    """transformers' MiniCPMV4_6VisionModel and its mergers.

    Patches are sorted into merge order, so that the patches of a window and of a token are
    neighbours; attention does not depend on their order.

    Args:
        config: sizes.
        source: of the tensors.
        prefix: of their names.
        dtype: of activations.
        reader: of the tensors; None: those of MiniCPM-V.
    """

    activation: ClassVar[Activation] = "gelu_tanh"

    def __init__(
        self,
        config: WindowVisionSpec,
        source: Weights,
        prefix: str,
        dtype: torch.dtype,
        reader: WindowReader | None = None,
    ) -> None:
        self._config, self._device, self._dtype = config, source.device, dtype
        reader = reader or WindowReader(source, prefix, config)
        self._patch_embed = reader.patch_embed()
        self._positions = reader.positions()
        self._blocks = tuple(reader.block(index) for index in range(config.depth))
        self._window = reader.window()
        self._last_norm = reader.last_norm()
        self._merger = reader.merger()
        self._grid_tensors = GridMemory(self._compute_grid_tensors)

    @torch.inference_mode()
    def encode(
        self,
        patches: torch.Tensor,
        grids: Sequence[Grid],
        merges: Sequence[int] | None = None,
        *,
        deterministic: bool = False,
        changes: AdapterChanges | None = None,
    ) -> list[torch.Tensor]:
        """Embed several pictures or slices at once; each result equals encoding it alone.

        Args:
            patches: float32 `[sum of h * w, channels * patch * patch]`, normalised pixels, row by
                row, grid after grid.
            grids, merges, deterministic, changes: see `Tower.encode`; sides are multiples of the
                merge.

        Returns:
            `[h * w / merge**2, out_hidden_size]` in the model's dtype for each grid.
        """
        sizes = [height * width for _, height, width in grids]
        assert patches.shape == (sum(sizes), self._config.patch_dim), "patches do not fit the grids"
        merges = [self._config.merge_size] * len(grids) if merges is None else merges
        how = Products(deterministic, changes if changes is not None and changes.tower else None)
        pieces = patches.split_with_sizes(sizes)
        encoded: list[torch.Tensor] = [patches] * len(grids)
        for merge in sorted(set(merges)):
            chosen = [index for index, picture_merge in enumerate(merges) if picture_merge == merge]
            group = [(pieces[index], grids[index]) for index in chosen]
            for index, rows in zip(chosen, self._encode(group, merge, how), strict=True):
                encoded[index] = rows
        return encoded

    def fixed(self, most: int) -> None:
        """Implement `Tower.fixed`."""

    def _encode(
        self, pictures: list[tuple[torch.Tensor, Grid]], merge: int, how: Products
    ) -> tuple[torch.Tensor, ...]:
        tables = [self._grid_tensors(*grid[1:], merge) for _, grid in pictures]
        orders, positions = zip(*tables, strict=True)
        ordered = [picture[order] for (picture, _), order in zip(pictures, orders, strict=True)]
        sizes = [len(picture) for picture in ordered]
        pixels = self._pixels(torch.cat(ordered)).to(self._device, self._dtype)
        x = how(self._patch_embed, pixels, plus=torch.cat(positions))
        x = self._through(x, sizes, merge, how)
        merged = self._merged(x.view(-1, _WINDOW * self._config.hidden_size), how)
        return merged.split_with_sizes([size // merge**2 for size in sizes])

    def _through(
        self, x: torch.Tensor, sizes: list[int], merge: int, how: Products
    ) -> torch.Tensor:
        """Run all layers over pictures of so many patches, and the last norm if there is one."""
        lengths, heads = sizes, self._config.heads
        for index, block in enumerate(self._blocks):
            x = block.attention(x, heads, partial(attend, sizes=lengths), how)
            x = block.mlp(x, self.activation, how, plus=x)
            if merge == 4 and index == self._config.merged_layer:
                x = self._merge_windows(x, how)
                lengths = [size // _WINDOW for size in sizes]
        return x if self._last_norm is None else layer_norm(x, self._last_norm)

    def _pixels(self, patches: torch.Tensor) -> torch.Tensor:
        """Return patches in the order of numbers that the first product has."""
        return patches

    def _merged(self, x: torch.Tensor, how: Products) -> torch.Tensor:
        """Return the embeddings of tokens: `[n, 4 * hidden]` to `[n, out_hidden_size]`."""
        assert self._merger is not None, "merges behind the last layer"
        return self._merger(x, "gelu", how)

    def _merge_windows(self, x: torch.Tensor, how: Products) -> torch.Tensor:
        """Reduce `[n, hidden]` to `[n / 4, hidden]`: attention within each window, then its
        merger."""
        assert self._window is not None, "merges windows"
        attention, mlp = self._window
        sizes = [_WINDOW] * (len(x) // _WINDOW)
        x = attention(x, self._config.heads, partial(attend, sizes=sizes), how)
        windows = x.view(-1, _WINDOW, self._config.hidden_size)
        return mlp(windows.flatten(1), "gelu_tanh", how, plus=windows.mean(1))

    def _compute_grid_tensors(
        self, height: int, width: int, merge: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the order of the patches, and their positions."""
        assert merge in (2, 4) and height % merge == width % merge == 0, "a grid of whole tokens"
        order = nested_order(height, width, merge)
        places = nearest_positions(height, width, self._config.side)[order]
        return order, self._positions[places.to(self._device)]


class WindowReader(TowerReader):
    """Names and shapes of the tower's tensors. `tower`: what they begin with behind the prefix."""

    tower: ClassVar[str] = "vision_tower."

    def __init__(self, source: Weights, prefix: str, config: WindowVisionSpec) -> None:
        super().__init__(source, prefix)
        self._config = config

    def positions(self) -> torch.Tensor:
        name = f"{self.tower}embeddings.position_embedding.weight"
        return self.tensor(name, self._config.side**2, self._config.hidden_size)

    def patch_embed(self) -> Linear:
        """Load a convolution whose stride equals its kernel, as a projection of flattened
        patches."""
        config = self._config
        kernel = (config.in_channels, config.patch_size, config.patch_size)
        name = f"{self.tower}embeddings.patch_embedding"
        return self.projection(name, config.hidden_size, *kernel)

    def block(self, index: int) -> VisionBlock:
        name = f"{self.tower}encoder.layers.{index}"
        hidden, wide = self._config.hidden_size, self._config.intermediate_size
        mlp = MlpPart(
            self.norm(f"{name}.layer_norm2", hidden),
            self.projection(f"{name}.mlp.fc1", wide, hidden),
            self.projection(f"{name}.mlp.fc2", hidden, wide),
        )
        return VisionBlock(self._attention(name), mlp)

    def last_norm(self) -> Affine | None:
        return self.norm(f"{self.tower}post_layernorm", self._config.hidden_size)

    def window(self) -> tuple[AttentionPart, MlpPart] | None:
        """Load what merges windows between two layers."""
        name, config = f"{self.tower}vit_merger", self._config
        wide = _WINDOW * config.intermediate_size
        return self._attention(name), self._merging(name, wide, config.hidden_size)

    def merger(self) -> MlpPart | None:
        """Load what makes tokens behind the last layer."""
        config = self._config
        return self._merging("merger.mlp.0", _WINDOW * config.hidden_size, config.out_hidden_size)

    def _merging(self, name: str, wide: int, out: int) -> MlpPart:
        flat = _WINDOW * self._config.hidden_size
        return MlpPart(
            self.norm(f"{name}.pre_norm", flat),
            self.projection(f"{name}.linear_1", wide, flat),
            self.projection(f"{name}.linear_2", out, wide),
        )

    def _attention(self, name: str) -> AttentionPart:
        hidden = self._config.hidden_size
        parts = [f"{name}.self_attn.{projection}_proj" for projection in "qkv"]
        return AttentionPart(
            self.norm(f"{name}.layer_norm1", hidden),
            self.fused(parts, hidden, hidden),
            self.projection(f"{name}.self_attn.out_proj", hidden, hidden),
        )
