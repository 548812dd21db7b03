"""RMS norms on the CPU: against transformers' modules, the float64 references, and bit by bit."""

from __future__ import annotations

import pytest
import torch
from kernel_case import EPS, modeling, randn
from kernel_oracles import gated_rms_norm_reference, rms_norm_reference
from triton_case import assert_near

from vlm_serve.kernels.checks import KernelArgumentError
from vlm_serve.kernels.norms import gated_rms_norm, gated_squares, rms_norm

pytestmark = pytest.mark.usefixtures("cpu_path")

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 64), (7, 100), (3, 4, 48), (0, 32)])
def test_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype, seed=1)
    module = modeling().Qwen3_5MoeRMSNorm(shape[-1], eps=EPS)
    module.weight.data = weight
    out = rms_norm(x, weight, EPS)
    assert out.dtype == dtype
    assert_near(out, module(x).detach(), TOLERANCE[dtype])
    assert_near(out, rms_norm_reference(x, weight, EPS), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 1, 64), (7, 4, 48), (0, 2, 32)])
def test_gated_norm(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    x, gate = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype, seed=1) * 3
    weight = randn(shape[-1], dtype=dtype, seed=2)
    module = modeling().Qwen3_5MoeRMSNormGated(shape[-1], eps=EPS)
    module.weight.data = weight
    out = gated_rms_norm(x, gate, weight, EPS)
    assert out.dtype == dtype
    assert_near(out, module(x, gate).detach(), TOLERANCE[dtype])
    assert_near(out, gated_rms_norm_reference(x, gate, weight, EPS), TOLERANCE[dtype])


@pytest.mark.parametrize("width", [40, 100, 512])
def test_a_row_has_the_same_bits_in_any_batch(width: int) -> None:
    x, gate = randn(500, width), randn(500, width, seed=1)
    weight = randn(width, seed=2)
    whole, gated = rms_norm(x, weight, EPS), gated_rms_norm(x, gate, weight, EPS)
    for begin, end in ((0, 1), (499, 500), (3, 20), (100, 457)):
        own = slice(begin, end)
        assert torch.equal(rms_norm(x[own], weight, EPS), whole[own])
        assert torch.equal(gated_rms_norm(x[own], gate[own], weight, EPS), gated[own])


def test_bad_arguments_are_named() -> None:
    x, weight = randn(3, 8), randn(8)
    with pytest.raises(KernelArgumentError, match="weight"):
        rms_norm(x, weight[:7], EPS)
    with pytest.raises(KernelArgumentError, match="gate"):
        gated_rms_norm(x, x[:2], weight, EPS)
    with pytest.raises(KernelArgumentError, match="gate"):
        gated_squares(x, x[:2])
    for mean, first in ((x[:, 0], False), (x, True), (x[:, 0].double(), True)):
        with pytest.raises(KernelArgumentError, match="mean"):
            gated_rms_norm(x, x, weight, EPS, gate_first=first, mean=mean)
    with pytest.raises(KernelArgumentError, match="x"):
        rms_norm(x.int(), weight, EPS)
