"""Logits that are no numbers end the answer that they belong to, and nothing of them is kept."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from checkpoint_spec import CheckpointSpec
from make_checkpoint import make_checkpoint
from parity import executor_of, greedy
from parity_cases import random_ids
from waiting import wait_for

from vlm_serve.engine.requests.outputs import Delta
from vlm_serve.engine.requests.plan import DecodeRows
from vlm_serve.engine.steps import local_executor
from vlm_serve.engine.steps.local_executor import LocalExecutor
from vlm_serve.errors import NotANumberError
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Pipeline

POISON_TOKEN = 299
OPTIONS: dict[str, dict[str, Any]] = {
    "compiled": {},
    "torch": {"compiled_kernels": False},
    "drafts": {"speculative": "suffix"},
}


@pytest.fixture(scope="module", params=OPTIONS)
def pipe(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = make_checkpoint(tmp_path_factory.mktemp("unsound"), CheckpointSpec(vision_depth=0))
    config = EngineConfig(
        dtype="float32", block_size=16, cache_memory="8MiB", **OPTIONS[request.param]
    )
    with Pipeline(path, config) as made:
        yield made


@contextmanager
def poisoned(pipe: Pipeline, position: int, value: float) -> Iterator[None]:
    """Logits of sequences with the poison token in their prompt, from a position on, are wrong."""
    known, sample = executor_of(pipe.engine)._known, local_executor.sample  # type: ignore[attr-defined]

    def faulty(
        logits: torch.Tensor, tasks: Any, samplers: Any, rows: Any, best: Any, counts: Any
    ) -> Any:
        for task, row in zip(tasks, rows, strict=True):
            poisoned = POISON_TOKEN in known[task.sequence].info.token_ids
            if poisoned and task.position >= position:
                logits, best = logits.clone(), None
                logits[row, 5:] = value
        return sample(logits, tasks, samplers, rows, best, counts)

    compute = LocalExecutor._compute_rows

    def faulty_rows(executor: LocalExecutor, rows: DecodeRows) -> Any:
        output, columns = compute(executor, rows)
        for place, (number, done) in enumerate(zip(rows.sequences, rows.positions, strict=True)):
            if POISON_TOKEN in known[number].info.token_ids and done >= position:
                output = replace(output, logits=output.logits.clone(), best=None)
                output.logits[place, 5:] = value
        return output, columns

    with (
        patch.object(local_executor, "sample", faulty),
        patch.object(LocalExecutor, "_compute_rows", faulty_rows),
    ):
        yield


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("position", [0, 1, 7])
@pytest.mark.parametrize("choices", [1, 3])
def test_only_its_own_answer_ends(
    pipe: Pipeline, position: int, value: float, choices: int
) -> None:
    good = [random_ids(50 + 7 * index, seed=10 + index, vocabulary=290) for index in range(2)]
    bad = [*random_ids(60, seed=20, vocabulary=290), POISON_TOKEN]
    pipe.engine.flush()
    expected = [output.token_ids for output in pipe.generate_many(good, greedy(12))]
    whole = pipe.generate(bad, greedy(12)).token_ids
    pipe.engine.flush()
    before, deltas = pipe.engine.stats()["num_unsound"], list[Delta]()
    with poisoned(pipe, position, value):
        prompt = pipe.engine.preprocessor.prepare_tokens(bad)
        pipe.engine.submit(prompt, replace(greedy(12), n=choices, temperature=0.7), deltas.append)
        outputs = pipe.generate_many(good, greedy(12))
        with pytest.raises(NotANumberError, match="^the model has computed what is no finite"):
            pipe.generate(bad, greedy(12))
        wait_for(lambda: sum(delta.finish_reason is not None for delta in deltas) == choices)
    assert [output.token_ids for output in outputs] == expected
    assert [delta.finish_reason for delta in deltas[-choices:]] == ["error"] * choices
    assert max(delta.usage.completion_tokens for delta in deltas) <= position * choices
    assert pipe.engine.stats()["num_unsound"] == before + 2
    assert pipe.engine.alive and pipe.engine.num_running == 0
    assert pipe.engine.stats()["usage"]["rows"]["live"] == 0
    pipe.engine.check()
    assert pipe.generate(bad, greedy(12)).token_ids == whole, "nothing wrong was kept"
    assert [output.token_ids for output in pipe.generate_many(good, greedy(12))] == expected


def test_logprobs_of_a_prompt_are_numbers(pipe: Pipeline) -> None:
    from vlm_serve.engine.steps import prompt_rows

    bad = random_ids(60, seed=20, vocabulary=290)
    softmax = prompt_rows.log_softmax  # type: ignore[attr-defined]

    def faulty(logits: torch.Tensor) -> torch.Tensor:
        found = softmax(logits)
        found[-1] = math.nan
        return found

    with patch.object(prompt_rows, "log_softmax", faulty), pytest.raises(NotANumberError):
        pipe.generate(bad, greedy(2, prompt_logprobs=1))
    assert pipe.generate(bad, greedy(2, prompt_logprobs=1)).token_ids
    pipe.engine.check()
