"""Derived factors are made once, and again after the weight has changed."""

from __future__ import annotations

import torch

from vlm_serve.kernels.derived import derived


def test_made_once_and_again_after_a_write() -> None:
    calls = []

    def build(weight: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return weight + 1

    weight = torch.zeros(3)
    first = derived(weight, "plus", build)
    assert derived(weight, "plus", build) is first and len(calls) == 1
    assert torch.equal(derived(weight, "double", lambda x: x * 2), torch.zeros(3))
    weight += 5
    assert torch.equal(derived(weight, "plus", build), torch.full((3,), 6.0)) and len(calls) == 2


def test_inference_tensors_have_no_version() -> None:
    with torch.inference_mode():
        weight = torch.ones(2)
    assert torch.equal(derived(weight, "plus", lambda x: x + 1), torch.full((2,), 2.0))
    assert derived(weight, "plus", lambda x: x + 1) is derived(weight, "plus", lambda x: x + 1)
