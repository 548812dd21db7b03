"""A step that raises loses only the request that makes it raise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from checkpoint_spec import CheckpointSpec
from make_checkpoint import make_checkpoint
from parity import executor_of, greedy
from parity_cases import random_ids

from vlm_serve.engine.requests.outputs import Delta
from vlm_serve.engine.requests.plan import SampleTask
from vlm_serve.engine.requests.sequence import Sequence
from vlm_serve.errors import EngineError
from vlm_serve.models.parts.feed_forward import LoadedMlp
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Pipeline

LAYERS = 4
POISON_TOKEN = 299


@pytest.fixture(scope="module")
def pipe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    spec = CheckpointSpec(num_layers=LAYERS, vision_depth=0)
    path = make_checkpoint(tmp_path_factory.mktemp("isolation"), spec)
    config = EngineConfig(
        dtype="float32",
        block_size=16,
        cache_memory="8MiB",
        compiled_kernels=False,  # the faults are put into the ops
    )
    with Pipeline(path, config) as made:
        yield made


@contextmanager
def raising_after(pipe: Pipeline, layer: int, *, always: bool) -> Iterator[None]:
    """Steps raise after that many layers: the first one, or all that see the poison token."""
    model = executor_of(pipe.engine)._model
    forward = model.forward
    left = [1]

    def faulty(batch: Any, caches: Any) -> Any:
        strike = POISON_TOKEN in batch.token_ids.tolist() if always else left[0] > 0
        if not strike:
            return forward(batch, caches)
        left[0] -= 1
        with interrupted(layer):
            return forward(batch, caches)

    model.forward = faulty  # type: ignore[method-assign]
    try:
        yield
    finally:
        model.forward = forward  # type: ignore[method-assign]


@contextmanager
def interrupted(layer: int) -> Iterator[None]:
    """Lets that many feed-forward blocks run, then raises in the middle of the model."""
    calls, apply = [0], LoadedMlp.apply

    def counting(*args: Any, **options: Any) -> Any:
        if calls[0] == layer:
            raise RuntimeError("injected")
        calls[0] += 1
        return apply(*args, **options)

    with patch.object(LoadedMlp, "apply", counting):
        try:
            yield
        finally:
            assert calls[0] == layer, "the model was not interrupted where it should have been"


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_passing_fault_costs_nobody_the_answer(pipe: Pipeline, layer: int) -> None:
    prompts = [random_ids(40 + 9 * index, seed=index, vocabulary=290) for index in range(3)]
    pipe.engine.flush()
    expected = [output.token_ids for output in pipe.generate_many(prompts, greedy(12))]
    pipe.engine.flush()
    with raising_after(pipe, layer, always=False):
        outputs = pipe.generate_many(prompts, greedy(12))
    assert [output.token_ids for output in outputs] == expected
    pipe.engine.check()


@pytest.mark.parametrize("layer", range(LAYERS))
def test_only_the_culprit_fails(pipe: Pipeline, layer: int) -> None:
    good = [random_ids(50 + 7 * index, seed=10 + index, vocabulary=290) for index in range(2)]
    bad = [*random_ids(60, seed=20, vocabulary=290), POISON_TOKEN]
    pipe.engine.flush()
    expected = [output.token_ids for output in pipe.generate_many(good, greedy(12))]
    pipe.engine.flush()
    endings: list[Delta] = []
    with raising_after(pipe, layer, always=True):
        prompt = pipe.engine.preprocessor.prepare_tokens(bad)
        pipe.engine.submit(prompt, greedy(12), endings.append)
        outputs = pipe.generate_many(good, greedy(12))
        with pytest.raises(EngineError, match="step fail"):
            pipe.generate(bad, greedy(12))
    assert [output.token_ids for output in outputs] == expected
    assert [delta.finish_reason for delta in endings] == ["error"]
    pipe.engine.check()
    assert pipe.generate(good[0], greedy(12)).token_ids == expected[0]


def test_what_cannot_be_planned_ends_alone(pipe: Pipeline) -> None:
    """A grammar's mask, say: the others go on, and everything is given back."""
    good = [random_ids(40 + index, seed=30 + index, vocabulary=290) for index in range(2)]
    bad = [*random_ids(60, seed=40, vocabulary=290), POISON_TOKEN]
    expected = [output.token_ids for output in pipe.generate_many(good, greedy(12))]
    sample_task = Sequence.sample_task

    def faulty(sequence: Sequence) -> SampleTask:
        if sequence.num_generated == 3 and POISON_TOKEN in sequence.prompt.token_ids:
            raise RuntimeError("injected")
        return sample_task(sequence)

    endings: list[Delta] = []
    with patch.object(Sequence, "sample_task", faulty):
        prompt = pipe.engine.preprocessor.prepare_tokens(bad)
        # A step with bad words is planned sequence by sequence.
        params = greedy(12, n=2, bad_words=("qqqq",))
        pipe.engine.submit(prompt, params, endings.append)
        outputs = pipe.generate_many(good, greedy(12))
        with pytest.raises(EngineError, match="step fail"):
            pipe.generate(bad, replace(params, n=1))
    assert [output.token_ids for output in outputs] == expected
    assert [delta.finish_reason for delta in endings][-2:] == ["error", "error"]
    assert pipe.engine.alive and pipe.engine.num_running == 0
    assert pipe.engine.stats()["usage"]["rows"]["live"] == 0
    pipe.engine.check()
