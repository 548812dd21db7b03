"""Cache audit: runs a share of the hits again without the cache and compares the answers.

docs/architecture.md#what-a-hit-guarantees
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from vlm_serve.engine.core.hooks import Loop
from vlm_serve.engine.requests.outputs import Delta
from vlm_serve.engine.requests.request import Request
from vlm_serve.engine.requests.sequence import SequenceGroup
from vlm_serve.sampling_params import SamplingParams

_log = logging.getLogger(__name__)

NEAR_TIE = 1e-4
"""A first difference is a near tie, not a mismatch, if the cold run preferred its token by at most
this log-probability."""
AUDIT_PRIORITY = 1 << 40
"""Priority of audits: behind all requests of callers."""
MAX_PENDING = 16

Verdict = Literal["equal", "near_tie", "mismatch"]

COMPARED_LOGPROBS = 20
"""Alternatives per token that an audit compares."""


@dataclass(slots=True)
class AuditCounts:
    """Results of audits.

    Attributes:
        audits: number of cold runs compared.
        mismatches: cold runs that show a wrong answer from the cache.
        near_ties: cold runs that differ where two tokens were about equally likely.
        dropped: audits without a result: too many at once, aborted for a caller, or failed.
    """

    audits: int = 0
    mismatches: int = 0
    near_ties: int = 0
    dropped: int = 0


@dataclass(eq=False, slots=True)
class _Audit:
    """A finished request and the tokens of its cold run so far."""

    group: SequenceGroup
    answer: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)


class Auditor:
    """Chooses requests to audit and judges the results. Used by the engine's thread only.

    Only greedy requests without penalties are eligible: in others a different token proves nothing.

    Args:
        rate: share of the eligible requests. The choice is by counting, not at random.
        sequences: maximum number of running sequences.
        blamed: what may round a prompt's rows otherwise in other company, see `Promise`.

    Attributes:
        running: the cold request in progress.
        counts: results so far.
    """

    def __init__(self, rate: float, sequences: int = 1, blamed: Sequence[str] = ()) -> None:
        assert 0.0 <= rate <= 1.0
        self.running: Request | None = None
        self.counts = AuditCounts()
        self._rate = rate
        self._sequences, self._blamed = sequences, blamed
        self._num_eligible = 0
        self._pending: deque[_Audit] = deque()

    def attach(self, loop: Loop) -> None:
        """Run audits in this loop."""
        self._loop = loop

    def on_idle(self) -> None:
        """Start an audit while there is capacity; abort it if a request of a caller waits."""
        full = self._loop.num_running >= self._sequences
        waiting = self._loop.has_idle_callers
        if self.running is not None and full and waiting:
            self._loop.abort(self.running.request_id)
        elif self.running is None and not full and not waiting:
            request = self.start()
            if request is not None:
                self._loop.submit(request)

    def on_finished(self, group: SequenceGroup) -> None:
        """Queue an audit of a finished request if it is selected."""
        if not _eligible(group):
            return
        before = math.floor(self._num_eligible * self._rate)
        self._num_eligible += 1
        if math.floor(self._num_eligible * self._rate) == before:
            return
        if len(self._pending) == MAX_PENDING:
            self.counts.dropped += 1
            return
        self._pending.append(_Audit(group, group.sequences[0].generated))

    def on_renewed(self) -> None:
        """Drop all audits: other weights give other answers."""
        self.counts.dropped += len(self._pending)
        self._pending.clear()
        if self.running is not None:
            self._loop.abort(self.running.request_id)

    def start(self) -> Request | None:
        """Return the next cold request; None if no audit is queued."""
        assert self.running is None
        if not self._pending:
            return None
        audit = self._pending.popleft()
        audited = audit.group.request
        self.running = Request(
            request_id=f"audit of {audited.request_id}",
            prompt=audited.prompt,
            params=_cold_params(audited.params, len(audit.answer)),
            on_delta=lambda delta: self._receive(audit, delta),
            priority=AUDIT_PRIORITY,
            arrival=audited.arrival,
            cold=True,
            forced=audited.forced[:1],
            adapter=audited.adapter,
        )
        return self.running

    def _receive(self, audit: _Audit, delta: Delta) -> None:
        audit.tokens += delta.token_ids
        audit.logprobs += delta.logprobs
        if delta.finish_reason is None:
            return
        self.running = None
        if delta.finish_reason in ("abort", "error"):
            self.counts.dropped += 1
            return
        self.counts.audits += 1
        verdict = judge(audit.answer, audit.tokens, audit.logprobs)
        self.counts.near_ties += verdict == "near_tie"
        if verdict == "mismatch":
            self.counts.mismatches += 1
            _log.error(
                "request %s: the answer from the cache (%d of %d tokens) differs from the cold "
                "run%s",
                audit.group.request.request_id,
                audit.group.cached_tokens,
                len(audit.group.request.prompt),
                f"; its batch may round {', '.join(self._blamed)}" if self._blamed else "",
            )


def judge(
    answer: Sequence[int], cold: Sequence[int], logprobs: Sequence[dict[int, float]]
) -> Verdict:
    """Compare an answer with a cold run's tokens and their log-probabilities.

    Only the first difference counts: the tokens behind it follow different prefixes.
    """
    for token, reference, row in zip(answer, cold, logprobs, strict=False):
        if token != reference:
            gap = row[reference] - row.get(token, -math.inf)
            return "near_tie" if gap <= NEAR_TIE else "mismatch"
    return "equal" if len(answer) == len(cold) else "mismatch"


def _eligible(group: SequenceGroup) -> bool:
    request, params = group.request, group.request.params
    return (
        not request.cold
        and group.cached_tokens > 0
        and not (group.report is not None and group.report.weight_changes)
        and group.sequences[0].answer.finish_reason in ("stop", "length")
        and params.temperature == 0
        and request.grammar is None
        and params.thinking_token_budget is None
        and not (params.bad_words or params.logit_bias or params.allowed_token_ids)
        and params.prompt_logprobs is None
        and not params.presence_penalty
        and not params.frequency_penalty
        and params.repetition_penalty in (None, 1.0)
    )


def _cold_params(params: SamplingParams, num_tokens: int) -> SamplingParams:
    return replace(
        params,
        n=1,
        max_tokens=num_tokens,
        min_tokens=min(params.min_tokens, num_tokens),
        logprobs=COMPARED_LOGPROBS,
        return_routed_experts=False,
        routed_experts_prompt_start=0,
    )
