"""The vision tower of InternVL: InternViT over a class token and a square of patches, of which 2x2
become a token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from vlm_serve.kernels.linear import Activation, Linear
from vlm_serve.models.vision_parts import (
    Affine,
    AttentionPart,
    MlpPart,
    Products,
    VisionBlock,
    nested_order,
)
from vlm_serve.models.vision_unshuffled import (
    UnshuffledReader,
    UnshuffledVisionSpec,
    UnshuffledVisionTower,
)
from vlm_serve.models.weights import Weights


@dataclass(frozen=True, kw_only=True)
class ClassVisionSpec(UnshuffledVisionSpec):
    """The tower of InternVL. Its projector has a norm.

    Attributes:
        biased: queries, keys and values have biases.
        centred: norms have a mean and a bias; root-mean-square norms otherwise.
        qk_norms: queries and keys have norms over all heads.
    """

    anchor = "embeddings.cls_token"
    layers = "encoder.layer."

    normed: bool = True
    biased: bool
    centred: bool
    qk_norms: bool

    def load(self, source: Weights, prefix: str, dtype: torch.dtype) -> ClassVisionTower:
        return ClassVisionTower(self, source, prefix, dtype)


class ClassVisionTower(UnshuffledVisionTower):
    """transformers' InternVLVisionModel and InternVLMultiModalProjector; arguments as of
    `WindowVisionTower`."""

    activation: ClassVar[Activation] = "gelu"

    def __init__(
        self, config: ClassVisionSpec, source: Weights, prefix: str, dtype: torch.dtype
    ) -> None:
        reader = _Reader(source, prefix, config)
        super().__init__(config, source, prefix, dtype, reader)
        self._class = reader.class_row() + self._positions[:1]

    def _pixels(self, patches: torch.Tensor) -> torch.Tensor:
        return patches

    def _through(
        self, x: torch.Tensor, sizes: list[int], merge: int, how: Products
    ) -> torch.Tensor:
        """Run all layers over the patches of every picture and its class token, whose row is left
        out at the end."""
        pieces = [row for piece in x.split_with_sizes(sizes) for row in (self._class, piece)]
        longer = [size + 1 for size in sizes]
        x = super()._through(torch.cat(pieces), longer, merge, how)
        return torch.cat([piece[1:] for piece in x.split_with_sizes(longer)])

    def _compute_grid_tensors(
        self, height: int, width: int, merge: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the order of the patches, and their positions: the learned square, resampled for a
        grid of another size."""
        assert merge == 2 and height % 2 == width % 2 == 0, "a grid of whole tokens"
        order, rows = nested_order(height, width, merge), self._positions[1:]
        side = self._config.side
        if (height, width) != (side, side):
            table = rows.float().view(1, side, side, -1).permute(0, 3, 1, 2)
            resampled = F.interpolate(table, (height, width), mode="bicubic", align_corners=False)
            rows = resampled[0].flatten(1).T.to(rows.dtype)
        return order, rows[order.to(rows.device)].contiguous()


class _Reader(UnshuffledReader):
    """Names and shapes of the tower's tensors."""

    def __init__(self, source: Weights, prefix: str, config: ClassVisionSpec) -> None:
        super().__init__(source, prefix, config)
        self._kind = config

    def class_row(self) -> torch.Tensor:
        """Load the embedding of the class token, `[1, hidden]`."""
        return self.tensor("embeddings.cls_token", 1, 1, self._kind.hidden_size)[0]

    def positions(self) -> torch.Tensor:
        """Load the positions, of the class token first: `[1 + side * side, hidden]`."""
        shape = 1, 1 + self._kind.side**2, self._kind.hidden_size
        return self.tensor("embeddings.position_embeddings", *shape)[0]

    def patch_embed(self) -> Linear:
        config = self._kind
        kernel = (config.in_channels, config.patch_size, config.patch_size)
        return self.projection(
            "embeddings.patch_embeddings.projection", config.hidden_size, *kernel
        )

    def block(self, index: int) -> VisionBlock:
        config, name = self._kind, f"encoder.layer.{index}"
        hidden, wide, part = config.hidden_size, config.intermediate_size, f"{name}.attention"
        norms = None
        if config.qk_norms:
            q, k = (self.norm(f"{part}.{each}_norm", hidden, bias=False) for each in "qk")
            norms = q, k
        attention = AttentionPart(
            self.norm(f"{name}.layernorm_before", hidden, bias=config.centred),
            self.fused(
                [f"{part}.{each}_proj" for each in "qkv"], hidden, hidden, bias=config.biased
            ),
            self.projection(f"{part}.projection_layer", hidden, hidden),
            norms,
            self.tensor(f"{name}.lambda_1", hidden),
        )
        mlp = MlpPart(
            self.norm(f"{name}.layernorm_after", hidden, bias=config.centred),
            self.projection(f"{name}.mlp.fc1", wide, hidden),
            self.projection(f"{name}.mlp.fc2", hidden, wide),
            self.tensor(f"{name}.lambda_2", hidden),
        )
        return VisionBlock(attention, mlp)

    def last_norm(self) -> Affine | None:
        """Return nothing: the last layer has no norm behind it."""
        return None
