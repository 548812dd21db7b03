"""Sampling in the kernels: the tokens of the rule by torch."""

from __future__ import annotations

import pytest
import torch
from sampling_cases import Case, small
from triton_case import kernels

from vlm_serve.kernels.sampling import reference
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


@pytest.mark.parametrize("level", [0.0, 0.5], ids=["any", "equal ones"])
@pytest.mark.parametrize("seed", range(3))
def test_tokens_are_those_of_the_rule(seed: int, level: float) -> None:
    check(Case(seed, 6, 300, level))
