"""Norms on the CPU paths: values, and bits that no neighbour changes."""

from __future__ import annotations

import pytest
import torch
from kernel_oracles import gated_rms_norm_reference, qk_norm_rope_reference, rms_norm_reference

from vlm_serve.kernels.norms import gated_rms_norm, gated_squares, rms_norm
from vlm_serve.kernels.rope import Rotation, qk_norm_rope

pytestmark = pytest.mark.usefixtures("cpu_path")

TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def near(got: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 7, 50])
def test_values(dtype: torch.dtype, rows: int) -> None:
    x = torch.randn(rows, 100).to(dtype)
    weight = (torch.randn(100) / 4).to(dtype)
    near(rms_norm(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6))
    heads, gate = x.view(rows, 4, 25), torch.randn(rows, 200).to(dtype)[:, 50:150].view(rows, 4, 25)
    for factors, first in ((weight[:25], False), (weight[:25], True), (weight.view(4, 25), True)):
        near(
            gated_rms_norm(heads, gate, factors, 1e-6, gate_first=first),
            gated_rms_norm_reference(heads, gate, factors, 1e-6, first),
        )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_parts_of_rows_with_the_mean_of_whole_ones(dtype: torch.dtype, rows: int) -> None:
    x, gate = torch.randn(2, rows, 1, 96).to(dtype)
    weight = torch.randn(96)
    halves = [slice(0, 40), slice(40, 96)]
    mean = sum(gated_squares(x[..., half], gate[..., half]) for half in halves) / 96
    assert isinstance(mean, torch.Tensor) and mean.dtype == torch.float32
    parts = [
        gated_rms_norm(
            x[..., half], gate[..., half], weight[half], 1e-6, gate_first=True, mean=mean
        )
        for half in halves
    ]
    whole = gated_rms_norm_reference(x, gate, weight, 1e-6, gate_first=True)
    near(torch.cat(parts, -1), whole)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [0, 1, 5, 40])
def test_query_key_norm_and_rotation(dtype: torch.dtype, rows: int) -> None:
    mixed = torch.randn(rows, 7 * 24).to(dtype)
    q, k = mixed[:, :96].view(rows, 4, 24), mixed[:, 96:144].view(rows, 2, 24)
    q_weight, k_weight = torch.randn(2, 24).to(dtype)
    angles = torch.rand(rows, 4) * 6
    kept = mixed.clone()
    got = qk_norm_rope(q, k, Rotation(q_weight, k_weight, angles.cos(), angles.sin(), 1e-6))
    assert torch.equal(mixed, kept)
    for rotated, x, weight in zip(got, (q, k), (q_weight, k_weight), strict=True):
        assert rotated.is_contiguous()
        near(rotated, qk_norm_rope_reference(x, weight, angles.cos(), angles.sin(), 1e-6))


def test_zero_and_tiny_rows() -> None:
    x = torch.stack([torch.zeros(64), torch.full((64,), 1e-12), torch.full((64,), 1e12)])
    near(rms_norm(x, torch.zeros(64), 1e-6), rms_norm_reference(x, torch.zeros(64), 1e-6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_anywhere(dtype: torch.dtype) -> None:
    x, gate = torch.randn(2, 60, 3, 20).to(dtype)
    weight, angles = torch.randn(20).to(dtype), torch.rand(60, 3)
    cos, sin = angles.cos(), angles.sin()
    whole = (
        rms_norm(x, weight, 1e-6),
        gated_rms_norm(x, gate, weight, 1e-6),
        gated_rms_norm(x, gate, weight, 1e-6, gate_first=True),
        qk_norm_rope(x, gate, Rotation(weight, weight, cos, sin, 1e-6))[0],
    )
    for start, end in ((0, 1), (3, 9), (17, 60)):
        part = slice(start, end)
        pieces = (
            rms_norm(x[part], weight, 1e-6),
            gated_rms_norm(x[part], gate[part], weight, 1e-6),
            gated_rms_norm(x[part], gate[part], weight, 1e-6, gate_first=True),
            qk_norm_rope(x[part], gate[part], Rotation(weight, weight, cos[part], sin[part], 1e-6))[
                0
            ],
        )
        for piece, one in zip(pieces, whole, strict=True):
            assert torch.equal(piece, one[part])
