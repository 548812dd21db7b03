"""Prompts that are prepared already, answered by a pipeline all at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vlm_serve.pipeline.inputs import listed, returned
from vlm_serve.pipeline.output import Output
from vlm_serve.pipeline.pipeline import Pipeline
from vlm_serve.pipeline.requests import Job
from vlm_serve.preprocess.identity.prompt import Prompt
from vlm_serve.sampling_params import SamplingParams


def answer_prepared(
    pipe: Pipeline,
    prompts: Iterable[Prompt],
    params: Sequence[SamplingParams],
    *,
    pooled: bool = False,
) -> list[Output]:
    """Answers prompts without a chat template's form; raises what one of them raises."""
    requests = pipe._requests
    requests.most = max(requests.most, len(params))
    jobs = [
        Job(lambda prompt=prompt: prompt, each, pooled=pooled)  # type: ignore[misc]
        for prompt, each in zip(prompts, params, strict=True)
    ]
    return [*map(returned, listed(requests.answers(jobs)))]
