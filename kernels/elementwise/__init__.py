"""Activations with bits that depend on the element alone.

torch computes the last elements of each thread's share of a tensor on a scalar path. It differs
from the vector path in the last bit, so an element's bits depend on the size of its batch and on
the number of threads. `exp`, `log1p` and exact operations have no such path (measured with torch
2.13 on 1 to 8 threads), and cost no more. Everything is float32 inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from vlm_serve.kernels.dispatch import Op
from vlm_serve.kernels.elementwise import compiled, reference

_TRITON = "vlm_serve.kernels.elementwise.triton"
_times_sigmoid = Op(
    reference.times_sigmoid, compiled=compiled.times_sigmoid, triton=f"{_TRITON}:times_sigmoid"
)
_silu_times = Op(reference.silu_times, compiled=compiled.silu_times, triton=f"{_TRITON}:silu_times")


def silu(x: torch.Tensor) -> torch.Tensor:
    """Compute `x * sigmoid(x)`, in the dtype of x."""
    return times_sigmoid(x, x)


def times_sigmoid(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Compute `x * sigmoid(gate)` in the dtype of x; the gate's shape broadcasts to that of x."""
    return _times_sigmoid(x.device, x, gate)


def silu_times(gate: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Compute `silu(gate) * x`, rounded once to their common dtype; both of one shape."""
    return _silu_times(x.device, gate, x)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """Compute `log(1 + exp(x))` without overflow, float32."""
    x = x.float()
    return torch.abs(x).neg_().exp_().log1p_().add_(x.clamp(min=0))


def gelu(x: torch.Tensor) -> torch.Tensor:
    """Compute `x * Phi(x)`, in the dtype of x."""
    wide = x.float()
    return (wide * 0.5 * (1.0 + torch.erf(wide * math.sqrt(0.5)))).to(x.dtype)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """Compute the approximation of `gelu` by a hyperbolic tangent, in the dtype of x."""
    wide = x.float()
    inner = math.sqrt(2.0 / math.pi) * (wide + 0.044715 * wide * wide * wide)
    return (wide * 0.5 * (1.0 + torch.tanh(inner))).to(x.dtype)


def relu2(x: torch.Tensor) -> torch.Tensor:
    """Compute `max(x, 0)` squared, in the dtype of x."""
    return x.float().clamp(min=0).square_().to(x.dtype)


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu2": relu2,
}
"""By the name that a product takes."""
