"""Products with sigmoid and SiLU, and the gates of the delta rule, on the Triton path."""

from __future__ import annotations

import pytest
import torch
from triton_case import DEVICE, TOLERANCE, assert_near, kernels, randn

from vlm_serve.kernels.elementwise import silu, silu_times, times_sigmoid
from vlm_serve.kernels.gated_delta import gates

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EDGES = torch.tensor([0.0, -1e4, 1e4, -90.0, 90.0, -17.0, 17.0, 1e-8, -1e-8], device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 7), (3, 1024), (5, 2500)])
def test_products_of_strided_rows(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    rows, width = shape
    wide = randn(rows, 2 * width + 3, dtype=dtype) * 4
    x, gate, column = wide[:, :width], wide[:, width : 2 * width], wide[:, -1:]
    with kernels():
        found = times_sigmoid(x, gate), times_sigmoid(x, column), silu_times(gate, x), silu(x)
    a, b, c = x.double(), gate.double(), column.double()
    expected = a * b.sigmoid(), a * c.sigmoid(), b * b.sigmoid() * a, a * a.sigmoid()
    for got, wanted in zip(found, expected, strict=True):
        assert got.dtype == dtype and got.is_contiguous()
        assert_near(got, wanted, TOLERANCE[dtype])


def test_other_shapes_are_computed_too() -> None:
    x, column = randn(2, 3, 4), randn(2, 3, 1)
    with kernels():
        assert_near(times_sigmoid(x, column), x.double() * column.double().sigmoid(), 2e-5)
        assert_near(silu_times(x, x), x.double() ** 2 * x.double().sigmoid(), 2e-5)


def test_extremes_do_not_overflow() -> None:
    x = EDGES[None]
    with kernels():
        found = times_sigmoid(torch.ones_like(x), x), silu(x)
    assert_near(found[0], x.double().sigmoid(), 1e-6)
    assert_near(found[1], x.double() * x.double().sigmoid(), 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates(dtype: torch.dtype) -> None:
    heads = 2 * len(EDGES)
    raw = torch.cat([randn(4, heads), EDGES.expand(4, -1), randn(4, heads - len(EDGES))], dim=1)
    raw = torch.cat([raw, raw], dim=1).to(dtype)[:, : 2 * heads]
    neg_decay, bias = -randn(heads).abs(), randn(heads, seed=1)
    with kernels():
        beta, decay = gates(raw, neg_decay, bias)
    wide = raw.double()
    grown = wide[:, heads:].float() + bias
    assert beta.dtype == decay.dtype == torch.float32
    assert_near(beta, wide[:, :heads].sigmoid(), 1e-6)
    expected = neg_decay.double() * torch.nn.functional.softplus(grown.double(), threshold=1000)
    torch.testing.assert_close(decay.double(), expected, rtol=1e-5, atol=1e-12)
