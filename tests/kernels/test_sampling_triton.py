"""Sampling in the kernels: the tokens of the rule by torch."""

from __future__ import annotations

import pytest
import torch
from sampling_cases import Case, small
from triton_case import kernels

from vlm_serve.kernels.sampling import DRAWN, GREEDY, reference
from vlm_serve.kernels.sampling import triton as sampling

SIZES = {"TILE": 128, "BINS": 128, "LISTED": 64, "_PART": 64}
"""Small tiles, bins and lists: vocabularies of some hundreds show all that large ones do."""


def in_kernels(case: Case) -> tuple[torch.Tensor, ...]:
    with kernels(), small(**SIZES):
        return case.sampled(sampling.sample_rows)


def check(case: Case) -> None:
    ids, values, following, counts = case.sampled(reference.sample_rows)
    own_ids, own_values, own_following, own_counts = in_kernels(case)
    assert own_ids.tolist() == ids.tolist()
    assert torch.equal(own_following, following) and torch.equal(own_counts, counts)
    torch.testing.assert_close(own_values, values, rtol=1e-6, atol=3e-6)


@pytest.mark.always
def test_a_small_step_has_the_tokens_of_the_rule() -> None:
    check(Case(5, 2, 100))


@pytest.mark.interpreter
@pytest.mark.parametrize("level", [0.0, 0.5], ids=["any", "equal ones"])
@pytest.mark.parametrize("seed", range(3))
def test_tokens_are_those_of_the_rule(seed: int, level: float) -> None:
    check(Case(seed, 6, 300, level))


@pytest.mark.interpreter
@pytest.mark.parametrize("logits", ["zeros", "outlier", "half"])
@pytest.mark.parametrize("top_k", [0, 3, 90])
def test_rows_that_no_list_holds(logits: str, top_k: int) -> None:
    """Many equal logits, or as many in one bin, of which some tokens are kept."""
    case = Case(7, 2, 200)
    values = {
        "zeros": torch.zeros(2, 200),
        "outlier": torch.cat((torch.full((2, 1), 900.0), 0.01 * case.logits[:, 1:]), 1),
        "half": (case.logits > 0).float(),
    }[logits]
    case.logits.copy_(values)
    case.rows.marks[:, 1:] = torch.tensor([DRAWN, top_k, -1, -1, -1, *[0] * 6])
    numbers = [[3.0, 0.9, 0.0, 0.61], [0.5, 2.0, 0.3, 0.97]]
    case.rows.numbers[:2, :4] = torch.tensor(numbers, dtype=torch.float64)
    case.keep(2)
    check(case)


@pytest.mark.interpreter
def test_rows_without_numbers_have_no_tokens_and_change_no_others() -> None:
    case = Case(3, 6, 300)
    expected = in_kernels(case)[0]
    case.logits[1, 4] = float("nan")
    case.logits[3, 250] = float("inf")
    case.logits[4] = float("-inf")
    found = in_kernels(case)[0]
    assert found[[1, 3, 4], 0].tolist() == [-1] * 3
    for row in (0, 2, 5):
        assert torch.equal(found[row], expected[row])


@pytest.mark.interpreter
def test_a_row_s_token_does_not_depend_on_the_rows_beside_it() -> None:
    case = Case(11, 5, 300, 0.5)
    together = in_kernels(case)[0]
    for row in range(5):
        own = Case(11, 5, 300, 0.5)
        others = [other for other in range(5) if other != row]
        own.rows.marks[others, 1] = GREEDY
        assert in_kernels(own)[0][row, 0] == together[row, 0]
