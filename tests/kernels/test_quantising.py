"""Plain weights as codes: what is left of them, and what they are made of."""

from __future__ import annotations

import pytest
import torch

from vlm_serve.kernels.linear.codes import IntegerCodes, scale_values
from vlm_serve.kernels.linear.quantising import group_of, num_bytes, quantise


def value(codes: IntegerCodes) -> torch.Tensor:
    steps = codes.codes.float() - (1 << (codes.bits - 1))
    grouped = steps.view(len(steps), -1, codes.group)
    return (grouped * scale_values(codes.scales, codes.factors)[..., None]).flatten(1)


def weight() -> torch.Tensor:
    return torch.randn(48, 256, generator=torch.Generator().manual_seed(0)) / 16


@pytest.mark.parametrize(
    ("bits", "group", "most"), [(8, 128, 0.007), (8, 32, 0.006), (6, 32, 0.022), (4, 32, 0.083)]
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


@pytest.mark.parametrize("bits", [8, 6, 4])
def test_groups_of_nothing_and_of_little(bits: int) -> None:
    plain = weight()
    plain[0, :32] = 0
    plain[1, :32] /= 100
    plain[2] = 0
    plain[3] *= 1e-30
    found = value(quantise(plain, bits, 32))
    assert found.isfinite().all()
    assert not found[0, :32].any() and not found[2].any()
    for part in ((1, slice(0, 32)), (3, slice(None))):
        small, left = plain[part].double(), found[part].double()
        assert float((left - small).norm() / small.norm()) < 0.12


@pytest.mark.parametrize("bits", [4, 6])
def test_scales_of_few_bits_are_bytes_and_a_power_of_two_for_each_row(bits: int) -> None:
    codes = quantise(weight() * torch.logspace(-30, 30, 48)[:, None], bits, 32)
    assert codes.scales.dtype == torch.int8 and codes.factors is not None
    roots = codes.scales.abs().amax(-1)
    assert int(roots.min()) >= 89 and int(roots.max()) <= 127, "no factor could be smaller"
    assert bool((torch.frexp(codes.factors)[0] == 0.5).all())
    held = (codes.codes.numel() * bits // 8, codes.scales.nbytes, codes.factors.nbytes)
    assert num_bytes(48, 256, bits, 32) == sum(held)
    assert quantise(weight(), 8, 128).factors is None


def test_a_byte_takes_no_more_of_a_weight_than_bfloat16_and_one_in_two_hundred() -> None:
    """Normally distributed, and with tails."""
    random = torch.Generator().manual_seed(1)
    normal, other = (torch.randn(64, 2048, generator=random) for _ in range(2))
    for plain in (normal, normal / (other.abs() + 0.1)):
        codes = quantise(plain, 4, 32)
        left = (value(codes) - plain).norm()
        grouped, middle = plain.view(64, -1, 32), 8
        steps = codes.codes.view(64, -1, 32).float() - middle
        best = ((steps * grouped).sum(-1) / (steps * steps).sum(-1).clamp(min=1e-30)).bfloat16()
        whole = (grouped / best.float()[..., None]).nan_to_num(0, 0, 0).round().clamp(-8, 7)
        wide = (whole * best.float()[..., None] - grouped).norm()
        assert left < 1.005 * wide


@pytest.mark.parametrize("size", [1e-45, 1e-39, 1e-33, 1e30, 3e36])
def test_the_smallest_and_the_largest_numbers(size: float) -> None:
    """One in a row, and all of it: factors and scales stay normal numbers."""
    plain = weight()
    plain[0, 40] = size
    plain[1] = plain[1].clamp(-1, 1) * size
    codes = quantise(plain, 4, 32)
    found, scales = value(codes), scale_values(codes.scales, codes.factors)
    assert codes.factors is not None and found.isfinite().all()
    least = torch.finfo(torch.float32).tiny
    assert float(codes.factors.min()) >= least
    assert float(scales[scales != 0].abs().min()) >= least
    rest = torch.cat([found[2:], plain[2:]]).view(2, -1, 256)
    assert float((rest[0] - rest[1]).norm() / rest[1].norm()) < 0.083
    if size > 1:
        assert float((found[0, 40] / plain[0, 40] - 1).abs()) < 0.1
    small, left = plain[1].double(), found[1].double()
    if size > 1e-36:
        assert float((left - small).norm() / small.norm()) < 0.1
    else:
        assert float(left.abs().max()) < 1e-36, "next to nothing stays that"


def test_columns_of_a_row_have_its_codes_and_scales() -> None:
    codes = quantise(weight() * torch.logspace(0, -3, 256), 4, 32)
    plain = value(codes)
    for columns in (range(128, 256), range(64), range(48, 96), range(16, 32)):
        own = codes.of_columns(columns)
        assert torch.equal(own.codes, codes.codes[:, columns.start : columns.stop])
        assert torch.equal(value(own), plain[:, columns.start : columns.stop])
        assert own.group * own.scales.shape[1] == len(columns)


def test_rows_are_quantised_on_their_own() -> None:
    plain = weight()
    whole, again = quantise(plain, 4, 32), quantise(plain[5:9], 4, 32)
    assert torch.equal(whole.codes[5:9], again.codes) and torch.equal(
        whole.scales[5:9], again.scales
    )


def test_groups_divide_the_depth() -> None:
    assert [group_of(8, depth) for depth in (256, 192, 96, 48, 40)] == [128, 64, 32, 16, None]
    for bits in (4, 6):
        assert [group_of(bits, depth) for depth in (256, 48, 40)] == [32, 16, None]
