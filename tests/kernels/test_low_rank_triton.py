"""Low-rank changes by the Triton kernels: beside float64, and a row alone and beside others."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from kernel_oracles import rms_norm_reference
from triton_case import DEVICE, TOLERANCE, assert_near, kernels, randn, row_by_row

from vlm_serve.engine.steps.adapter_table import FixedRows, row_tables, write_changes
from vlm_serve.kernels.checks import KernelArgumentError
from vlm_serve.kernels.linear import Joined, low_rank
from vlm_serve.kernels.linear.base import Epilogue, Linear
from vlm_serve.kernels.linear.codes import IntegerCodes
from vlm_serve.kernels.linear.few_rows import MOST_ROWS, Around, few_rows
from vlm_serve.kernels.linear.fixed import fixed_product
from vlm_serve.kernels.linear.low_rank import AdapterChanges, RowChanges, _reduced, extended
from vlm_serve.kernels.linear.low_rank_factors import (
    MOST_PARTS,
    RECORD,
    LowRankChange,
    Tiles,
    Up,
    records_of,
)
from vlm_serve.kernels.linear.torch_dense import TorchDense
from vlm_serve.kernels.linear.torch_quantised import TorchQuantised
from vlm_serve.kernels.norms import Normed

COLUMNS, K = 96, 80
OWNERS = (0, 1, -1, 2, 1, 0)
"""Each row's adapter."""


@pytest.fixture(autouse=True)
def as_on_gpu() -> Iterator[None]:
    """Products keep rows apart."""
    with kernels(), row_by_row():
        yield


def change(ranks: tuple[int, ...], dtype: torch.dtype, seed: int, depth: int = K) -> LowRankChange:
    """A change of equal parts of the columns, with such ranks; 0 leaves a part alone."""
    width = COLUMNS // len(ranks)
    ups, offset = [], 0
    for index, rank in enumerate(ranks):
        if rank:
            values = randn(width, rank, seed=seed + index).to(dtype)
            ups.append(Up(index * width, offset, values))
            offset += rank
    down = (randn(offset, depth, seed=seed) / depth**0.5).to(dtype)
    return LowRankChange(down, torch.linspace(0.5, 2.0, offset, device=DEVICE), tuple(ups))


def adapters(depth: int = K) -> list[AdapterChanges]:
    """Three adapters of several ranks and types; the last one leaves site 2 alone."""
    first = change((4, 0, 20), torch.float32, 1, depth)
    second = change((16, 16, 16), torch.bfloat16, 2, depth)
    third = change((3, 40, 5), torch.float16, 3, depth)
    both = AdapterChanges({1: first, 2: second}, 2), AdapterChanges({1: second, 2: first}, 2)
    return [*both, AdapterChanges({1: third}, 2)]


def linear(dtype: torch.dtype = torch.float32, depth: int = K, site: int = 1) -> TorchDense:
    weight = (randn(COLUMNS, depth, seed=40 + site) / depth**0.5).to(dtype)
    dense = TorchDense(weight, None)
    dense.site = site
    return dense


def expected(
    weight: torch.Tensor, x: torch.Tensor, owners: tuple[int, ...], site: int = 1
) -> torch.Tensor:
    """The products with changes in float64."""
    out = x.double() @ weight.double().T
    known = adapters(x.shape[1])
    for row, owner in enumerate(owners):
        own = known[owner].by_site.get(site) if owner >= 0 else None
        if own is None:
            continue
        u = own.scales.double() * (own.down.double() @ x[row].double())
        for up in own.ups:
            rank = up.values.shape[1]
            places = slice(up.first, up.first + len(up.values))
            out[row, places] += up.values.double() @ u[up.offset : up.offset + rank]
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("site", [1, 2])
def test_few_rows_of_several_adapters(dtype: torch.dtype, site: int) -> None:
    dense, x = linear(dtype, site=site), randn(len(OWNERS), K, dtype=dtype)
    plus = randn(len(OWNERS), COLUMNS, dtype=dtype, seed=3)
    changes = RowChanges(adapters(), OWNERS)
    sums = expected(dense._weight, x, OWNERS, site)
    assert_near(dense(x, changes=changes), sums, TOLERANCE[dtype])
    added = dense(x, plus=plus.clone(), changes=changes)
    assert_near(added, sums + plus.double(), TOLERANCE[dtype])
    taken = plus.clone()
    assert dense(x, plus=taken, overwrite=True, changes=changes) is taken
    assert torch.equal(taken, added)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_before_the_gate_behind_and_logits(dtype: torch.dtype) -> None:
    dense, raw = linear(dtype), 9 * randn(len(OWNERS), K, dtype=dtype)
    norm = randn(K, dtype=dtype, seed=5) * 0.3
    x, changes = Normed(raw, norm, 1e-6), RowChanges(adapters(), OWNERS)
    sums = expected(dense._weight, rms_norm_reference(raw, norm, 1e-6), OWNERS)
    gate, up = sums.chunk(2, dim=1)
    assert_near(dense.of_norm(x, changes=changes), sums, 2 * TOLERANCE[dtype])
    gated = dense.of_norm(x, changes=changes, gated=True)
    assert_near(gated, gate * torch.sigmoid(gate) * up, 2 * TOLERANCE[dtype])
    logits = dense.of_norm(x, changes=changes, widened=True)
    assert logits.dtype == torch.float32
    assert_near(logits, sums, 2 * TOLERANCE[dtype])


