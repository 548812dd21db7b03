"""Routed experts in one piece with adapters, on the Triton path: beside torch's, and alone."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from quantised_codes import dequantised, integers
from triton_case import DEVICE, TOLERANCE, assert_near, kernels, randn, row_by_row

from vlm_serve.engine.steps.adapter_table import FixedRows, row_tables, write_changes
from vlm_serve.kernels.checks import KernelArgumentError
from vlm_serve.kernels.linear.low_rank import AdapterChanges, RowChanges
from vlm_serve.kernels.linear.low_rank_factors import RECORD, LowRankChange, Up, held
from vlm_serve.kernels.linear.stored_codes import Stored, stored
from vlm_serve.kernels.moe import _experts, routed_experts
from vlm_serve.kernels.moe.reference import Addends

EXPERTS, TOP_K, HIDDEN, WIDTH = 4, 2, 48, 24
SITES = (1, 2)
OWNERS = (0, 1, -1, 2, 1, 0)
"""Each token's adapter."""
Weight = torch.Tensor | Stored


@pytest.fixture(autouse=True)
def as_on_gpu() -> Iterator[None]:
    """Products keep rows apart."""
    with row_by_row():
        yield


def change(
    places: list[int], ranks: tuple[int, ...], depth: int, columns: int, dtype: torch.dtype
) -> LowRankChange:
    """Random factors for those experts that have a place."""
    count, seed = 1 + max(places), sum(ranks)
    down = (randn(count, sum(ranks), depth, seed=seed) / depth**0.5).to(dtype)
    ups, offset = [], 0
    for part, rank in enumerate(ranks):
        values = randn(count, columns, rank, seed=seed + part).to(dtype)
        ups.append(Up(part * columns, offset, values))
        offset += rank
    scales = torch.linspace(0.5, 2.0, count * offset, device=DEVICE).view(count, offset)
    table = torch.tensor(places, dtype=torch.int32, device=DEVICE)
    return LowRankChange(down, scales, tuple(ups), table)


def adapters() -> list[AdapterChanges]:
    """Three adapters: of all experts, of some, and of down alone."""
    everywhere, some = [2, 0, 1, 3], [-1, 0, -1, 1]
    return [
        AdapterChanges(
            {
                1: change(everywhere, (4, 20), HIDDEN, WIDTH, torch.float32),
                2: change(everywhere, (3,), WIDTH, HIDDEN, torch.float32),
            },
            2,
        ),
        AdapterChanges(
            {
                1: change(some, (16, 0), HIDDEN, WIDTH, torch.bfloat16),
                2: change(some, (40,), WIDTH, HIDDEN, torch.bfloat16),
            },
            2,
        ),
        AdapterChanges({2: change(everywhere, (16,), WIDTH, HIDDEN, torch.float16)}, 2),
    ]


def case(
    tokens: int, dtype: torch.dtype, hidden: int = HIDDEN
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    x = randn(tokens, hidden + 8, dtype=dtype)[:, :hidden]
    weights = randn(tokens, TOP_K, seed=1).softmax(-1).to(dtype)
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(tokens)])
    gate_up = randn(EXPERTS, 2 * WIDTH, hidden, seed=2) * hidden**-0.5
    down = randn(EXPERTS, hidden, WIDTH, seed=3) * WIDTH**-0.5
    return x, weights, ids.to(DEVICE), gate_up.to(dtype), down.to(dtype)


def expected(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    owners: tuple[int, ...],
) -> torch.Tensor:
    """The sums in float64, with each expert's weights merged with the token's adapter."""
    out, known = torch.zeros(x.shape, dtype=torch.float64), adapters()
    for token, owner in enumerate(owners):
        for place, expert in enumerate(ids[token].tolist()):
            first, second = (
                merged(weight[expert], known[owner] if owner >= 0 else None, site, expert)
                for weight, site in ((gate_up, 1), (down, 2))
            )
            gate, up = (first @ x[token].double().cpu()).chunk(2)
            inner = torch.nn.functional.silu(gate) * up
            out[token] += float(weights[token, place]) * (second @ inner)
    return out


def merged(
    weight: torch.Tensor, adapter: AdapterChanges | None, site: int, expert: int
) -> torch.Tensor:
    whole = weight.double().cpu().clone()
    own = None if adapter is None else adapter.by_site.get(site)
    if own is None:
        return whole
    mine = own.of_expert(expert)
    for up in () if mine is None else mine.ups:
        assert mine is not None
        part = slice(up.offset, up.offset + up.values.shape[1])
        down = mine.scales[part, None].cpu().double() * mine.down[part].cpu().double()
        whole[up.first : up.first + len(up.values)] += up.values.cpu().double() @ down
    return whole


