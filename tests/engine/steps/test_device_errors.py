"""Errors after which a GPU computes nothing more end the engine; others leave it serving."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from parity import executor_of, greedy
from parity_cases import random_ids

from vlm_serve.engine.steps import local_executor
from vlm_serve.engine.steps.local_executor import after_failure
from vlm_serve.errors import EngineClosedError
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Pipeline

GPU = torch.device("cuda", 0)
STICKY = "CUDA error: device-side assert triggered\nCompile with TORCH_USE_CUDA_DSA"


class Card:
    """What torch asks of a GPU behind a failed step, with an error that stays or does not."""

    def __init__(self, patch: pytest.MonkeyPatch, problem: Exception | None) -> None:
        self.emptied = 0
        self._problem = problem
        patch.setattr(torch.cuda, "synchronize", self._synchronize)
        patch.setattr(torch.cuda, "empty_cache", self._empty)
        zeros = torch.zeros
        patch.setattr(torch, "zeros", lambda *shape, device: zeros(*shape))

    def _synchronize(self, device: torch.device) -> None:
        assert device == GPU
        if self._problem is not None:
            raise self._problem

    def _empty(self) -> None:
        self.emptied += 1


def test_an_error_that_every_later_call_repeats_is_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch, torch.AcceleratorError(STICKY))
    sentence = after_failure(RuntimeError("the step"), GPU)
    assert sentence == ("cuda:0 can compute nothing more: CUDA error: device-side assert triggered")
    assert not card.emptied


def test_an_error_that_is_gone_leaves_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch, None)
    assert after_failure(torch.AcceleratorError("CUDA error: invalid argument"), GPU) is None
    assert not card.emptied


def test_memory_that_ran_out_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch, None)
    kept: list[Any] = []

    def step() -> None:
        activations = torch.ones(3)
        kept.append(weakref.ref(activations))
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError) as raised:
        step()
    assert after_failure(raised.value, GPU) is None
    assert card.emptied == 1
    assert kept[0]() is None, "the traceback keeps the failed step's tensors"


def test_a_host_has_no_such_errors() -> None:
    assert after_failure(RuntimeError("x"), torch.device("cpu")) is None


def test_the_engine_ends_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with Pipeline("demo", EngineConfig(cache_memory="16MiB", block_size=16)) as pipe:

        def faulty(plan: object) -> object:
            raise RuntimeError("a step")

        executor = executor_of(pipe.engine)
        monkeypatch.setattr(executor, "_compute", faulty)
        monkeypatch.setattr(
            local_executor, "after_failure", lambda error, device: "cuda:0 can compute nothing more"
        )
        with pytest.raises(EngineClosedError, match="can compute nothing more"):
            pipe.generate(random_ids(20, 1), greedy(2))
        assert not pipe.engine.alive