@pytest.mark.parametrize("deterministic", [False, True])
def test_rows_have_their_bits_alone_and_without_an_adapter_the_base_s(deterministic: bool) -> None:
    dense, raw = linear(torch.bfloat16), randn(len(OWNERS), K, dtype=torch.bfloat16)
    norm, plus = randn(K, seed=5) * 0.3, randn(len(OWNERS), COLUMNS, dtype=torch.bfloat16, seed=3)

    def results(rows: list[int], owners: list[int] | None) -> tuple[torch.Tensor, ...]:
        changes = None if owners is None else RowChanges(adapters(), owners)
        x = Normed(raw[rows], norm, 1e-6)
        options = {"deterministic": deterministic, "changes": changes}
        return (
            dense.of_norm(x, **options),  # type: ignore[arg-type]
            dense.of_norm(x, **options, gated=True),  # type: ignore[arg-type]
            dense.of_norm(x, **options, widened=True),  # type: ignore[arg-type]
            dense(raw[rows], plus=plus[rows], **options),  # type: ignore[arg-type]
        )

    together = results([*range(len(OWNERS))], [*OWNERS])
    turned = results([5, 4, 3, 2, 1, 0], [0, -1, -1, -1, 1, -1])
    for row, owner in enumerate(OWNERS):
        alone = results([row], [owner] if owner >= 0 else None)
        for mixed, own in zip(together, alone, strict=True):
            assert torch.equal(mixed[row], own[0]), row
    for mixed, other in zip(together, turned, strict=True):
        assert torch.equal(mixed[1], other[4]) and torch.equal(mixed[2], other[3])
        assert not torch.equal(mixed[0], other[5])


def test_many_rows_are_cut_into_tiles_of_one_adapter() -> None:
    owners = tuple((7 * row) % 4 - 1 for row in range(70))
    dense, x = linear(depth=1100), randn(70, 1100)
    changes = RowChanges(adapters(1100), owners)
    plain = dense(x, deterministic=True)
    found = dense(x, deterministic=True, changes=changes)
    assert_near(found, expected(dense._weight, x, owners), 2e-5)
    for row in (0, 1, 2, 3, 69):
        own = RowChanges(adapters(1100), owners[row : row + 1])
        alone = dense(x[row : row + 1], deterministic=True, changes=own)
        assert torch.equal(alone[0], found[row])
        assert torch.equal(plain[row], found[row]) == (owners[row] < 0)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu2"])
def test_what_follows_the_sum(activation: str) -> None:
    dense, x = linear(), randn(len(OWNERS), K)
    times, changes = randn(len(OWNERS), COLUMNS, seed=8), RowChanges(adapters(), OWNERS)
    sums = expected(dense._weight, x, OWNERS)
    assert_near(dense(x, times=times, changes=changes), sums * times.double(), 2e-5)
    activations = torch.nn.functional
    wanted = {
        "silu": activations.silu(sums),
        "gelu": activations.gelu(sums),
        "gelu_tanh": activations.gelu(sums, approximate="tanh"),
        "relu2": activations.relu(sums).square(),
    }[activation]
    assert_near(dense(x, activation=activation, changes=changes), wanted, 2e-5)  # type: ignore[arg-type]