def run(
    own: tuple[torch.Tensor, ...],
    weight: tuple[Weight, Weight],
    changes: RowChanges,
    *,
    deterministic: bool = False,
) -> torch.Tensor:
    (x, weights, ids), (gate_up, down) = own, weight
    return routed_experts(
        x, weights, ids, gate_up, down, deterministic=deterministic, changes=changes, sites=SITES
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_experts_of_several_adapters(dtype: torch.dtype) -> None:
    own = case(len(OWNERS), dtype)
    wanted = expected(*own, OWNERS)
    changes = RowChanges(adapters(), OWNERS)
    with kernels():
        found = run(own[:3], own[3:], changes)
        addends = Addends(own[0], own[0], own[1][:, :1])
        with_more = routed_experts(*own, changes=changes, sites=SITES, addends=addends)
        plain = routed_experts(*own)
    assert_near(found, wanted, 2 * TOLERANCE[dtype])
    shared = own[0].float() * torch.sigmoid(own[1][:, :1].float()) + own[0].float()
    assert_near(with_more, wanted + shared.cpu(), 2 * TOLERANCE[dtype])
    same = [torch.equal(each, other) for each, other in zip(found, plain, strict=True)]
    assert same[2] and not same[0] and not same[3]


def test_torch_computes_the_same() -> None:
    own = case(len(OWNERS), torch.float32)
    changes = RowChanges(adapters(), OWNERS)
    sites = changes.experts(SITES, DEVICE)
    assert sites is not None
    found = _experts.torch(*own, deterministic=False, sites=sites)
    assert_near(found, expected(*own, OWNERS), 2e-5)


def test_rows_alone_have_the_bits_that_they_have_beside_others() -> None:
    owners = tuple((7 * row) % 4 - 1 for row in range(20))
    x, weights, ids, *weight = case(20, torch.bfloat16)
    both = (weight[0], weight[1])
    with kernels():
        changes = RowChanges(adapters(), owners)
        together = run((x, weights, ids), both, changes, deterministic=True)
        base = routed_experts(x, weights, ids, *both, deterministic=True)
        for row in (0, 2, 19):
            own = slice(row, row + 1)
            alone = RowChanges(adapters(), owners[own])
            found = run((x[own], weights[own], ids[own]), both, alone, deterministic=True)
            assert torch.equal(found[0], together[row])
    for row, owner in enumerate(owners):
        assert owner >= 0 or torch.equal(base[row], together[row])


def test_a_long_sum_has_several_parts() -> None:
    own = case(3, torch.float32, 1100)
    known = AdapterChanges({1: change([0] * EXPERTS, (3, 3), 1100, WIDTH, torch.float32)}, 2)
    with kernels():
        found = run(own[:3], own[3:], RowChanges([known], (0, -1, 0)))
        plain = routed_experts(*own)
    sites = RowChanges([known], (0, -1, 0)).experts(SITES, DEVICE)
    assert sites is not None
    assert_near(found, _experts.torch(*own, deterministic=False, sites=sites), 2e-5)
    assert torch.equal(found[1], plain[1]) and not torch.equal(found[0], plain[0])


def test_quantised_experts() -> None:
    x, weights, ids, *_ = case(len(OWNERS), torch.float32)
    pieces = (
        integers(EXPERTS * 2 * WIDTH, HIDDEN, 4, 24, zeros=True),
        integers(EXPERTS * HIDDEN, WIDTH, 8, 24),
    )
    first, second = (
        stored([piece], len(piece.codes), depth, DEVICE)
        for piece, depth in zip(pieces, (HIDDEN, WIDTH), strict=True)
    )
    plain = [dequantised(piece) for piece in pieces]
    changes = RowChanges(adapters(), OWNERS)
    with kernels():
        found = run((x, weights, ids), (first, second), changes)
        base = routed_experts(x, weights, ids, first, second)
    stacks = plain[0].view(EXPERTS, -1, HIDDEN), plain[1].view(EXPERTS, -1, WIDTH)
    assert_near(found, expected(x, weights, ids, *stacks, OWNERS), 1e-4)
    assert torch.equal(found[2], base[2]) and not torch.equal(found[0], base[0])


def test_tables_on_a_device_say_the_same() -> None:
    own, known, slots = case(len(OWNERS), torch.float32), adapters(), (3, 0, 4)
    records = torch.zeros(5, 3, RECORD, dtype=torch.int64)
    for slot, each in zip(slots, known, strict=True):
        records[slot] = each.records(DEVICE)[0]
    tables = {
        name: torch.full(shape, padding, dtype=dtype)
        for name, (dtype, shape, padding, *_) in row_tables(len(OWNERS), 5).items()
    }
    changes = RowChanges(known, OWNERS, slots)
    write_changes(tables, changes)
    on_device = {name: table.to(DEVICE) for name, table in tables.items()}
    fixed = FixedRows(records.to(DEVICE), (0, 48, 48), on_device)
    with kernels():
        assert torch.equal(run(own[:3], own[3:], fixed), run(own[:3], own[3:], changes))
        shut = FixedRows(records.to(DEVICE), (0, 0, 0), on_device)
        assert torch.equal(run(own[:3], own[3:], shut), routed_experts(*own))


def test_factors_that_are_gone_are_named() -> None:
    known = adapters()[:1]
    sites = RowChanges(known, (0,)).experts(SITES, DEVICE)
    assert sites is not None and held(sites.down, 0) is not None
    known.clear()
    gc.collect()
    with pytest.raises(KernelArgumentError, match="factors that are gone"):
        held(sites.down, 0)
