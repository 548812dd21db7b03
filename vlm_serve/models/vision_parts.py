"""Common parts of vision towers: reading their tensors, layer norms, attention by picture."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from vlm_serve.kernels.linear import Activation, Linear, Part
from vlm_serve.kernels.linear.low_rank import AdapterChanges, RowChanges
from vlm_serve.models.parts.base import Loader

EPS = 1e-6
"""Of layer norms."""


@dataclass(frozen=True, slots=True)
class Affine:
    """Weight and bias of a layer norm."""

    weight: torch.Tensor
    bias: torch.Tensor


@dataclass(frozen=True, slots=True)
class VisionBlock:
    """Weights of one transformer block."""

    norm1: Affine
    qkv: Linear
    proj: Linear
    norm2: Affine
    fc1: Linear
    fc2: Linear


@dataclass(frozen=True, slots=True)
class Merger:
    """Squares of patches to tokens. `norm` applies to patches, or to squares if `late`."""

    norm: Affine
    fc1: Linear
    fc2: Linear
    late: bool


@dataclass(frozen=True, slots=True)
class Products:
    """How a tower multiplies: `deterministic` as in `Linear`, and the adapter of all rows."""

    deterministic: bool
    changes: AdapterChanges | None = None
    _of_rows: dict[int, RowChanges | None] = field(default_factory=dict, init=False, repr=False)

    def __call__(
        self,
        weight: Linear,
        x: torch.Tensor,
        *,
        activation: Activation | None = None,
        plus: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute a projection; arguments as in `Linear.__call__`."""
        count = len(x)
        if count not in self._of_rows:
            # Kept, since a GPU gets tables of the rows.
            self._of_rows[count] = RowChanges.of_all(self.changes, count)
        return weight(
            x,
            activation=activation,
            plus=plus,
            deterministic=self.deterministic,
            changes=self._of_rows[count],
        )


class Reader:
    """Tensors of a tower by name; all names start with `prefix`."""

    def __init__(self, source: Loader, prefix: str) -> None:
        self._source = source
        self._prefix = prefix

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """Return a tensor in the dtype of activations."""
        return self._source.tensor(self._prefix + name, shape)

    def norm(self, name: str, size: int) -> Affine:
        """Load a layer norm over `size` numbers."""
        return Affine(self.tensor(f"{name}.weight", size), self.tensor(f"{name}.bias", size))

    def projection(self, name: str, *shape: int) -> Linear:
        """Load a projection with a bias; all dimensions but the rows are flattened."""
        return self.fused([name], *shape)

    def fused(self, names: list[str], *shape: int) -> Linear:
        """Load several projections of one shape as one, with their rows stacked."""
        starts = [self._prefix + name for name in names]
        biases = [Part(f"{start}.bias", shape[:1]) for start in starts]
        return self._source.linear(*(Part(f"{s}.weight", shape) for s in starts), bias=biases)


def layer_norm(x: torch.Tensor, norm: Affine) -> torch.Tensor:
    """Normalise over the last dim."""
    return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, EPS)


def attend(qk: torch.Tensor, v: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Compute attention of every picture to itself: `[n, 2, heads, d]`, `[n, heads, d]` to `[n,
    heads, d]`.

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
