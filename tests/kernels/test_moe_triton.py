"""Router and routed experts on the Triton path."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernel_oracles import routed_experts_reference
from quantised_codes import dequantised, float8, integers, rooted
from recorded_ops import RecordedOps
from sweeps import quick
from triton_case import DEVICE, TOLERANCE, assert_near, kernels, randn, row_by_row

from vlm_serve.kernels.checks import KernelArgumentError
from vlm_serve.kernels.linear import dense
from vlm_serve.kernels.linear.codes import Codes
from vlm_serve.kernels.linear.stored_codes import stored
from vlm_serve.kernels.moe import reference, route, routed_experts
from vlm_serve.kernels.moe.align_triton import align
from vlm_serve.kernels.moe.reference import Sigmoids
from vlm_serve.kernels.triton_support import Target, record_launches

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), [(1, 8, 8), (7, 12, 3), (5, 256, 8), (3, 512, 10), (0, 8, 2)]
)
def test_router_keeps_the_largest_and_renormalises(
    dtype: torch.dtype, tokens: int, experts: int, top_k: int
) -> None:
    # A permutation per token: no ties, and extremes that overflow an unshifted softmax.
    order = torch.stack([torch.randperm(experts) for _ in range(tokens)] or [torch.zeros(experts)])
    spread = (order[:tokens].double() / experts - 0.5) * (400 if dtype == torch.float32 else 12)
    logits = torch.cat([spread, spread[:, :5]], dim=1).to(dtype).to(DEVICE)[:, :experts]
    with kernels():
        weights, ids = route(logits, top_k)
    expected, expected_ids = logits.double().softmax(-1).topk(top_k, -1)
    assert weights.dtype == dtype and ids.dtype == torch.int64
    if dtype == torch.float32:
        assert torch.equal(ids, expected_ids)
    else:  # rounding makes ties, which either order breaks rightly
        assert torch.equal(logits.gather(1, ids), logits.gather(1, expected_ids))
    assert_near(weights, expected / expected.sum(-1, keepdim=True), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
def test_sigmoids(dtype: torch.dtype, biased: bool) -> None:
    logits = randn(7, 12, dtype=dtype).to(DEVICE)
    bias = randn(12, seed=2).to(DEVICE) if biased else None
    with kernels():
        weights, ids = route(logits, 3, Sigmoids(bias, 1.5, 0.25))
    expected, expected_ids = reference.route(logits.double(), 3, Sigmoids(bias, 1.5, 0.25))
    assert torch.equal(ids, expected_ids)
    assert_near(weights, expected, TOLERANCE[dtype])


def test_equal_logits_choose_distinct_experts() -> None:
    with kernels():
        weights, ids = route(torch.zeros(2, 6, device=DEVICE), 4)
    assert ids.tolist() == [[0, 1, 2, 3]] * 2
    assert torch.equal(weights, torch.full((2, 4), 0.25, device=DEVICE))


def experts_case(
    tokens: int, experts: int, top_k: int, hidden: int, width: int, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    x = randn(tokens, hidden + 8, dtype=dtype)[:, :hidden]
    weights = randn(tokens, top_k, seed=1).softmax(-1).to(dtype)
    choices = [torch.randperm(experts)[:top_k] for _ in range(tokens)]
    ids = torch.stack(choices) if choices else torch.empty(0, top_k, dtype=torch.int64)
    gate_up = randn(experts, 2 * width, hidden, seed=2) * hidden**-0.5
    down = randn(experts, hidden, width, seed=3) * width**-0.5
    return x, weights, ids.to(DEVICE), gate_up.to(dtype), down.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "hidden", "width"),
    [(1, 4, 2, 32, 16), (9, 5, 3, 40, 24), (70, 3, 1, 72, 40), (0, 4, 2, 32, 16)],
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_experts(
    dtype: torch.dtype,
    tokens: int,
    experts: int,
    top_k: int,
    hidden: int,
    width: int,
    deterministic: bool,
) -> None:
    case = experts_case(tokens, experts, top_k, hidden, width, dtype)
    with kernels():
        out = routed_experts(*case, deterministic=deterministic)
    assert out.dtype == dtype
    assert_near(out, routed_experts_reference(*(x.cpu() for x in case)), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 70])
def test_experts_without_gates(dtype: torch.dtype, tokens: int) -> None:
    x, weights, ids, gate_up, down = experts_case(tokens, 5, 3, 40, 24, dtype)
    case = x, weights, ids, gate_up[:, :24].contiguous(), down
    with kernels():
        out = routed_experts(*case)
    assert_near(out, routed_experts_reference(*(x.cpu() for x in case)), TOLERANCE[dtype])


def test_quantised_experts_without_gates() -> None:
    x, weights, ids, _, _ = experts_case(9, 5, 3, 72, 48, torch.bfloat16)
    pieces = [integers(5 * 48, 72, 4, 24)], [integers(5 * 72, 48, 4, 24)]
    both = stored(pieces[0], 5 * 48, 72, DEVICE), stored(pieces[1], 5 * 72, 48, DEVICE)
    plain = [dequantised(piece).view(5, -1, piece.codes.shape[1]) for (piece,) in pieces]
    expected = routed_experts_reference(x.cpu(), weights.cpu(), ids.cpu(), plain[0], plain[1])
    with kernels():
        out = routed_experts(x, weights, ids, *both)
    assert_near(out, expected, TOLERANCE[torch.bfloat16])


CODED: list[Callable[[int, int], Codes]] = [
    lambda columns, depth: integers(columns, depth, 8, 24),
    lambda columns, depth: integers(columns, depth, 4, 24, zeros=True, scales=torch.bfloat16),
    lambda columns, depth: rooted(columns, depth, 4, 24),
    lambda columns, depth: rooted(columns, depth, 6, 24),
    lambda columns, depth: float8(columns, depth, (8, 32), torch.bfloat16),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("draw", CODED, ids=["int8", "int4", "roots", "int6", "float8"])
@pytest.mark.parametrize(
    ("tokens", "top_k"),
    quick([(1, 2), (70, 3), (0, 1)], 1, pytest.mark.interpreter, several=True),
)
def test_quantised_experts(
    dtype: torch.dtype, draw: Callable[[int, int], Codes], tokens: int, top_k: int
) -> None:
    """On both paths, against dequantised weights."""
    experts, hidden, width = 5, 72, 48
    x, weights, ids, _, _ = experts_case(tokens, experts, top_k, hidden, width, dtype)
    pieces = [draw(experts * 2 * width, hidden)], [draw(experts * hidden, width)]
    rows = [piece.codes.shape[0] for (piece,) in pieces]
    both = [
        stored(each, n, d, DEVICE) for each, n, d in zip(pieces, rows, (hidden, width), strict=True)
    ]
    plain = [dequantised(piece) for (piece,) in pieces]
    stacked = [plain[0].view(experts, -1, hidden), plain[1].view(experts, -1, width)]
    expected = routed_experts_reference(x.cpu(), weights.cpu(), ids.cpu(), *stacked)
    with kernels():
        out = routed_experts(x, weights, ids, *both)
    assert out.dtype == dtype
    assert_near(out, expected, TOLERANCE[dtype])
    if DEVICE.type == "cpu":
        assert_near(routed_experts(x, weights, ids, *both), expected, TOLERANCE[dtype])
    with pytest.raises(KernelArgumentError, match="gate_up: does not fit"):
        routed_experts(x, weights, ids, both[1], both[1])
    with pytest.raises(KernelArgumentError, match="down: quantised in one piece"):
        routed_experts(x, weights, ids, both[0], stacked[1].to(dtype))


def test_all_tokens_to_one_expert_and_unused_experts_hold_nan() -> None:
    x, weights, ids, gate_up, down = experts_case(40, 6, 1, 32, 16, torch.float32)
    ids.fill_(4)
    gate_up[[0, 1, 2, 3, 5]] = float("nan")
    down[[0, 1, 2, 3, 5]] = float("nan")
    with kernels():
        out = routed_experts(x, weights, ids, gate_up, down)
    expected = routed_experts_reference(*(t.cpu() for t in (x, weights, ids, gate_up, down)))
    assert_near(out, expected, 2e-5)


def test_deterministic_bits_do_not_depend_on_the_other_tokens() -> None:
    x, weights, ids, gate_up, down = experts_case(30, 4, 2, 40, 24, torch.float32)
    with kernels(), row_by_row():
        whole = routed_experts(x, weights, ids, gate_up, down, deterministic=True)
        few = (x[11:13], weights[11:13], ids[11:13])
        part = routed_experts(*few, gate_up, down, deterministic=True)
    assert torch.equal(part, whole[11:13])


def test_weights_packed_for_the_cpu_are_refused() -> None:
    x, weights, ids, gate_up, down = experts_case(2, 4, 2, 32, 16, torch.float32)
    packed = [dense(part) for each in gate_up for part in each.chunk(2)], list(map(dense, down))
    with kernels(), pytest.raises(KernelArgumentError, match="gate_up"):
        routed_experts(x, weights, ids, *packed)


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize(("tokens", "experts"), [(50, 9), (1, 256), (400, 5), (350, 256), (0, 4)])
def test_tiles_cover_every_pair_once_and_never_two_experts(
    rows: int, tokens: int, experts: int
) -> None:
    ids = torch.randint(0, experts, (tokens, 3), device=DEVICE)
    with kernels():
        plan = align(ids, experts, rows)
    flat = ids.flatten()
    assert torch.equal(plan.order.long(), torch.argsort(flat, stable=True))
    assert torch.equal(plan.ends.long(), torch.bincount(flat, minlength=experts).cumsum(0))
    covered = []
    tiles = (plan.tile_expert.tolist(), plan.tile_first.tolist())
    for expert, first in zip(*tiles, strict=True):
        if expert >= 0:
            pairs = plan.order[first : min(first + rows, int(plan.ends[expert]))]
            assert len(pairs)
            assert bool((flat[pairs.long()] == expert).all())
            covered += pairs.tolist()
    assert covered == plan.order.tolist()


@pytest.mark.parametrize(
    ("tokens", "sorting"), [(9, ["_align_kernel"]), (400, ["_count_kernel", "_place_kernel"])]
)
def test_experts_of_a_layer_take_few_launches(tokens: int, sorting: list[str]) -> None:
    """Sorting by torch took 29 operations. No program looks at all of many pairs."""
    case = [x.to("meta") for x in experts_case(tokens, 5, 3, 40, 24, torch.float32)]
    with kernels(), record_launches(Target("cuda", 90)) as launches, RecordedOps() as ops:
        routed_experts(*case)
    names = [launch.kernel.__name__ for launch in launches]
    assert names == [*sorting, "gate_up_kernel", "down_kernel", "_sum_kernel"]
    assert set(ops.names) <= {"empty", "empty_like"}, ops.names
