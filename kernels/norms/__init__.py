"""Root-mean-square norms of the decoder layers.

Zero-centred norm and gated norm as in Qwen3.5 (transformers' Qwen3_5RMSNorm, Qwen3_5RMSNormGated),
and the norm of gated rows of Mamba2 (NemotronHRMSNormGated). All reduce in float32, whatever the
dtype of the input.
"""

from __future__ import annotations

import torch

from vlm_serve.kernels.checks import FLOAT_DTYPES, KernelArgumentError, check_tensor
from vlm_serve.kernels.dispatch import Op
from vlm_serve.kernels.norms import compiled, reference

_TRITON = "vlm_serve.kernels.norms.triton"
_rms_norm = Op(
    reference.rms_norm,
    compiled=compiled.rms_norm,
    triton=f"{_TRITON}:rms_norm",
)
_gated_rms_norm = Op(
    reference.gated_rms_norm,
    compiled=compiled.gated_rms_norm,
    triton=f"{_TRITON}:gated_rms_norm",
)
_gated_squares = Op(reference.gated_squares, triton=f"{_TRITON}:gated_squares")


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Apply a zero-centred RMS norm, `y = x / rms(x) * (1 + weight)`.

    Args:
        x: `[..., H]`, float32, bfloat16 or float16, dense last dimension.
        weight: `[H]`, any float dtype; 0 means a factor of 1.
        eps: added to the mean square.

    Returns:
        Same shape and dtype as x.

    Raises:
        KernelArgumentError: naming the argument at fault.
    """
    _check(x, weight)
    return _rms_norm(x.device, x, weight, eps)


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    gate_first: bool = False,
    mean: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `(weight * (x / rms(x))) * silu(gate)`.

    The norm comes before the gate, unless `gate_first`: then the result is `weight * (y / rms(y))`
    of `y = x * silu(gate)`. The weight is plain, not zero-centred.

    Args:
        x: `[..., Dv]`, float32, bfloat16 or float16, dense last dimension.
        gate: same shape and dtype as x.
        weight: `[Dv]`; `[heads, Dv]` for x `[T, heads, Dv]` with a weight for each head.
        eps: added to the mean square.
        gate_first: whether the gate comes before the norm.
        mean: with `gate_first`, float32 `x.shape[:-1]`, mean squares to take in place of the rows'
            own, because these rows are parts of wider ones.

    Returns:
        Same shape and dtype as x.

    Raises:
        KernelArgumentError: naming the argument at fault.
    """
    _check(x, weight)
    _check_gate(x, gate)
    if mean is not None:
        if not gate_first:
            raise KernelArgumentError("mean", "needs gate_first")
        check_tensor("mean", mean, x.shape[:-1], (torch.float32,), x.device)
    return _gated_rms_norm(x.device, x, gate, weight, eps, gate_first=gate_first, mean=mean)


def gated_squares(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Sum the squares of `x * silu(gate)` over each row, to float32 `x.shape[:-1]`.

    The arguments are those of `gated_rms_norm`, and so are its errors.
    """
    _check_gate(x, gate)
    return _gated_squares(x.device, x, gate)


def _check_gate(x: torch.Tensor, gate: torch.Tensor) -> None:
    if gate.shape != x.shape or gate.dtype != x.dtype:
        raise KernelArgumentError("gate", "must have the shape and dtype of x")


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    if x.dtype not in FLOAT_DTYPES:
        raise KernelArgumentError("x", f"dtype {x.dtype}, expected a float")
    shape = x.shape[-2:] if weight.dim() == 2 else x.shape[-1:]
    check_tensor("weight", weight, shape, FLOAT_DTYPES, x.device)


class Normed:
    """The result of `rms_norm`, computed when somebody asks for it.

    Args:
        raw: `[T, H]`, rows before the norm; they must stay as they are until the last use.
        weight, eps: as `rms_norm` takes them.
    """

    __slots__ = ("_rows", "eps", "raw", "weight")

    def __init__(self, raw: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        self.raw, self.weight, self.eps = raw, weight, eps
        self._rows: torch.Tensor | None = None

    @property
    def rows(self) -> torch.Tensor:
        """The rows behind the norm, `[T, H]`."""
        if self._rows is None:
            self._rows = rms_norm(self.raw, self.weight, self.eps)
        return self._rows
