"""Compares an engine with transformers: the same conversation, greedy, tokens and logits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import media_reference
import oracle
import PIL.Image
import torch
from prepared_prompts import answer_prepared
from together import together

from vlm_serve.engine.engine import Engine
from vlm_serve.engine.requests.plan import StepOutput, StepPlan
from vlm_serve.engine.steps.local_executor import LocalExecutor
from vlm_serve.models.batch import ForwardBatch, ForwardOutput
from vlm_serve.pipeline.pipeline import Output, Pipeline
from vlm_serve.sampling_params import SamplingParams

NEAR_TIE = 1e-4
"""A first differing token is no bug if the reference's best two logits are closer than this."""

LOGIT_ERROR = 1e-4
"""How far logits may be from the reference's."""

Messages = Sequence[Mapping[str, Any]]


@dataclass
class Reference:
    """What transformers answers. `logits[i]` is what token i was chosen from."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    logits: torch.Tensor


@dataclass
class Comparison:
    """How far an answer agrees with its reference. `allowed` is more than usual for a prompt that
    amplifies rounding: four times what the reference's logits differ by if they are computed at
    once, where much is computed as before."""

    equal: bool
    near_tie: bool
    logit_error: float
    allowed: float = LOGIT_ERROR

    @property
    def acceptable(self) -> bool:
        return self.equal or self.near_tie


@dataclass
class Tap:
    """Collects the logits that an engine's tokens were sampled from, by sequence number."""

    logits: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def take(self) -> list[torch.Tensor]:
        """`[tokens, vocab]` per sequence, in the order of submission; forgets them."""
        taken = [torch.stack(rows) for _, rows in sorted(self.logits.items())]
        self.logits.clear()
        return taken


def executor_of(engine: Engine) -> LocalExecutor:
    executor = engine._loop._executor
    assert isinstance(executor, LocalExecutor)
    return executor


@contextmanager
def tapped(engine: Engine) -> Iterator[Tap]:
    """Listens in on an engine's executor."""
    executor = executor_of(engine)
    # The executor's own: decode steps from CUDA graphs do not pass through the model's.
    forward, run, tap = executor._forward, executor.run, Tap()
    latest: list[torch.Tensor] = []

    def listening_forward(batch: ForwardBatch) -> ForwardOutput:
        output = forward(batch)
        latest[:] = [output.logits.clone()]
        return output

    def listening_run(plan: StepPlan) -> StepOutput:
        output = run(plan)
        if plan.rows is not None:
            for number, row in zip(plan.rows.sequences, latest[0], strict=False):
                tap.logits[number].append(row)
        if not plan.slices:
            return output
        packed = sorted(plan.slices, key=lambda item: item.kind)
        rows = iter(latest[0])
        for item in packed:
            if item.kind == "verify":
                own = [next(rows) for _ in item.samples]
                tap.logits[item.sequence] += own[: len(output.sampled[item.sequence])]
            elif item.samples:
                row = next(rows)
                for task in item.samples:
                    tap.logits.setdefault(task.sequence, []).append(row)
            elif item.kind == "decode":
                next(rows)  # the last token of an answer that has ended
        return output

    executor._forward = listening_forward  # type: ignore[method-assign]
    executor.run = listening_run  # type: ignore[method-assign]
    try:
        yield tap
    finally:
        executor._forward = forward  # type: ignore[method-assign]
        executor.run = run  # type: ignore[method-assign]


_known: dict[tuple[str, str, int], Reference] = {}


def reference(checkpoint: Path, prompt: Messages | Sequence[int], num_tokens: int) -> Reference:
    """transformers' greedy answer to a conversation or to raw token ids; computed once."""
    key = (str(checkpoint), repr(prompt), num_tokens)
    if key not in _known:
        _known[key] = _compute(checkpoint, prompt, num_tokens)
    return _known[key]


