"""Drafted tokens of the gated delta rule and of Mamba2 against decode steps: outputs, and the state
once their updates are folded in."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from triton_case import assert_near, kernels, poison, randn

from vlm_serve.kernels.gated_delta import (
    fold_gated_delta,
    recurrent_gated_delta,
    verify_gated_delta,
)
from vlm_serve.kernels.metadata import DecodeMeta, Updates, VerifyMeta

Back = Callable[[], AbstractContextManager[None]]
HEADS, DIMS, CHANNELS, MOST = (2, 4), (32, 48), 8, 5


@pytest.fixture(params=["torch", "triton"])
def back_end(request: pytest.FixtureRequest) -> Back:
    return kernels if request.param == "triton" else nullcontext


def inputs(tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v, g and beta."""
    shapes = [(HEADS[0], DIMS[0]), (HEADS[0], DIMS[0]), (HEADS[1], DIMS[1])]
    heads = [randn(tokens, *shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]
    g = -randn(tokens, HEADS[1], seed=7).abs() * 0.2
    return [*heads, g, torch.sigmoid(randn(tokens, HEADS[1], seed=8)).to(dtype)]


def updates(slots: int) -> Updates:
    """A layer's view of pools of two layers."""
    return Updates(
        poison(slots * MOST, 2, HEADS[0], DIMS[0])[:, 1],
        poison(slots * MOST, 2, HEADS[1], DIMS[1])[:, 1],
        poison(slots * MOST, 2, HEADS[1])[:, 1],
        poison(slots * MOST, 2, CHANNELS)[:, 1],
    )


def decode(
    arguments: list[torch.Tensor],
    state: torch.Tensor,
    rows: tuple[int, ...],
    skip: torch.Tensor | None,
) -> torch.Tensor:
    none = (-1,) * len(rows)
    step = DecodeMeta(((),) * len(rows), (1,) * len(rows), rows, rows, none)
    q, k, v, g, beta = arguments
    return recurrent_gated_delta(q, k, v, g, beta, state, step, skip=skip)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mamba2", [False, True])
def test_equals_decode_steps(
    back_end: Back, dtype: torch.dtype, stored: torch.dtype, mamba2: bool
) -> None:
    """Slices of 1, 5 and 3 tokens, of which 1, 2 and 3 hold, and then slices of others."""
    skip = randn(HEADS[1], seed=9) if mamba2 else None
    shape, tolerance = (HEADS[1], *DIMS), 2e-2 if torch.bfloat16 in (dtype, stored) else 2e-5
    state = torch.stack([randn(*shape, dtype=stored, seed=row) for row in range(4)])
    expected_state, kept = state.clone(), updates(3)
    rows, first, lengths, hold = (2, 0, 3), (5, 0, 10), (1, 5, 3), (1, 2, 3)
    for turn, folded in enumerate(((0, 0, 0), hold)):
        arguments = inputs(sum(lengths) + turn, dtype)[:]
        arguments = [x[turn:] for x in arguments]
        offsets = (0, 1, 6, 9)
        meta = VerifyMeta(offsets, (0,) * 3, ((),) * 3, rows, first, folded)
        before = state.clone()
        with back_end():
            q, k, v, g, beta = arguments
            out = verify_gated_delta(q, k, v, g, beta, state, kept, meta, skip=skip)
            if not turn:
                assert torch.equal(state, before)
            for place in range(3):
                for token in range(hold[place]):
                    at = offsets[place] + token
                    one = [x[at : at + 1] for x in arguments]
                    expected = decode(one, expected_state, rows[place : place + 1], skip)
                    assert_near(out[at : at + 1], expected, tolerance)
    with back_end():
        fold_gated_delta(state, kept, tuple(zip(rows, first, hold, strict=True)))
    assert_near(state, expected_state, tolerance)
    assert torch.equal(state[1], before[1])


def test_a_place_with_fewer_tokens_is_padded_with_zeros() -> None:
    """As in a captured step: slices of 2 and 3 tokens and of none, with room for 4 each."""
    arguments = inputs(12, torch.float32)
    shape = (HEADS[1], *DIMS)
    states = torch.stack([randn(*shape, seed=row) for row in range(3)])
    results = []
    for offsets, tensors in (
        ((0, 2, 5), {}),
        (
            (0, 4, 8, 12),
            {
                "slices": torch.tensor([[2, 5, 0, 0, 2], [0, 0, 0, 4, 3], [0, 0, 0, 8, 0]]).int(),
                "entries": torch.tensor([5, 6, -1, -1, 0, 1, 2, -1, -1, -1, -1, -1]).int(),
            },
        ),
    ):
        captured = bool(tensors)
        count = len(offsets) - 1
        rows, first = ((2, 0, 1), (5, 0, 9)) if captured else ((2, 0), (5, 0))
        meta = VerifyMeta(
            offsets, (0,) * count, ((),) * count, rows, first, (0,) * count, tensors=tensors
        )
        state, kept = states.clone(), updates(3)
        own = arguments if captured else [x[[0, 1, 4, 5, 6]] for x in arguments]
        q, k, v, g, beta = own
        with kernels():
            out = verify_gated_delta(q, k, v, g, beta, state, kept, meta)
        assert torch.equal(state, states)
        if captured:
            assert not out[[2, 3, 7, 8, 9, 10, 11]].any()
            out = out[[0, 1, 4, 5, 6]]
        results.append((out, *(pool.nan_to_num(9) for pool in vars(kept).values())))
    assert all(map(torch.equal, *results))
