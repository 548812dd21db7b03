"""Steps that are queued before the results of the ones before are read: same answers, and a device
that always has something to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from make_checkpoint import make_checkpoint
from parity import executor_of
from parity_cases import random_ids
from queued_device import QueuedExecutor, TorchDevice
from step_graphs import SPECS
from waiting import wait_for

from vlm_serve.engine.requests.outputs import Delta
from vlm_serve.engine.requests.plan import DecodeRows, StepOutput
from vlm_serve.engine.start import build as building
from vlm_serve.engine.steps import step_paths, step_sizes
from vlm_serve.engine.steps.step_graphs import StepGraphs
from vlm_serve.errors import FailedItemsError
from vlm_serve.models.batch import ForwardBatch
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.output import Output
from vlm_serve.pipeline.pipeline import Pipeline
from vlm_serve.sampling_params import SamplingParams

CONFIG = EngineConfig(
    dtype="float32",
    block_size=16,
    cache_memory="8MiB",
    max_num_seqs=4,
    max_num_batched_tokens=64,
    max_model_len=256,
    compiled_kernels=False,
    speculative="off",
    deterministic=True,
)
PROMPTS = [random_ids(20 + 13 * index, seed=index, vocabulary=290) for index in range(4)]


class Watched(QueuedExecutor):
    """Notes after each step whether the device has another one."""

    fed: Counter[bool] = Counter()

    def collect(self) -> StepOutput:
        output = super().collect()
        self.fed[bool(self._under_way)] += 1
        return output


@pytest.fixture(
    scope="module", params=["dense", pytest.param("attention alone", marks=pytest.mark.sweep)]
)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("ahead"), SPECS[request.param])


@contextmanager
def engine(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, config: EngineConfig = CONFIG, **options: Any
) -> Iterator[Pipeline]:
    """An engine whose steps run on a device behind the host, most of them captured."""
    capture, made = step_paths._capture, list[TorchDevice]()

    def on_the_device(model: Any, caches: Any, config: EngineConfig, longest: int) -> Any:
        assert config.block_size is not None
        made.append(TorchDevice(model, config.block_size))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(step_paths, "CudaGraphs", lambda place: made[-1])
            return capture(model, caches, config, longest)

    def executor(*args: Any, **given: Any) -> Watched:
        return Watched(*args, device=made[-1].device, **{**given, **options})

    Watched.fed.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_sizes, "TOKENS", (32,))
        patch.setattr(building, "graphs_wanted", lambda option, device, ranks: True)
        patch.setattr(step_paths, "_capture", on_the_device)
        patch.setattr(building, "LocalExecutor", executor)
        with Pipeline(checkpoint, config) as pipe:
            yield pipe
            pipe.engine.check()


def params(**options: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 24, "temperature": 0.0, "ignore_eos": True, **options})


MIXED = [
    params(),
    params(temperature=0.9, seed=3, logprobs=2),
    params(temperature=0.7, top_p=0.8, seed=5, min_tokens=9, ignore_eos=False, max_tokens=40),
    params(allowed_token_ids=list(range(5, 200)), max_tokens=11),
]
PENALISED = [
    params(presence_penalty=1.5, temperature=0.7, top_p=0.8, seed=4),
    params(frequency_penalty=0.7, repetition_penalty=1.2),
    params(presence_penalty=0.5, logit_bias={7: 3.0}, logprobs=1, temperature=0.6, seed=9),
    params(repetition_penalty=1.3, top_k=-1, temperature=1.1, seed=2),
]


def said(outputs: list[Output]) -> list[Any]:
    return [(each.token_ids, each.logprobs, each.finish_reason) for each in outputs]


@pytest.mark.parametrize("mixed", [MIXED, PENALISED], ids=["mixed", "penalised"])
def test_answers_have_the_same_bits(
    mixed: list[SamplingParams], checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cold, hit, beside others and again."""

    def answers() -> list[Any]:
        found = []
        for _ in range(2):
            found += said(pipe.generate_many(PROMPTS, mixed))
            found += said(pipe.generate_many(PROMPTS[:1] * 6, [params(max_tokens=9)] * 6))
            longer = [[*prompt, *output[0]] for prompt, output in zip(PROMPTS, found, strict=False)]
            found += said(pipe.generate_many(longer, mixed[::-1]))
        return found

    with engine(checkpoint, monkeypatch, ahead=False) as pipe:
        expected = answers()
        assert pipe.engine.stats()["steps_ahead"]["ahead"] == 0
    with engine(checkpoint, monkeypatch) as pipe:
        assert answers() == expected
        assert pipe.engine.stats()["steps_ahead"]["ahead"] > 60