def test_a_rank_adds_its_part_to_its_sums() -> None:
    owners = OWNERS * 3
    dense, x = linear(torch.bfloat16), randn(len(owners), K, dtype=torch.bfloat16)
    changes = RowChanges(adapters(), owners)
    if DEVICE.type == "cpu":  # The product in 16 bits with a float32 result is a GPU's.
        dense, x = linear(), x.float()
    assert_near(dense.partial(x, changes=changes), expected(dense._weight, x, owners), 1e-4)


def quantised(site: int) -> tuple[TorchQuantised, torch.Tensor]:
    codes = torch.randint(0, 256, (COLUMNS, K), dtype=torch.uint8)
    scales = torch.full((COLUMNS, K // 16), 2.0**-10)
    pieces = [IntegerCodes(codes, scales, None, 8, 16)]
    weight = TorchQuantised.of(iter(pieces), COLUMNS, K, device=DEVICE)
    weight.site = site
    return weight, (codes.float() - 128) * 2.0**-10


def test_quantised_weights_are_read_once_and_keep_their_bits() -> None:
    weight, plain = quantised(1)
    x = randn(len(OWNERS), K, dtype=torch.float16)  # which the interpreter rounds to as a GPU does
    plus, changes = randn(len(OWNERS), COLUMNS, seed=3), RowChanges(adapters(), OWNERS)
    found = weight(x, plus=plus, changes=changes)
    sums = expected(plain.to(DEVICE), x, OWNERS)
    assert_near(found, sums + plus.double(), TOLERANCE[torch.float16])
    assert torch.equal(found[2], weight(x, plus=plus)[2])
    other = RowChanges(adapters(), [-1, 1, 0, 0, -1, 2])
    assert torch.equal(found[1], weight(x, plus=plus, changes=other)[1])
    assert torch.equal(weight(x, changes=changes)[2], weight(x)[2])


def test_weights_in_several_formats_have_a_change_each() -> None:
    parts: list[Linear] = [linear(site=1), quantised(2)[0]]
    joined, x = Joined(parts), randn(12, K)
    owners = OWNERS * 2
    found = joined(x, changes=RowChanges(adapters(), owners), deterministic=True)
    for index, part in enumerate(parts):
        own = part(x, changes=RowChanges(adapters(), owners), deterministic=True)
        assert torch.equal(found[:, index * COLUMNS : (index + 1) * COLUMNS], own)


@pytest.mark.parametrize(("rows", "deterministic"), [(6, False), (24, True)])
def test_tables_on_a_device_say_the_same(rows: int, deterministic: bool) -> None:
    owners, known = (OWNERS * 4)[:rows], adapters()
    x, plus = randn(rows + 2, K), randn(rows + 2, COLUMNS, seed=3)
    slots = (3, 0, 4)
    records = torch.zeros(5, 3, RECORD, dtype=torch.int64)
    for slot, each in zip(slots, known, strict=True):
        records[slot] = each.records(DEVICE)[0]
    tables = {
        name: torch.full(shape, padding, dtype=dtype)
        for name, (dtype, shape, padding, *_) in row_tables(rows + 2, 5).items()
    }
    changes = RowChanges(known, owners, slots)
    write_changes(tables, changes)
    on_device = {name: table.to(DEVICE) for name, table in tables.items()}
    fixed = FixedRows(records.to(DEVICE), (0, 48, 48), on_device)
    assert fixed.kept(torch.arange(rows)) is fixed
    for site in (1, 2):
        dense, norm = linear(site=site), randn(K, seed=5)
        for found, wanted, plain in (
            [
                dense(part, plus=more, deterministic=deterministic, changes=each)
                for part, more, each in (
                    (x, plus, fixed),
                    (x[:rows], plus[:rows], changes),
                    (x, plus, None),
                )
            ],
            [
                dense.of_norm(Normed(part, norm, 1e-6), deterministic=deterministic, changes=each)
                for part, each in ((x, fixed), (x[:rows], changes), (x, None))
            ],
        ):
            assert torch.equal(found[:rows], wanted)
            assert torch.equal(found[rows:], plain[rows:])


def test_tiles_hold_rows_of_one_adapter() -> None:
    owners = [1] * 20 + [-1, 0] + [2] * 16 + [0]
    order, bounds = Tiles.of(owners)
    assert order == [21, 38, *range(20), *range(22, 38)]
    assert bounds == [(0, 2, 0), (2, 18, 1), (18, 22, 1), (22, 38, 2)]
    assert Tiles.of([-1, -1]) == ([], [])
    for rows in range(1, 40):
        for count in (1, 2, 8):
            worst = [row % count for row in range(rows)]
            assert len(Tiles.of(worst).bounds) <= Tiles.most(rows, count)


def test_what_records_do_not_hold() -> None:
    parts = tuple(Up(n, 0, torch.ones(1, 1)) for n in range(MOST_PARTS + 1))
    with pytest.raises(KernelArgumentError, match="9 parts, at most 8"):
        records_of({1: LowRankChange(torch.ones(1, 2), torch.ones(1), parts)}, 1)
    wrong = LowRankChange(torch.ones(1, 2, dtype=torch.float64), torch.ones(1), ())
    with pytest.raises(KernelArgumentError, match="float64"):
        records_of({1: wrong}, 1)


@pytest.mark.parametrize("rows", [6, 12])
def test_torch_finds_the_factors_by_their_addresses(rows: int) -> None:
    """Compare all that the check does: of few rows, with and without a norm, and of many."""
    owners = (OWNERS * 2)[:rows]
    dense, x, norm = linear(depth=1100), randn(rows, 1100), randn(1100, seed=5) * 0.3
    changes, plus = RowChanges(adapters(1100), owners), randn(rows, COLUMNS, seed=3)
    site = changes.at(1, DEVICE)
    changed = torch.tensor([each >= 0 for each in owners])
    for weight in (None, norm):
        mine, other = _reduced(DEVICE, x, weight, site), _reduced.torch(x, weight, site)
        assert mine.u.shape == other.u.shape == (2, rows, 48)
        for row, owner in enumerate(owners):
            wide = len(changes.adapters[owner].by_site[1].down) if owner >= 0 else 0
            assert_near(mine.u[:, row, :wide], other.u[:, row, :wide], 2e-5)
        if rows <= MOST_ROWS:
            around = Around(weight, 1e-6, gated=weight is not None, change=other)
            found = few_rows(x, dense._weight, around)
            assert_near(found, few_rows.__globals__["_by_torch"](x, dense._weight, around), 1e-4)
    sums, change = x @ dense._weight.T, _reduced.torch(x, None, site)
    after = Epilogue("silu", plus, plus)
    out, wanted = sums.clone(), sums.clone()
    extended(DEVICE, out, sums, after, change)
    extended.torch(wanted, sums, after, change)
    assert_near(out, wanted, 1e-4)
    assert torch.equal(wanted[~changed], sums[~changed])
    for activation, into in ((None, None), ("gelu", sums)):
        after = Epilogue(activation, plus=plus)  # type: ignore[arg-type]
        result, wanted = (
            run(x, dense._weight, None, after, None, change, None if into is None else into.clone())
            for run in (partial(fixed_product, DEVICE), fixed_product.torch)
        )
        assert_near(result, wanted, 1e-4)
        if into is not None:
            assert torch.equal(result[~changed], sums[~changed])
            assert torch.equal(wanted[~changed], sums[~changed])


def test_few_rows_are_at_most_eight() -> None:
    x, rows = randn(2, K), RowChanges(adapters(), (0, 1))
    around = Around(change=rows.few(1, x))
    assert around.change is not None and rows.few(3, x) is None
    with pytest.raises(KernelArgumentError, match="at most 8"):
        few_rows(randn(MOST_ROWS + 1, K), linear()._weight, around)


def test_factors_that_a_device_has_no_memory_for_are_placed_whole_the_next_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = adapters()[0]

    def full(*args: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(low_rank, "records_of", full)
    with pytest.raises(torch.OutOfMemoryError):
        known.place(DEVICE)
    assert not known.layout_bytes
    monkeypatch.setattr(low_rank, "records_of", records_of)
    known.place(DEVICE)
    assert known.layout_bytes
    assert known.records(DEVICE)[0].shape == (3, RECORD)
