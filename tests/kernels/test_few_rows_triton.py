"""Products of a few rows on the Triton path: beside torch in float64, and one row beside others."""

from __future__ import annotations

import pytest
import torch
from kernel_oracles import rms_norm_reference
from triton_case import DEVICE, TOLERANCE, assert_near, kernels, randn

from vlm_serve.kernels.checks import KernelArgumentError
from vlm_serve.kernels.linear import few_rows_triton
from vlm_serve.kernels.linear.few_rows import MOST_ROWS, Around, few_rows, serves
from vlm_serve.kernels.linear.torch_dense import TorchDense
from vlm_serve.kernels.norms import Normed

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def expected(x: torch.Tensor, weight: torch.Tensor, around: Around) -> torch.Tensor:
    """The same in float64, rounded nowhere."""
    wide = x.double()
    if around.norm is not None:
        wide = rms_norm_reference(x, around.norm, around.eps)
    out = wide @ weight.double().T
    if around.gated:
        gate, up = out.chunk(2, dim=1)
        out = gate * torch.sigmoid(gate) * up
    return out if around.plus is None else out + around.plus.double()


def inputs(
    rows: int, columns: int, depth: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows out of a wider tensor, and a weight whose products are about 1."""
    x = randn(rows, depth + 24, dtype=dtype)[:, 8 : 8 + depth]
    return x, (randn(columns, depth, seed=1) / depth**0.5).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 40, 96), (8, 33, 300), (5, 1, 64)])
def test_plain_products(dtype: torch.dtype, rows: int, columns: int, depth: int) -> None:
    x, weight = inputs(rows, columns, depth, dtype)
    for around in (Around(), Around(plus=randn(rows, columns, dtype=dtype, seed=3))):
        with kernels():
            result = few_rows(x, weight, around)
        assert result.dtype == dtype
        assert_near(result, expected(x, weight, around), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gated", [False, True])
def test_the_norm_before_and_the_gate_behind(dtype: torch.dtype, gated: bool) -> None:
    x, weight = inputs(3, 72, 160, dtype)
    norm = randn(160, dtype=dtype, seed=5) * 0.3
    around = Around(norm, 1e-6, gated=gated)
    with kernels():
        result = few_rows(100 * x, weight, around)
    assert result.shape == (3, 36 if gated else 72)
    assert_near(result, expected(100 * x, weight, around), TOLERANCE[dtype])


def test_the_sum_takes_the_place_of_its_summand() -> None:
    x, weight = inputs(2, 48, 64, torch.bfloat16)
    plus = randn(2, 48, dtype=torch.bfloat16, seed=3)
    with kernels():
        apart = few_rows(x, weight, Around(plus=plus.clone()))
        result = few_rows(x, weight, Around(plus=plus, overwrite=True))
    assert result is plus and torch.equal(result, apart)


def test_logits_are_rounded_before_they_are_widened() -> None:
    x, weight = inputs(2, 48, 64, torch.bfloat16)
    with kernels():
        wide = few_rows(x, weight, Around(widened=True))
        assert wide.dtype == torch.float32
        assert torch.equal(wide, few_rows(x, weight, Around()).float())


@pytest.mark.parametrize("gated", [False, True])
def test_a_row_has_the_same_bits_alone_and_beside_others(gated: bool) -> None:
    x, weight = inputs(MOST_ROWS, 64, 200, torch.bfloat16)
    around = Around(randn(200, seed=5), 1e-6, gated=gated)
    with kernels():
        together = few_rows(x, weight, around)
        for row in range(MOST_ROWS):
            assert torch.equal(few_rows(x[row : row + 1], weight, around)[0], together[row])


def test_narrow_weights_have_narrow_tiles() -> None:
    x, weight = inputs(2, 64, 96, torch.bfloat16)
    wide, narrow = (few_rows_triton.tile_of(torch.bfloat16, each) for each in (4096, 4095))
    assert narrow.columns < wide.columns
    with kernels():
        assert_near(few_rows(x, weight, Around()), x.double() @ weight.double().T, 3e-2)


def test_what_it_does_not_take() -> None:
    x, weight = inputs(MOST_ROWS + 1, 16, 32, torch.float16)
    with kernels():
        assert not serves(x, weight) and not serves(x[:0], weight)
        assert serves(x[:1], weight) and not serves(x[:1].float(), weight)
        with pytest.raises(KernelArgumentError, match="at most 8"):
            few_rows(x, weight, Around())
        with pytest.raises(KernelArgumentError, match="float16"):
            few_rows(x[:1], weight, Around(randn(32), 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [2, MOST_ROWS + 1])
def test_projections_compute_the_same_by_either_way(dtype: torch.dtype, rows: int) -> None:
    x, weight = inputs(rows, 64, 96, dtype)
    linear = TorchDense(weight, None)
    norm, residual = randn(96, dtype=dtype, seed=5), randn(rows, 64, dtype=dtype, seed=6)
    with kernels():
        results = (
            linear(x, plus=residual.clone(), overwrite=True),
            linear.of_norm(Normed(x, norm, 1e-6)),
            linear.of_norm(Normed(x, norm, 1e-6), gated=True),
            linear.of_norm(Normed(x, norm, 1e-6), widened=True),
        )
    for result, around in zip(
        results,
        (
            Around(plus=residual),
            Around(norm, 1e-6),
            Around(norm, 1e-6, gated=True),
            Around(norm, 1e-6),
        ),
        strict=True,
    ):
        assert_near(result, expected(x, weight, around), TOLERANCE[dtype])
    assert results[3].dtype == torch.float32


def test_deterministic_products_keep_their_tiles() -> None:
    x, weight = inputs(MOST_ROWS, 64, 96, torch.bfloat16)
    linear = TorchDense(weight, None)
    norm = randn(96, seed=5)
    with kernels():
        many = linear.of_norm(Normed(x.repeat(3, 1), norm, 1e-6), deterministic=True)
        few = linear.of_norm(Normed(x, norm, 1e-6), deterministic=True)
    assert torch.equal(many[:MOST_ROWS], few)
    assert DEVICE.type == x.device.type