@torch.no_grad()
def _compute(checkpoint: Path, prompt: Messages | Sequence[int], num_tokens: int) -> Reference:
    inputs = inputs_of(checkpoint, prompt)
    length = inputs["input_ids"].shape[1]
    output = oracle.model(checkpoint).generate(
        **inputs,
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=1 << 40,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return Reference(
        inputs["input_ids"][0].tolist(),
        output.sequences[0, length:].tolist(),
        torch.cat(output.logits).float(),
    )


def inputs_of(checkpoint: Path, prompt: Messages | Sequence[int]) -> dict[str, Any]:
    """The tensors that transformers gets for a prompt."""
    if prompt and isinstance(prompt[0], int):
        return {"input_ids": torch.tensor([prompt])}
    return dict(media_reference.inputs(checkpoint, [_opened(each) for each in prompt]))


def _own_error(checkpoint: Path, prompt: Messages | Sequence[int], answer: Reference) -> float:
    """What the reference's logits differ by if prompt and answer are one forward."""
    inputs, count = inputs_of(checkpoint, prompt), len(answer.token_ids)
    shape = inputs["input_ids"].shape
    for name, values in inputs.items():
        if values.shape == shape:
            more = answer.token_ids if name == "input_ids" else [name == "attention_mask"] * count
            inputs[name] = torch.cat([values, torch.tensor([more]).to(values.dtype)], 1)
    logits = oracle.logits(checkpoint, inputs)[shape[1] - 1 : -1]
    return float((logits - answer.logits).abs().max())


def _opened(message: Any) -> dict[str, Any]:
    """The message with its pictures opened: torchvision's decoder is not built here."""
    if isinstance(message["content"], str):
        return dict(message)
    parts = [
        part | {"image": PIL.Image.open(part["image"]).convert("RGB")} if "image" in part else part
        for part in message["content"]
    ]
    return dict(message) | {"content": parts}


def compare(output: Output, logits: torch.Tensor | None, expected: Reference) -> Comparison:
    """Tokens up to the first difference, and the logits up to there."""
    assert output.prompt_token_ids == expected.prompt_token_ids, "another prompt"
    count = len(expected.token_ids)
    assert len(output.token_ids) == count
    same = 0
    while same < count and output.token_ids[same] == expected.token_ids[same]:
        same += 1
    near_tie = False
    if same < count:
        best = expected.logits[same].topk(2).values
        near_tie = float(best[0] - best[1]) <= NEAR_TIE
    error = 0.0
    if logits is not None:
        upto = min(same + 1, count)
        error = float((logits[:upto] - expected.logits[:upto]).abs().max())
    return Comparison(same == count, near_tie, error)


def greedy(num_tokens: int, **options: Any) -> SamplingParams:
    """Exactly that many greedy tokens."""
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, **options)


def check(
    pipe: Pipeline,
    checkpoint: Path,
    prompts: Sequence[Messages | Sequence[int]],
    num_tokens: int,
) -> tuple[list[Output], list[Comparison]]:
    """Runs prompts through the engine, all at once, and compares each with transformers."""
    prepared = pipe.engine.preprocessor
    with tapped(pipe.engine) as tap, together(pipe.engine, len(prompts)):
        outputs = answer_prepared(
            pipe,
            (
                prepared.prepare_tokens(prompt)  # type: ignore[arg-type]
                if isinstance(prompt[0], int)
                else prepared.prepare(prompt)  # type: ignore[arg-type]
                for prompt in prompts
            ),
            [greedy(num_tokens)] * len(prompts),
        )
        pipe.engine.check()
        logits = tap.take()
    comparisons = []
    for output, rows, prompt in zip(outputs, logits, prompts, strict=True):
        expected = reference(checkpoint, prompt, num_tokens)
        comparison = compare(output, rows, expected)
        if comparison.logit_error > LOGIT_ERROR:
            own = _own_error(checkpoint, prompt, expected)
            comparison.allowed = max(LOGIT_ERROR, 4 * own)
        comparisons.append(comparison)
    return outputs, comparisons
