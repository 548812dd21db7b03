"""Streams of chunks, each with parts of choices: those of chat, of completions and of tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from vlm_serve.engine.requests.outputs import Delta, Usage
from vlm_serve.server.answers.generation import Generation
from vlm_serve.server.api.shared.answer import AnswerStream, Event
from vlm_serve.server.api.shared.fields import (
    AnswerRequest,
    StreamOptions,
    UsageBody,
    add_usage,
    cache_report_fields,
    usage_body,
)


class ChunkStream(AnswerStream):
    """The chunks of all choices, then one with the usage if requested.

    Cache reports are in the last chunk.

    Args:
        body: the request.
        options: its options of streams.
        generations: one per prompt.

    Attributes:
        continuous: every chunk has the usage so far.
    """

    def __init__(
        self,
        body: AnswerRequest,
        options: StreamOptions | None,
        generations: Sequence[Generation],
    ) -> None:
        options = options or StreamOptions()
        self.continuous = bool(options.continuous_usage_stats)
        self._usage_last = bool(options.include_usage)
        self._with_report = bool(body.cache_report)
        self._generations = generations
        # Choices whose last delta has not been pushed; the generations may be ahead.
        self._unfinished = sum(generation.task.params.n for generation in generations)

    @abstractmethod
    def parts(self, prompt: int, delta: Delta) -> list[dict[str, Any]]:
        """Add a delta to its choice and return the choice's parts for it."""

    @abstractmethod
    def chunk(self, choices: list[dict[str, Any]]) -> Event:
        """Return the next chunk, with these parts."""

    def push(self, prompt: int, delta: Delta) -> list[Event]:
        self._unfinished -= delta.finish_reason is not None
        chunks = [self.chunk([part]) for part in self.parts(prompt, delta)]
        if self._usage_last:
            for chunk in chunks:
                chunk["usage"] = self.usage().model_dump() if self.continuous else None
        elif chunks and not self._unfinished:
            chunks[-1] |= self._final_fields()
        return chunks

    def end(self) -> list[Event]:
        if not self._usage_last:
            return []
        return [self.chunk([]) | {"usage": self.usage().model_dump()} | self._final_fields()]

    def total(self) -> Usage:
        """Return the usage of all prompts so far."""
        return add_usage([generation.usage for generation in self._generations])

    def usage(self) -> UsageBody:
        """Return the usage as a response has it."""
        return usage_body(self.total(), *(generation.prompt for generation in self._generations))

    def report(self) -> Any:
        """Return the prompt's cache report, or a list of reports for several prompts.

        None: there is none, or it was not requested.
        """
        reports = [
            cache_report_fields(generation.cache_report)
            for generation in self._generations
            if self._with_report and generation.cache_report is not None
        ]
        return reports[0] if len(self._generations) == 1 and reports else reports or None

    def _final_fields(self) -> dict[str, Any]:
        report = self.report()
        return {} if report is None else {"cache_report": report}
