"""Codes that are places in a table: values, memory, and the bits of the same values as bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from quantised_codes import dequantised, generator, randn

from vlm_serve.kernels.checks import KernelArgumentError
from vlm_serve.kernels.linear.codes import IQ4_VALUES, IntegerCodes, Outer
from vlm_serve.kernels.linear.packed_codes import PackedCodes
from vlm_serve.kernels.linear.torch_quantised import TorchQuantised

COLUMNS, DEPTH = 77, 512
ROWS = (1, 2, 3, 5, 13, 50)
TABLES = {2: (-7, 1, 9), 3: (8, 25, 43, 0, -8, -25, -43, 0), 4: tuple(range(-127, 128, 16))}


def looked_up(bits: int, group: int, depth: int = DEPTH, *, levels: int = 2) -> IntegerCodes:
    """Random codes with scales of one level or of two, and a factor of all."""
    table = TABLES[bits]
    codes = torch.randint(len(table), (COLUMNS, depth), generator=generator(1), dtype=torch.uint8)
    shape = COLUMNS, depth // group
    if levels == 1:
        scales = (torch.rand(shape, generator=generator(2)) / 100).half()
        return IntegerCodes(codes, scales, None, bits, group, table=table)
    inner = torch.randint(-31, 32, shape, generator=generator(2), dtype=torch.int8)
    size = 8 * group if depth % (8 * group) == 0 else group
    above = (torch.rand(COLUMNS, depth // size, generator=generator(3)) / 1000).half()
    outer, factors = Outer(above, None, size), torch.full((COLUMNS,), 0.125)
    return IntegerCodes(codes, inner, None, bits, group, factors, outer=outer, table=table)


def as_bytes(codes: IntegerCodes) -> IntegerCodes:
    """The same values as codes of eight bits, with the same scales."""
    assert codes.table is not None
    values = (torch.tensor(codes.table) + 128).to(torch.uint8)[codes.codes.long()]
    return replace(codes, codes=values, bits=8, table=None)


CASES = [
    pytest.param(looked_up(bits, group, depth, levels=levels), id=f"{bits} bits, {group}, {depth}")
    for bits, group, depth, levels in (
        (2, 32, 512, 2),
        (2, 256, 512, 1),
        (3, 32, 512, 2),
        (3, 16, 512, 2),
        (3, 16, 528, 2),
        (4, 32, 512, 2),
        (4, 16, 528, 1),
    )
]


@pytest.mark.parametrize("codes", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_bits_of_bytes(codes: IntegerCodes, dtype: torch.dtype, dynamic: bool) -> None:
    depth = codes.codes.shape[1]
    ours, theirs = (
        PackedCodes.of([form], COLUMNS, depth, dynamic=dynamic) for form in (codes, as_bytes(codes))
    )
    for rows in ROWS:
        x = randn(rows, depth, seed=rows, dtype=dtype)
        assert torch.equal(ours(x), theirs(x)), rows


@pytest.mark.parametrize("codes", CASES)
def test_values(codes: IntegerCodes) -> None:
    depth = codes.codes.shape[1]
    exact = dequantised(as_bytes(codes).flat()).double()
    assert torch.equal(codes.values().double(), exact)
    assert torch.equal(codes.wide().values().double(), exact)
    x = randn(5, depth)
    wanted = x.double() @ exact.T
    for weight in (PackedCodes, TorchQuantised):
        found = weight.of([codes], COLUMNS, depth)(x)
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("codes", CASES)
def test_torch_multiplies_a_part_of_the_rows_at_a_time(
    codes: IntegerCodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    depth = codes.codes.shape[1]
    weight, bias = TorchQuantised.of([codes], COLUMNS, depth, randn(COLUMNS)), randn(3, depth)
    whole = weight(bias)
    monkeypatch.setattr("vlm_serve.kernels.linear.torch_quantised.CHUNK_BYTES", 4 * depth * 16)
    torch.testing.assert_close(weight(bias), whole, rtol=1e-5, atol=1e-5)
    alone = weight(bias[:1], deterministic=True)
    assert torch.equal(alone[0], weight(bias, deterministic=True)[0])


@pytest.mark.parametrize(("bits", "most"), [(2, 2.4), (3, 3.4), (4, 4.4)])
def test_memory(bits: int, most: float) -> None:
    codes = looked_up(bits, 32)
    padded = -(-COLUMNS // 32) * 32
    assert PackedCodes.of([codes], COLUMNS, DEPTH).nbytes * 8 / (padded * DEPTH) < most + 0.07
    assert TorchQuantised.of([codes], COLUMNS, DEPTH).nbytes * 8 / (COLUMNS * DEPTH) < most + 0.07


def test_columns_are_cut_with_their_scales() -> None:
    codes = looked_up(3, 32)
    order = torch.arange(DEPTH).view(-1, 32).flip(0).flatten()
    assert torch.equal(codes.of_columns(order).values(), codes.values()[:, order])
    part = codes.of_columns(range(16, 112))
    assert torch.equal(part.values(), codes.values()[:, 16:112])


def test_tables_of_one_weight_are_alike() -> None:
    codes = looked_up(4, 32)
    other = replace(codes, table=IQ4_VALUES)
    with pytest.raises(KernelArgumentError, match="kinds or groups differ"):
        PackedCodes.of([codes, other], 2 * COLUMNS, DEPTH)
    with pytest.raises(KernelArgumentError, match="one kind"):
        TorchQuantised.of([codes, other], 2 * COLUMNS, DEPTH)
