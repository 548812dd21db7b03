"""The vision tower of LFM2-VL: SigLIP 2 over a grid of patches, whose squares of 2x2 become tokens
behind its last layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from vlm_serve.kernels.linear import Linear
from vlm_serve.models.vision_parts import Affine, Products, layer_norm, nested_order
from vlm_serve.models.vision_windows import WindowReader, WindowVisionSpec, WindowVisionTower
from vlm_serve.models.weights import Weights

_PROJECTOR_EPS = 1e-5
_TOWER = "vision_tower."


@dataclass(frozen=True, kw_only=True)
class UnshuffledVisionSpec(WindowVisionSpec):
    """The tower of LFM2-VL. No window is merged between its layers.

    Attributes:
        projector_size: width of the projector between its two products.
        normed: whether the projector begins with a norm.
    """

    anchor = "post_layernorm.weight"
    layers = "encoder.layers."

    merged_layer: int = -1
    projector_size: int
    normed: bool

    def load(self, source: Weights, prefix: str, dtype: torch.dtype) -> UnshuffledVisionTower:
        return UnshuffledVisionTower(self, source, prefix, dtype)


class UnshuffledVisionTower(WindowVisionTower):
    """transformers' Siglip2VisionModel and Lfm2VlMultiModalProjector; arguments as of
    `WindowVisionTower`, but `reader` is LFM2-VL's if it is None."""

    def __init__(
        self,
        config: UnshuffledVisionSpec,
        source: Weights,
        prefix: str,
        dtype: torch.dtype,
        reader: UnshuffledReader | None = None,
    ) -> None:
        reader = reader or UnshuffledReader(source, prefix, config)
        super().__init__(config, source, prefix, dtype, reader)
        self._sides = config.in_channels, config.patch_size, config.patch_size
        self._projector = _Projector(source, prefix, config)

    def _pixels(self, patches: torch.Tensor) -> torch.Tensor:
        """Return patches as the tower's first product has them: channels last."""
        return patches.view(-1, *self._sides).permute(0, 2, 3, 1).flatten(1)

    def _merged(self, x: torch.Tensor, how: Products) -> torch.Tensor:
        return self._projector(x, how)

    def _compute_grid_tensors(
        self, height: int, width: int, merge: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the order of the patches, and their positions: the learned square resampled to the
        grid."""
        assert merge == 2 and height % 2 == width % 2 == 0, "a grid of whole tokens"
        order = nested_order(height, width, merge)
        side = self._config.side
        table = self._positions.float().view(1, side, side, -1).permute(0, 3, 1, 2)
        resampled = F.interpolate(table, (height, width), mode="bilinear", antialias=True)
        rows = resampled[0].flatten(1).T[order.to(table.device)]
        return order, rows.to(self._positions.dtype).contiguous()


class UnshuffledReader(WindowReader):
    """Names and shapes of the tower's tensors."""

    tower: ClassVar[str] = ""

    def patch_embed(self) -> Linear:
        config = self._config
        return self.projection("embeddings.patch_embedding", config.hidden_size, config.patch_dim)

    def window(self) -> None:
        """Return nothing: no window is merged between layers."""

    def merger(self) -> None:
        """Return nothing: the projector lies beside the tower."""


class _Projector:
    """The projector, whose tensors lie beside the tower's."""

    def __init__(self, source: Weights, prefix: str, config: UnshuffledVisionSpec) -> None:
        beside = prefix.partition(_TOWER)[0] + "multi_modal_projector."
        reader, flat = WindowReader(source, beside, config), 4 * config.hidden_size
        self._norm: Affine | None = None
        if config.normed:
            norm = reader.norm("layer_norm", flat)
            self._norm = Affine(norm.weight, norm.bias, _PROJECTOR_EPS)
        self._wide = reader.projection("linear_1", config.projector_size, flat)
        self._narrow = reader.projection("linear_2", config.out_hidden_size, config.projector_size)

    def __call__(self, x: torch.Tensor, how: Products) -> torch.Tensor:
        """Project `[n, 4 * hidden]`, the patches of each token side by side."""
        normed = x if self._norm is None else layer_norm(x, self._norm)
        return how(self._narrow, how(self._wide, normed, activation="gelu"))
