"""A model without its weights: what a step allocates follows from shapes alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vlm_serve.kernels.linear import Linear, Part, Shard
from vlm_serve.kernels.linear.base import shape
from vlm_serve.kernels.linear.torch_dense import TorchDense
from vlm_serve.kernels.ranks import ALONE
from vlm_serve.models.adapters.modules import Modules
from vlm_serve.models.model import Model
from vlm_serve.models.spec import ModelSpec
from vlm_serve.models.weights import Weights

META = torch.device("meta")


class UnreadWeights(Weights):
    """Tensors on the device "meta", in the shapes that a checkpoint would have.

    Args:
        dtype: of projections and of the table; quantised ones count as dense, as what is computed
            with them is.
        compute_dtype: of everything else, and of activations.
    """

    def __init__(self, dtype: torch.dtype, compute_dtype: torch.dtype) -> None:
        self.dtype, self.compute_dtype = dtype, compute_dtype
        self.device, self.ranks, self.compiled = META, ALONE, False
        self.text_prefix = "model."
        self.quantised = set()
        self.modules = Modules()

    def __contains__(self, name: str) -> bool:
        return True

    def vision_prefix(self, anchor: str) -> str:
        # Adapters name modules as checkpoints do.
        return "model." if anchor.startswith("vision_tower.") else "model.visual."

    def head_name(self) -> str:
        return "lm_head.weight"

    def shape_of(self, name: str) -> None:
        return None

    def linear(
        self, *parts: Part, bias: list[Part] | None = None, shard: Shard | None = None
    ) -> Linear:
        columns, depth = shape(parts, shard)
        weight = torch.empty(columns, depth, dtype=self.dtype, device=META)
        biases = None if bias is None else torch.empty(columns, dtype=self.dtype, device=META)
        loaded = TorchDense(weight, biases)
        loaded.origin, loaded.shard = parts, shard
        self.modules.enter(loaded)
        return loaded

    def tensor(
        self,
        name: str,
        shape: Sequence[int],
        rows: Sequence[range] = (),
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        count = (sum(map(len, rows)), *shape[1:]) if rows else shape
        return torch.empty(*count, dtype=dtype or self.compute_dtype, device=META)

    def stacked(
        self, parts: Sequence[Part], count: int, shard: Shard | None = None
    ) -> torch.Tensor:
        columns, depth = shape(parts, shard)
        return torch.empty(count, columns // count, depth, dtype=self.dtype, device=META)

    def embedding(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        return torch.empty(*shape, dtype=self.dtype, device=META)


def unread_model(spec: ModelSpec, dtype: torch.dtype, compute_dtype: torch.dtype) -> Model:
    """Return a model whose forwards compute nothing, on the device "meta"."""
    return Model(spec, UnreadWeights(dtype, compute_dtype), bytes(32))