def test_the_device_has_the_next_step_before_this_one_is_read(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Count the steps behind which the queue is empty, in steady decoding, and their reasons."""
    with engine(checkpoint, monkeypatch) as pipe:
        pipe.generate_many(PROMPTS, [params(), params(temperature=0.8, seed=1)] * 2)
        counts = pipe.engine.stats()["steps_ahead"]
    # The prompts' steps, and the last one.
    assert Watched.fed[True] >= 22 and Watched.fed[False] <= 5
    assert set(counts["refusals"]) <= {"prompt", "admission", "another sequence", "all answers end"}


@pytest.mark.sweep
def test_the_host_reads_tokens_that_the_device_has_yet_to_compute(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device of these tests shows a step that does not get them, and one that is read early."""

    def answers(**options: Any) -> list[Any]:
        with engine(checkpoint, monkeypatch, **options) as pipe:
            return said(pipe.generate_many(PROMPTS[:2], params()))

    expected = answers()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepGraphs, "_replay", _without_the_ids(StepGraphs._replay))
        assert answers() != expected
    with pytest.MonkeyPatch.context() as patch, pytest.raises(FailedItemsError):
        patch.setattr(Watched, "_later", _not_waited_for)
        answers()


def _without_the_ids(replay: Callable[..., Any]) -> Callable[..., Any]:
    def run(graphs: StepGraphs, buffers: Any, step: Any, batch: ForwardBatch) -> Any:
        return replay(graphs, buffers, step, replace(batch, sampled=None))

    return run


def _not_waited_for(executor: Watched, work: Callable[[], Any]) -> Callable[[], Any]:
    done: list[Any] = []
    executor._queue(lambda: done.append(work()))
    return lambda: done[0]


@pytest.mark.sweep
def test_stop_strings_aborts_and_failures(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare with answers of steps that are not ahead: what these computed too much is void."""
    with engine(checkpoint, monkeypatch, ahead=False) as pipe:
        whole = said(pipe.generate_many(PROMPTS, params()))
        texts = [each.text for each in pipe.generate_many(PROMPTS, params())]
    with engine(checkpoint, monkeypatch) as pipe:
        assert said(pipe.generate_many(PROMPTS, params())) == whole
        place = next(place for place in range(6, 20) if texts[0][place : place + 2].isprintable())
        stopping = params(stop=[texts[0][place : place + 2]])
        first = pipe.generate_many(PROMPTS[:2], [stopping, params()])
        assert first[0].finish_reason == "stop" and said(first)[1] == whole[1]
        deltas: list[Delta] = []
        prompt = pipe.engine.preprocessor.prepare_tokens(PROMPTS[0])
        number = pipe.engine.submit(prompt, params(max_tokens=150), deltas.append)
        wait_for(lambda: len(deltas) > 6)
        pipe.engine.abort(number)
        assert said(pipe.generate_many(PROMPTS, params())) == whole
        executor, calls = executor_of(pipe.engine), [0]
        compute = executor._compute_rows

        def failing(rows: DecodeRows) -> Any:
            calls[0] += 1
            if calls[0] in (5, 9):
                raise RuntimeError("injected")
            return compute(rows)

        executor._compute_rows = failing  # type: ignore[method-assign]
        pipe.engine.flush()
        assert said(pipe.generate_many(PROMPTS, params())) == whole
        assert calls[0] > 9


@pytest.mark.sweep
def test_a_poisonous_request_ends_alone(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(checkpoint, monkeypatch) as pipe:
        whole = said(pipe.generate_many(PROMPTS, params()))
        executor = executor_of(pipe.engine)
        compute = executor._compute_rows

        def failing(rows: DecodeRows) -> Any:
            found = [executor._known[number].info.token_ids[0] for number in rows.sequences]
            if 299 in found:
                raise RuntimeError("injected")
            return compute(rows)

        executor._compute_rows = failing  # type: ignore[method-assign]
        bad: list[Delta] = []
        prompt = pipe.engine.preprocessor.prepare_tokens([299, *PROMPTS[0]])
        pipe.engine.submit(prompt, params(), bad.append)
        assert said(pipe.generate_many(PROMPTS, params())) == whole
        wait_for(lambda: bool(bad) and bad[-1].finish_reason is not None)
        assert bad[-1].finish_reason in ("error", "length")
