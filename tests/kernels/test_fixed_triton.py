"""Products in one tile: beside torch in float64, and rows alone, in any company, in any split."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
from triton_case import TOLERANCE, assert_near, kernels, randn, row_by_row

from vlm_serve.kernels.linear import fixed_triton
from vlm_serve.kernels.linear.base import Epilogue
from vlm_serve.kernels.linear.few_rows import MOST_ROWS
from vlm_serve.kernels.linear.fixed import fixed_product
from vlm_serve.kernels.linear.fixed_triton import BAND, FixedTile, tile_of
from vlm_serve.kernels.linear.torch_dense import TorchDense
from vlm_serve.kernels.triton_support import Launch, Target, record_launches

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def as_on_gpu() -> Iterator[None]:
    """Products keep rows apart; small tiles let few rows have several of them."""
    with kernels(), row_by_row():
        yield


def inputs(
    rows: int, columns: int, depth: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows out of a wider tensor, and a weight whose products are about 1."""
    x = randn(rows, depth + 24, dtype=dtype)[:, 8 : 8 + depth]
    return x, (randn(columns, depth, seed=1) / depth**0.5).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "columns", "depth"), [(1, 40, 96), (130, 70, 128), (9, 1, 60), (0, 8, 32)]
)
def test_products(dtype: torch.dtype, rows: int, columns: int, depth: int) -> None:
    x, weight = inputs(rows, columns, depth, dtype)
    bias, plus = randn(columns, dtype=dtype, seed=2), randn(rows, columns, dtype=dtype, seed=3)
    wide = x.double() @ weight.double().T
    result = fixed_product(x.device, x, weight)
    assert result.dtype == dtype
    assert_near(result, wide, TOLERANCE[dtype])
    both = fixed_product(x.device, x, weight, bias, Epilogue(plus=plus))
    assert_near(both, wide + bias.double() + plus.double(), TOLERANCE[dtype])
    sums = fixed_product(x.device, x, weight, kind=torch.float32)
    assert sums.dtype == torch.float32
    if dtype != torch.bfloat16:  # The interpreter cuts bits off instead of rounding to bfloat16.
        assert torch.equal(sums.to(dtype), result)
    overwritten = fixed_product(x.device, x, weight, bias, Epilogue(plus=plus, overwrite=True))
    assert overwritten is plus and torch.equal(overwritten, both)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_its_bits_alone_in_company_and_in_any_split(dtype: torch.dtype) -> None:
    """Over several bands of tiles, whatever the number of programs."""
    linear = TorchDense(inputs(1, 40, 70, dtype)[1], randn(40, dtype=dtype, seed=2))
    x = randn(150, 70, dtype=dtype, seed=4)
    plus = randn(150, 40, dtype=dtype, seed=5)
    tile = FixedTile(16, 16, 32, 4, 1)
    with patch.object(fixed_triton, "tile_of", lambda *_: tile):
        whole = linear(x, plus=plus, deterministic=True)
        for programs in (1, 3):
            with patch.object(fixed_triton, "MULTIPROCESSORS", programs):
                assert torch.equal(linear(x, plus=plus, deterministic=True), whole)
        for first, last in ((0, 1), (149, 150), (0, MOST_ROWS), (3, 20), (20, 150), (77, 80)):
            part = linear(x[first:last], plus=plus[first:last], deterministic=True)
            assert torch.equal(part, whole[first:last])
        order = torch.randperm(150, generator=torch.Generator().manual_seed(0))
        mixed = linear(x[order], plus=plus[order], deterministic=True)
        assert torch.equal(mixed, whole[order])


def test_a_step_of_2048_tokens_is_one_launch_of_a_program_a_multiprocessor() -> None:
    """Library calls of 128 rows would be 16, each reading the whole weight."""
    linear = TorchDense(torch.empty(9216, 2560, dtype=torch.bfloat16), None)
    found: list[Launch] = []
    for rows in (1, 64, 2048):
        with record_launches(Target("cuda", 90)) as launches:
            linear(torch.empty(rows, 2560, dtype=torch.bfloat16), deterministic=True)
        found += launches
    assert [launch.grid for launch in found] == [(72,), (72,), (132,)]
    assert len({launch.arguments["TILE"] for launch in found}) == 1
    assert all(launch.options["num_stages"] >= 3 for launch in found)


@pytest.mark.parametrize("arch", [80, 89, 90, 100, 120])
def test_three_buffers_fit_every_card(arch: int) -> None:
    target = Target("cuda", arch)
    with record_launches(target):
        for columns in (2560, 9216):
            tile = tile_of(torch.bfloat16, columns)
            buffers = tile.stages - (0 if target.roomy else 1)
            assert buffers >= 3
            shared = 2 * buffers * tile.depth * (tile.rows + tile.columns)
            assert shared <= target.shared_memory
    assert BAND.value >= 1
