"""What an executor is given and gives back passes through pickle, whatever is asked for."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from typing import Any

import pytest
from checkpoint_spec import CheckpointSpec
from make_checkpoint import make_checkpoint
from parity import executor_of
from parity_cases import photograph, random_ids, user
from together import together

from vlm_serve.engine.requests.plan import SequenceInfo, StepOutput, StepPlan
from vlm_serve.engine.steps.local_executor import LocalExecutor
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Output, Pipeline
from vlm_serve.sampling_params import SamplingParams
from vlm_serve.structured_outputs import StructuredOutputs


class Remote:
    """An executor in what might be another process; counts what passes."""

    def __init__(self, executor: LocalExecutor) -> None:
        self.inner = executor
        self.registered = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def register(self, info: SequenceInfo) -> None:
        self.registered += 1
        self.inner.register(pickle.loads(pickle.dumps(info)))

    def forget(self, sequence: int) -> None:
        self.registered -= 1
        self.inner.forget(sequence)

    def run(self, plan: StepPlan) -> StepOutput:
        output: StepOutput = pickle.loads(
            pickle.dumps(self.inner.run(pickle.loads(pickle.dumps(plan))))
        )
        return output


@pytest.fixture(scope="module")
def pipe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    spec = CheckpointSpec(image_max_pixels=128 * 128, num_experts=4)
    path = make_checkpoint(tmp_path_factory.mktemp("executor"), spec)
    # Room for a part of the requests below: they preempt each other, the same way each time
    # without drafts.
    config = EngineConfig(
        dtype="float32",
        block_size=16,
        cache_memory="320KiB",
        max_model_len=256,
        max_num_seqs=4,
        speculative="off",
    )
    with Pipeline(path, config) as made:
        yield made


def answers(pipe: Pipeline) -> list[Any]:
    pipe.engine.flush()
    wanted: list[dict[str, Any]] = [
        {"presence_penalty": 1.5, "repetition_penalty": 1.2, "n": 2},
        {"logit_bias": {7: 5.0}, "frequency_penalty": 0.5, "logprobs": 2},
        {"min_tokens": 20, "bad_words": ("a",), "stop": ("zzz",)},
        {"structured_outputs": StructuredOutputs(regex="[ab]{30}"), "temperature": 0.0},
        {"prompt_logprobs": 1, "return_routed_experts": True, "temperature": 0.0},
        {"allowed_token_ids": (5, 6, 7, 8)},
    ]
    params = [
        SamplingParams(**({"max_tokens": 60, "seed": 3, "temperature": 1.0} | one))
        for one in wanted
    ]
    prompts = [random_ids(70 + 7 * index, seed=index) for index in range(len(wanted))]
    with together(pipe.engine, len(prompts)):
        outputs = pipe.generate_many(prompts, params)
    picture = pipe.chat([user(photograph("coffee.png"), "What is this?")], params[0])
    pipe.engine.check()
    return [visible(output) for output in (*outputs, picture)]


def forgets_all(executor: LocalExecutor, seconds: float = 60.0) -> bool:
    """Wait until every sequence is forgotten: the state at an answer's end may be under way."""
    deadline = time.monotonic() + seconds
    while executor._known and time.monotonic() < deadline:
        time.sleep(0.01)
    return not executor._known


def visible(output: Output) -> Any:
    experts = output.routed_experts
    return (
        output.token_ids,
        output.text,
        output.logprobs,
        output.prompt_logprobs,
        None if experts is None else experts.tolist(),
    )


def test_an_executor_behind_pickle_gives_the_same_answers(pipe: Pipeline) -> None:
    expected = answers(pipe)
    inner = executor_of(pipe.engine)
    # A sequence that is still ending was registered before anybody counted.
    assert forgets_all(inner), "a sequence of the first answers has not ended"
    remote = Remote(inner)
    pipe.engine.call(lambda: setattr(pipe.engine._loop, "_executor", remote))
    assert answers(pipe) == expected
    assert forgets_all(inner), "a sequence that has ended is not forgotten"
    assert remote.registered == 0
    assert pipe.engine.stats()["num_preemptions"] > 0
