"""The response to a completion request, complete and as a stream."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from vlm_serve.engine.outputs import Delta
from vlm_serve.preprocess.tokenizer import Tokenizer
from vlm_serve.server.answers.generation import Generation
from vlm_serve.server.api.answer import AnswerStream, Event
from vlm_serve.server.api.bodies import CacheReportBody, UsageBody
from vlm_serve.server.api.completions.bodies import Completion
from vlm_serve.server.api.completions.choice import CompletionChoiceState
from vlm_serve.server.api.completions.request import CompletionRequest
from vlm_serve.server.api.reports import (
    add_usage,
    cache_report_body,
    cache_report_fields,
    usage_body,
)


class CompletionStream(AnswerStream):
    """The chunks of all choices. Choice `p * n + i` is the i-th of prompt p."""

    def __init__(
        self,
        body: CompletionRequest,
        tokenizer: Tokenizer,
        generations: Sequence[Generation],
        *,
        model: str,
        created: int,
    ) -> None:
        self._body = body
        self._generations = generations
        self._id = f"cmpl-{generations[0].task.request_id}"
        self._model, self._created = model, created
        self._choices = [
            [
                CompletionChoiceState(tokenizer, body, number * count + index, generation.prompt)
                for index in range(count)
            ]
            for number, generation in enumerate(generations)
            for count in [generation.task.params.n]
        ]
        # Choices whose last delta has not been pushed; the generations may be ahead.
        self._unfinished = sum(map(len, self._choices))

    def push(self, prompt: int, delta: Delta) -> list[Event]:
        body = self._body
        part = self._choices[prompt][delta.index].push(delta)
        self._unfinished -= delta.finish_reason is not None
        if part is None:
            return []
        chunk = self._chunk([part.model_dump()])
        if body.stream_option("include_usage"):
            continuous = body.stream_option("continuous_usage_stats")
            chunk["usage"] = self._usage().model_dump() if continuous else None
        elif not self._unfinished:
            chunk |= self._final_fields()
        return [chunk]

    def end(self) -> list[Event]:
        if not self._body.stream_option("include_usage"):
            return []
        return [self._chunk([]) | {"usage": self._usage().model_dump()} | self._final_fields()]

    def result(self) -> Completion:
        return Completion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[choice.result() for choices in self._choices for choice in choices],
            usage=self._usage(),
            cache_report=self._report() if self._body.cache_report else None,
        )

    def _chunk(self, choices: list[dict[str, Any]]) -> Event:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def _usage(self) -> UsageBody:
        total = add_usage([generation.usage for generation in self._generations])
        if self._body.only_echo:
            total = dataclasses.replace(total, completion_tokens=0)
        return usage_body(total, *(generation.prompt for generation in self._generations))

    def _report(self) -> CacheReportBody | list[CacheReportBody] | None:
        """Return the prompt's cache report, or a list of reports for several prompts."""
        bodies = [cache_report_body(generation.cache_report) for generation in self._generations]
        found = [body for body in bodies if body is not None]
        return found[0] if len(bodies) == 1 and found else found or None

    def _final_fields(self) -> dict[str, Any]:
        if not self._body.cache_report:
            return {}
        reports = [
            cache_report_fields(generation.cache_report)
            for generation in self._generations
            if generation.cache_report
        ]
        return {"cache_report": reports[0] if len(self._generations) == 1 else reports}
