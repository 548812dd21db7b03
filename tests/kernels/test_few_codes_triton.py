"""Quantised projections of a few rows on the Triton path: near float64, one row beside others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_oracles import rms_norm_reference
from quantised_codes import dequantised, float4, float8, integers, rooted, widened
from sweeps import quick
from triton_case import DEVICE, TOLERANCE, assert_near, kernels, randn

from vlm_serve.kernels.checks import KernelArgumentError
from vlm_serve.kernels.linear import torch_quantised
from vlm_serve.kernels.linear.codes import Codes
from vlm_serve.kernels.linear.few_codes_triton import few_codes, tile_of
from vlm_serve.kernels.linear.few_rows import MOST_ROWS, Around
from vlm_serve.kernels.linear.torch_quantised import TorchQuantised
from vlm_serve.kernels.norms import Normed
from vlm_serve.kernels.triton_support import Target, record_launches

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Groups of several units, of one, and of sizes that no 16 bytes divide; more units than lanes.
CASES: dict[str, Codes] = {
    "int4, groups of 128": integers(20, 1280, 4, 128, scales=torch.float16),
    "int4, groups of 32 with zero points": integers(33, 96, 4, 32, zeros=True),
    "int4, groups of 72": integers(17, 72, 4, 72, zeros=True, scales=torch.bfloat16),
    "int4, groups of 2": integers(9, 100, 4, 2),
    "int4, scales of one byte": rooted(18, 1152, 4, 32),
    "int6, groups of 32": rooted(20, 96, 6, 32),
    "int6, groups of 16 with zero points": integers(17, 80, 6, 16, zeros=True),
    "int6, groups of 128": integers(10, 1280, 6, 128, scales=torch.bfloat16),
    "int8, groups of 128": integers(19, 640, 8, 128),
    "int8, groups of 32 with zero points": integers(18, 96, 8, 32, zeros=True),
    "int8, groups of 100": integers(5, 100, 8, 100, scales=torch.bfloat16),
    "e2m1, groups of 16": float4(24, 48, 16),
    "e2m1, groups of 32": float4(20, 64, 32, torch.float8_e8m0fnu),
    "e4m3, blocks of 128 with a part of one": float8(20, 660, (16, 128), torch.bfloat16),
    "e4m3, a scale for each row": float8(9, 72, (1, 72)),
}


def linear(codes: Codes, bias: torch.Tensor | None = None) -> TorchQuantised:
    columns, depth = codes.codes.shape
    return TorchQuantised.of([codes], columns, depth, bias, DEVICE)


def launched(*calls: Any) -> list[str]:
    """Names of the kernels that calls launch on a GPU."""
    with kernels(), record_launches(Target("cuda", 90)) as found:
        for call in calls:
            call()
    return [each.kernel.__name__ for each in found]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", quick(DTYPES, [torch.bfloat16], pytest.mark.interpreter))
def test_equals_the_product_with_dequantised_weights(name: str, dtype: torch.dtype) -> None:
    codes = CASES[name]
    columns, depth = codes.codes.shape
    bias, plus = randn(columns, seed=1), randn(3, columns, dtype=dtype, seed=2)
    x = randn(3, depth + 8, dtype=dtype)[:, :depth]
    expected = x.double().cpu() @ dequantised(codes).T + bias.double().cpu()
    with kernels():
        weight = linear(codes, bias)
        result, added = weight(x), weight(x, plus=plus)
        active = weight(x, activation="silu")
    assert result.dtype == added.dtype == active.dtype == dtype
    for found, wanted in (
        (result, expected),
        (added, expected + plus.double().cpu()),
        (active, torch.nn.functional.silu(expected)),
    ):
        assert_near(found, wanted, TOLERANCE[dtype])


@pytest.mark.parametrize("name", CASES)
def test_a_row_has_the_same_bits_alone_and_beside_others(name: str) -> None:
    codes = CASES[name]
    x = randn(MOST_ROWS, codes.codes.shape[1], dtype=torch.bfloat16)
    with kernels():
        weight = linear(codes)
        whole = weight(x)
        for rows in (slice(7, 8), slice(2, 4), slice(1, 4), slice(0, 5)):
            assert torch.equal(weight(x[rows]), whole[rows])


@pytest.mark.parametrize(
    "name", ["int4, groups of 128", "int6, groups of 32", "e2m1, groups of 32"]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_and_up_in_one_launch(name: str, dtype: torch.dtype) -> None:
    codes = CASES[name]
    columns, depth = codes.codes.shape
    x, norm = randn(4, depth, dtype=dtype), randn(depth, dtype=dtype, seed=5) * 0.3
    bias = randn(columns, seed=1)
    wide = rms_norm_reference(x, norm, 1e-6) @ dequantised(codes).T.to(DEVICE) + bias.double()
    gate, up = wide.chunk(2, dim=1)
    with kernels():
        result = linear(codes, bias).of_norm(Normed(x, norm, 1e-6), gated=True)
    assert result.shape == (4, columns // 2) and result.dtype == dtype
    assert_near(result, gate * torch.sigmoid(gate) * up, TOLERANCE[dtype])
    weight = linear(codes)
    names = launched(lambda: weight.of_norm(Normed(x, norm, 1e-6), gated=True))
    assert names[-1:] == ["_few_codes_kernel"] and len(names) == 2


def test_the_sum_takes_the_place_of_its_summand() -> None:
    codes = CASES["int4, groups of 32 with zero points"]
    x, plus = (randn(2, each, dtype=torch.bfloat16, seed=each) for each in (96, 33))
    with kernels():
        weight = linear(codes)
        apart = weight(x, plus=plus.clone())
        result = weight(x, plus=plus, overwrite=True)
    assert result is plus and torch.equal(result, apart)
    assert launched(lambda: weight(x, plus=plus, overwrite=True)) == ["_few_codes_kernel"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_of_one_byte_have_the_bits_of_those_in_float32(dtype: torch.dtype) -> None:
    codes, x = rooted(40, 96, 4, 32, zeros=True), randn(5, 96, dtype=dtype)
    with kernels():
        assert torch.equal(linear(codes)(x), linear(widened(codes))(x))


def test_float8_by_integer_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("e4m3, blocks of 128 with a part of one", "e4m3, a scale for each row"):
        x = randn(2, CASES[name].codes.shape[1])
        with kernels():
            converted = linear(CASES[name])(x)
            with monkeypatch.context() as patch:
                own = "vlm_serve.kernels.linear.few_codes_triton.current_target"
                patch.setattr(own, lambda: Target("cuda", 90))
                assert torch.equal(linear(CASES[name])(x), converted)


def test_torch_computes_the_same() -> None:
    """What the check at start compares the kernel with."""
    codes = CASES["int4, groups of 128"]
    x, bias = randn(2, 1280), randn(20, seed=1)
    weight = linear(codes, bias)._weight
    for around in (Around(gated=True), Around(plus=randn(2, 20, seed=3))):
        mine = few_codes(x, weight, bias, around, torch.float32)
        theirs = torch_quantised._few_by_torch(x, weight, bias, around, torch.float32)
        assert_near(mine, theirs, 2e-5)


def test_who_multiplies_which_rows() -> None:
    weight, x = linear(CASES["int8, groups of 128"]), randn(MOST_ROWS + 1, 640)
    few = [lambda: weight(x[:1]), lambda: weight(x[1:])]
    others = [lambda: weight(x), lambda: weight(x[:1], deterministic=True)]
    assert launched(*few) == ["_few_codes_kernel"] * 2
    assert launched(*others) == ["_linear_kernel"] * 2
    assert weight(x[:0]).shape == (0, 19)
    with record_launches(Target("cuda", 90)):
        wide, narrow = (tile_of(torch.bfloat16, columns) for columns in (4096, 4095))
    assert narrow.columns < wide.columns and narrow.lanes == wide.lanes


def test_what_it_does_not_take() -> None:
    weight = linear(CASES["int8, groups of 128"])._weight
    x = randn(MOST_ROWS + 1, 640)
    with pytest.raises(KernelArgumentError, match="at most 8"):
        few_codes(x, weight, None, Around(), x.dtype)
    with pytest.raises(KernelArgumentError, match="norm"):
        few_codes(x[:1], weight, None, Around(randn(640), 1e-6), x.dtype)
