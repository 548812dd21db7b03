"""What the Triton tests share: a device, poisoned tensors, and the way into the kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from vlm_serve.kernels.dispatch import triton_everywhere
from vlm_serve.kernels.triton_support import interpreted

DEVICE = torch.device("cpu" if interpreted() else "cuda")

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@contextmanager
def kernels() -> Iterator[None]:
    """Runs the public ops on their Triton kernels. Lanes beyond a tensor's end compute on garbage
    and are masked afterwards; numpy, which the interpreter computes with, would warn of them."""
    with triton_everywhere(), np.errstate(all="ignore"):
        yield


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 7919 * len(shape) + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def poison(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def assert_near(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Largest difference against the reference's own scale; NaN anywhere fails."""
    actual, expected = actual.double().cpu(), expected.double().cpu()
    assert actual.shape == expected.shape
    if expected.numel():
        scale = max(1.0, float(expected.abs().max()))
        difference = float((actual - expected).abs().max())
        assert difference <= tolerance * scale, difference
