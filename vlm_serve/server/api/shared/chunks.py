"""Streams of chunks, each with parts of choices: those of chat, of completions and of tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from vlm_serve.engine.requests.outputs import Delta, PromptProgress, Usage
from vlm_serve.server.answers.generation import Generation
from vlm_serve.server.api.shared.answer import AnswerStream
from vlm_serve.server.api.shared.fields import (
    AnswerRequest,
    StreamOptions,
    UsageBody,
    add_usage,
    cache_report_fields,
    usage_body,
)
from vlm_serve.server.http.frames import GAP, Frames
from vlm_serve.server.http.streaming import Event, to_json

Part = dict[str, Any]
"""What a chunk tells of a choice; if the choice goes on, its `finish_reason` is None."""


class ChunkStream(AnswerStream):
    """The chunks of all choices, then one with the usage if requested.

    Cache reports are in the last chunk. The progress of a prompt has chunks of its own.

    Args:
        body: the request.
        options: its options of streams.
        generations: one per prompt.

    Attributes:
        continuous: every chunk has the usage so far.
        tells_usage: every chunk has a field for it.
        first_fields: fields of the first chunk of an answer.
        nothing: what a part tells of a choice whose answer has not begun.
    """

    nothing: ClassVar[Part] = {"delta": {}}

    def __init__(
        self,
        body: AnswerRequest,
        options: StreamOptions | None,
        generations: Sequence[Generation],
    ) -> None:
        options = options or StreamOptions()
        self.continuous = bool(options.continuous_usage_stats)
        self._usage_last = self.tells_usage = bool(options.include_usage)
        self._with_report = bool(body.cache_report)
        self._generations = generations
        # Choices whose last delta has not been pushed; the generations may be ahead.
        self._unfinished = sum(generation.task.params.n for generation in generations)
        self._frames = Frames()
        self.first_fields: dict[str, Any] = {}

    @abstractmethod
    def parts(self, prompt: int, deltas: Sequence[Delta]) -> list[Part]:
        """Add deltas of one choice to it and return the choice's parts for them."""

    @abstractmethod
    def chunk(self, choices: list[Part]) -> dict[str, Any]:
        """Return the next chunk, with these parts."""

    def push(self, prompt: int, deltas: Sequence[Delta]) -> list[Event]:
        choices: dict[int, list[Delta]] = {}
        events: list[Event] = []
        for delta in deltas:
            if delta.progress is not None:
                events.append(self._progress(prompt, delta, delta.progress))
            else:
                choices.setdefault(delta.index, []).append(delta)
        for own in choices.values():
            parts = self.parts(prompt, own)
            if own[-1].finish_reason is None:
                events += [self._framed(part) for part in parts]
                continue
            self._unfinished -= 1
            usage = self.usage().model_dump() if self.continuous else None
            chunks = [self._chunk(part, usage) for part in parts]
            if chunks and not (self._unfinished or self._usage_last):
                chunks[-1] |= self._final_fields()
            events += chunks
        return events

    def _framed(self, part: Part) -> bytes:
        """Return the chunk of a part in the middle of an answer: all but its values is known."""
        values = {name: part[name] for name in part if name != "index" and part[name] is not None}
        delta = values.pop("delta", {})
        gaps = dict.fromkeys(values, GAP) | ({"delta": dict.fromkeys(delta, GAP)} if delta else {})
        told = [*map(to_json, delta.values()), *map(to_json, values.values())]
        if self.continuous and self.tells_usage:
            told.append(to_json(self.usage().model_dump()))
        shape = (part["index"], *delta, *values)
        return self._frames.fill(shape, lambda: self._chunk(part | gaps, GAP), *told)

    def _progress(self, prompt: int, delta: Delta, progress: PromptProgress) -> dict[str, Any]:
        """Return the chunk that tells a prompt's progress, as llama.cpp does."""
        index = prompt * self._generations[prompt].task.params.n
        chunk = self.chunk([{"index": index, **self.nothing, "finish_reason": None}])
        if self.tells_usage:
            chunk["usage"] = None
        chunk["prompt_progress"] = {
            "total": delta.usage.prompt_tokens,
            "cache": delta.usage.cached_tokens,
            "processed": progress.tokens,
            "time_ms": int(progress.seconds * 1000),
        }
        return chunk

    def _chunk(self, part: Part, usage: Any) -> dict[str, Any]:
        first, self.first_fields = self.first_fields, {}
        chunk = self.chunk([part]) | first
        if self.tells_usage:
            chunk["usage"] = usage if self.continuous else None
        return chunk

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
