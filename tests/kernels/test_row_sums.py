"""Sums over rows of logits."""

from __future__ import annotations

import pytest
import torch

from vlm_serve.kernels.sampling.row_sums import log_softmax, running_sum, whole_sums


@pytest.mark.parametrize("vocab", [1, 7, 8, 509, 512])
def test_a_row_of_any_length_has_its_log_probabilities(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(5, vocab, generator=generator) * 8
    found = log_softmax(logits)
    assert found.shape == logits.shape
    expected = torch.log_softmax(logits.double(), -1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(log_softmax(row), own) for row, own in zip(logits, found, strict=True))


def test_whole_units_add_up_as_probabilities_do() -> None:
    generator = torch.Generator().manual_seed(1)
    probs = torch.softmax(torch.randn(5000, generator=generator).double() * 5, 0)
    assert torch.equal(running_sum(probs), probs.cumsum(0))
    assert float((whole_sums(probs) - probs.cumsum(0)).abs().max()) < 1e-12
    order = torch.randperm(5000, generator=generator)
    assert float(whole_sums(probs[order])[-1]) == float(whole_sums(probs)[-1])
