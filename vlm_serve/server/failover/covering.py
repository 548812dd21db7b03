"""The answer of an attempt: its state for each prompt, and the covered tokens of each message."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, replace
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from vlm_serve.engine.requests.outputs import CacheReport, Delta, PromptMedia, PromptSegment, Usage
from vlm_serve.sampling_params import SamplingParams
from vlm_serve.server.failover.attempt import (
    DIAGNOSIS,
    FAILURE,
    PING,
    REPORT,
    TOKENS,
    USAGE,
    Attempt,
)


class Coverage:
    """Collects the tokens covered by the next message of an attempt's answer.

    A token counts as covered by the first bytes sent after it was generated, even if none of them
    are its own. So the delivered bytes never depend on undelivered tokens.
    """

    def __init__(self) -> None:
        self._parts: Sequence[AttemptPart] = ()
        self._tokens: dict[int, list[int]] = {}
        self._sent_reports: list[int] = []
        self._failed = self._aside = False

    async def covering(
        self, parts: Sequence[AttemptPart], deltas: AsyncGenerator[tuple[int, list[Delta]], None]
    ) -> AsyncGenerator[tuple[int, list[Delta]], None]:
        """Yield the deltas of all prompts; each is covered before it is turned into bytes.

        Args:
            parts: of the request's prompts.
            deltas: each with its prompt's index.
        """
        self._parts = parts
        async with aclosing(deltas):
            async for prompt, taken in deltas:
                for delta in taken:
                    choice = prompt * parts[prompt].choices + delta.index
                    self._tokens.setdefault(choice, []).extend(delta.token_ids)
                yield prompt, taken

    def fail(self) -> None:
        """Mark the next messages as reports of a failure."""
        self._failed = True

    def aside(self) -> None:
        """Mark the next message as no part of the answer: another attempt need not repeat it."""
        self._aside = True

    def take(self) -> Mapping[str, Any]:
        """Return the extra fields of the next message."""
        aside, self._aside = self._aside, False
        if aside:
            return {PING: True}
        extra: dict[str, Any] = {}
        if self._tokens:
            extra[TOKENS], self._tokens = self._tokens, {}
            counted = [part.counted for part in self._parts]
            reports = [part.report for part in self._parts]
            extra[USAGE] = tuple(None if usage is None else asdict(usage) for usage in counted)
            if self._sent_reports != list(map(id, reports)):
                extra[REPORT] = tuple(
                    None if report is None else asdict(report) for report in reports
                )
                self._sent_reports = list(map(id, reports))
            if (diagnosis := self._parts[0].diagnosis) is not None:
                extra[DIAGNOSIS] = diagnosis
        if self._failed:
            extra[FAILURE] = True
        return extra


class CoveredResponse(Response):
    """A whole answer in JSON with the fields of its coverage."""

    media_type = "application/json"

    def __init__(self, content: str, headers: Mapping[str, str], extra: Mapping[str, Any]) -> None:
        super().__init__(content, headers=dict(headers))
        self._extra = extra

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def covered(message: Message) -> None:
            body = message["type"] == "http.response.body"
            await send({**message, **self._extra} if body else message)

        await super().__call__(scope, receive, covered)


class AttemptPart:
    """Follows the answer to one prompt, and makes its reports independent of the replica and of
    how its steps are batched.

    Args:
        attempt: the attempt to answer the request.
        prompt: index of the prompt in the request.
        params: the prompt's sampling parameters.

    Attributes:
        choices: number of choices.
        forced: tokens that the choices begin with.
        counted: usage so far, for the next attempt.
        report: cache report of the first attempt that had one; None: there is none yet.
        diagnosis: what comparing the request with an earlier one has shown; None: nothing yet.
    """

    def __init__(self, attempt: Attempt, prompt: int, params: SamplingParams) -> None:
        self.choices = params.n
        first = prompt * params.n
        self.forced = tuple(attempt.tokens.get(first + index, ()) for index in range(params.n))
        self.counted: Usage | None = None
        self.report: CacheReport | None = None
        self.diagnosis = attempt.diagnosis
        self._first: Usage | None = None
        if attempt.usage is not None and (counts := attempt.usage[prompt]) is not None:
            self._first = Usage(**counts)
        if attempt.cache_report is not None:
            self.report = _report(attempt.cache_report[prompt])
        self._seed = attempt.seed + prompt * params.n
        self._resumed = attempt.resumed
        self._taken = 0
        self._deltas = RoundRobin(params.n)

    def seeded(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with the attempt's seed unless the request has its own."""
        return params if params.seed is not None else replace(params, seed=self._seed)

    def add(self, delta: Delta) -> None:
        """Add a delta from the engine."""
        self._deltas.add(delta)

    def next(self) -> Delta | None:
        """Return the next delta in round-robin order; None: it has not arrived."""
        return self._deltas.next()

    @property
    def replayed(self) -> bool:
        """True if the last token had been delivered by an earlier attempt."""
        return self._taken <= sum(map(len, self.forced))

    def usage(self, delta: Delta, *, ended: bool) -> Usage:
        """Count a delta and return the prompt's usage so far.

        Counts of drafts are included at the end only, since they depend on the steps' timing.
        """
        self._taken += len(delta.token_ids)
        latest = delta.usage
        first = self._first or Usage(
            cached_tokens=latest.cached_tokens, written_tokens=latest.written_tokens
        )
        counts = (latest.prompt_tokens, self._taken, first.cached_tokens)
        self.counted = Usage(
            *counts,
            first.accepted_prediction_tokens + latest.accepted_prediction_tokens,
            first.rejected_prediction_tokens + latest.rejected_prediction_tokens,
            first.written_tokens,
        )
        return self.counted if ended else Usage(*counts, written_tokens=first.written_tokens)

    def cache_report(self, delta: Delta, *, ended: bool) -> CacheReport | None:
        """Return the cache report of the first attempt with one.

        At the end it also gives the number of resumptions. It does not if all tokens had been
        delivered before: then the report itself may have been delivered, too.
        """
        self.report = self.report or delta.cache_report
        if self.report is None or not ended or self.replayed:
            return self.report
        return replace(self.report, resumed=self._resumed)


class RoundRobin:
    """Orders the deltas of several choices independently of their timing.

    Each unfinished choice gives one delta in its turn. An engine gives several deltas of one choice
    in a step, and none of a waiting choice.
    """

    def __init__(self, choices: int) -> None:
        self._queues: dict[int, deque[Delta]] = {index: deque() for index in range(choices)}
        self._open = list(range(choices))
        self._turn = 0

    def add(self, delta: Delta) -> None:
        """Add a delta of any choice."""
        self._queues[delta.index].append(delta)

    def next(self) -> Delta | None:
        """Return the next delta; None: it has not arrived, or all choices have ended."""
        if not self._open:
            return None
        self._turn %= len(self._open)
        queue = self._queues[self._open[self._turn]]
        if not queue:
            return None
        delta = queue.popleft()
        if delta.finish_reason is not None:
            del self._open[self._turn]
        else:
            self._turn += 1
        return delta


def _report(fields: Mapping[str, Any] | None) -> CacheReport | None:
    """Return the report that an earlier attempt has told, as plain data."""
    if fields is None:
        return None
    details = {
        "segments": tuple(PromptSegment(**segment) for segment in fields["segments"]),
        "media": tuple(PromptMedia(**medium) for medium in fields["media"]),
    }
    return CacheReport(**{**fields, **details})
