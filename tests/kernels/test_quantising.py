"""Plain weights as codes: what is left of them, and what they are made of."""

from __future__ import annotations

import pytest
import torch

from vlm_serve.kernels.linear.codes import IntegerCodes
from vlm_serve.kernels.linear.quantising import group_of, quantise


def value(codes: IntegerCodes) -> torch.Tensor:
    steps = codes.codes.float() - (1 << (codes.bits - 1))
    grouped = steps.view(len(steps), -1, codes.group)
    return (grouped * codes.scales.float()[..., None]).flatten(1)


def weight() -> torch.Tensor:
    return torch.randn(48, 256, generator=torch.Generator().manual_seed(0)) / 16


@pytest.mark.parametrize(
    ("bits", "group", "most"), [(8, 128, 0.007), (8, 32, 0.006), (4, 32, 0.083)]
)
def test_little_is_lost(bits: int, group: int, most: float) -> None:
    plain = weight()
    codes = quantise(plain, bits, group)
    assert codes.codes.dtype == torch.uint8 and codes.scales.shape == (48, 256 // group)
    assert int(codes.codes.max()) < 1 << bits and codes.zeros is None
    assert float((value(codes) - plain).norm() / plain.norm()) < most


def test_scales_are_better_than_those_of_the_largest_value() -> None:
    plain = weight().view(48, -1, 32)
    scale = plain.abs().amax(-1, keepdim=True) / 7
    plain_error = ((plain / scale).round() * scale - plain).norm()
    codes = quantise(plain.flatten(1), 4, 32)
    assert (value(codes) - plain.flatten(1)).norm() < 0.93 * plain_error


def test_groups_of_nothing_and_of_little() -> None:
    plain = weight()
    plain[0, :32] = 0
    plain[1, :32] *= 1e-30
    plain[2] = 0
    found = value(quantise(plain, 4, 32))
    assert found.isfinite().all()
    assert not found[0, :32].any() and not found[2].any()
    small, left = plain[1, :32].double(), found[1, :32].double()
    assert float((left - small).norm() / small.norm()) < 0.35


def test_rows_are_quantised_on_their_own() -> None:
    plain = weight()
    whole, again = quantise(plain, 4, 32), quantise(plain[5:9], 4, 32)
    assert torch.equal(whole.codes[5:9], again.codes) and torch.equal(
        whole.scales[5:9], again.scales
    )


def test_groups_divide_the_depth() -> None:
    assert [group_of(8, depth) for depth in (256, 192, 96, 48, 40)] == [128, 64, 32, 16, None]
    assert [group_of(4, depth) for depth in (256, 48, 40)] == [32, 16, None]
