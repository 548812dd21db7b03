"""Streams of chunks, each with parts of choices: those of chat, of completions and of tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from vlm_serve.engine.requests.outputs import Delta, Usage
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


class Framed(NamedTuple):
    """A part of a choice in the middle of its answer: such parts differ in their values only.

    Attributes:
        shape: names the shape among those of the choice.
        make: makes the part with `GAP` in place of its values.
        values: as JSON, in the order of the gaps.
    """

    shape: Hashable
    make: Callable[[], Part]
    values: tuple[str, ...]


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

    tells_usage = False
    """Every chunk has a field for the usage, even if nothing is said there."""

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
        self._frames = Frames()

    @abstractmethod
    def parts(self, prompt: int, deltas: Sequence[Delta]) -> Sequence[Part | Framed]:
        """Add deltas of one choice to it and return the choice's parts for them."""

    @abstractmethod
    def chunk(self, choices: list[Part]) -> dict[str, Any]:
        """Return the next chunk, with these parts."""

    def push(self, prompt: int, deltas: Sequence[Delta]) -> list[Event]:
        choices: dict[int, list[Delta]] = {}
        for delta in deltas:
            choices.setdefault(delta.index, []).append(delta)
        events: list[Event] = []
        for index, own in choices.items():
            self._unfinished -= own[-1].finish_reason is not None
            for part in self.parts(prompt, own):
                if isinstance(part, Framed):
                    events.append(self._filled(part, prompt, index))
                else:
                    events.append(self._chunk(part, self._usage_so_far))
            last = events[-1] if events and not self._unfinished else None
            if isinstance(last, dict) and not self._usage_last:
                last |= self._final_fields()
        return events

    def _filled(self, part: Framed, prompt: int, index: int) -> bytes:
        values = part.values
        if self.continuous and (self.tells_usage or self._usage_last):
            values += (to_json(self._usage_so_far()),)
        shape = (prompt, index, part.shape)
        return self._frames.fill(shape, lambda: self._chunk(part.make(), lambda: GAP), *values)

    def _chunk(self, part: Part, usage: Callable[[], Any]) -> dict[str, Any]:
        chunk = self.chunk([part])
        if self.tells_usage or self._usage_last:
            chunk["usage"] = usage() if self.continuous else None
        return chunk

    def _usage_so_far(self) -> dict[str, Any]:
        return self.usage().model_dump()

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
