"""What an attempt means for one of a request's prompts."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from vlm_serve.engine.outputs import CacheReport, Delta, PromptMedia, PromptSegment, Usage
from vlm_serve.sampling_params import SamplingParams
from vlm_serve.server.failover.attempt import Attempt, tokens_of


class AttemptPart:
    """Follows a prompt's answer, so that what is told of it does not depend on which replica gives
    it, nor on how its steps fell.

    Args:
        attempt: to answer the request.
        prompt: which of its prompts.
        params: of the prompt.

    Attributes:
        forced: what its choices begin with.
        counted: what has come, as the next attempt is to know it.
        report: of the first attempt that had one; None: there is none yet.
    """

    def __init__(self, attempt: Attempt, prompt: int, params: SamplingParams) -> None:
        self.forced = tokens_of(attempt, prompt, params.n)
        self.counted: Usage | None = None
        self.report: CacheReport | None = None
        self._first: Usage | None = None
        if attempt.usage is not None and (counts := attempt.usage[prompt]) is not None:
            self._first = Usage(**counts)
        if attempt.cache_report is not None:
            self.report = _report(attempt.cache_report[prompt])
        self._seed = attempt.seed + prompt * params.n
        self._resumed = attempt.resumed
        self._taken = 0
        self._turns = Turns(params.n)

    def seeded(self, params: SamplingParams) -> SamplingParams:
        """With the attempt's seed, if the request has none."""
        return params if params.seed is not None else replace(params, seed=self._seed)

    def sort(self, delta: Delta) -> None:
        """A delta has come."""
        self._turns.add(delta)

    def next(self) -> Delta | None:
        """The delta whose turn it is, if it has come."""
        return self._turns.next()

    @property
    def replayed(self) -> bool:
        """The token that was taken last has been delivered before."""
        return self._taken <= sum(map(len, self.forced))

    def usage(self, delta: Delta, *, ended: bool) -> Usage:
        """The prompt's usage up to a delta. What became of drafts is told at the end only: it
        depends on when they were made."""
        self._taken += len(delta.token_ids)
        own = delta.usage
        first = self._first or Usage(cached_tokens=own.cached_tokens)
        counts = (own.prompt_tokens, self._taken, first.cached_tokens)
        self.counted = Usage(
            *counts,
            first.accepted_prediction_tokens + own.accepted_prediction_tokens,
            first.rejected_prediction_tokens + own.rejected_prediction_tokens,
        )
        return self.counted if ended else Usage(*counts)

    def cache_report(self, delta: Delta, *, ended: bool) -> CacheReport | None:
        """The first attempt's, if there was one. At the end it says that the answer was resumed,
        unless nothing was left to do: then the report itself may have been delivered."""
        self.report = self.report or delta.cache_report
        if self.report is None or not ended or self.replayed:
            return self.report
        return replace(self.report, resumed=self._resumed)


class Turns:
    """Puts the deltas of several choices into an order that follows from the deltas alone: each
    choice that has not ended gives one in its turn. Engines give several of one choice in a step,
    and none of one that waits for room."""

    def __init__(self, choices: int) -> None:
        self._held: dict[int, deque[Delta]] = {index: deque() for index in range(choices)}
        self._open = list(range(choices))
        self._turn = 0

    def add(self, delta: Delta) -> None:
        self._held[delta.index].append(delta)

    def next(self) -> Delta | None:
        if not self._open:
            return None
        self._turn %= len(self._open)
        held = self._held[self._open[self._turn]]
        if not held:
            return None
        delta = held.popleft()
        if delta.finish_reason is not None:
            del self._open[self._turn]
        else:
            self._turn += 1
        return delta


def report_fields(report: CacheReport | None) -> dict[str, Any] | None:
    """A report as plain data, from which `AttemptPart` makes it again."""
    return None if report is None else asdict(report)


def _report(fields: Mapping[str, Any] | None) -> CacheReport | None:
    if fields is None:
        return None
    made = {
        "segments": tuple(PromptSegment(**each) for each in fields["segments"]),
        "media": tuple(PromptMedia(**each) for each in fields["media"]),
    }
    return CacheReport(**{**fields, **made})
