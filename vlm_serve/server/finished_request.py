"""Facts about a finished request, for metrics, the access log and traces."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from vlm_serve.engine.requests.outputs import CacheReport, Usage

_access = logging.getLogger("vlm_serve.access")


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A finished request. Times are monotonic seconds.

    Attributes:
        request_id: id in responses and logs.
        trace: headers of the trace that the request continues.
        choices: answers that the request asked for.
        usage, cache_report: as of the last delta.
        stages: seconds of its preparation by stage.
        arrival: time at which the request came in.
        submitted: time at which the engine got it.
        first_token: time of the first token; None: there was none.
        ended: time at which it ended.
        reason: finish reason of the last choice, "abort" or "error".
    """

    request_id: str
    trace: Mapping[str, str]
    choices: int
    usage: Usage
    cache_report: CacheReport | None
    stages: Mapping[str, float]
    arrival: float
    submitted: float
    first_token: float | None
    ended: float
    reason: str

    @property
    def seconds(self) -> float:
        """Seconds from arrival to the end."""
        return self.ended - self.arrival

    @property
    def seconds_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token; None: there was none."""
        return None if self.first_token is None else self.first_token - self.arrival

    def log(self) -> None:
        """Write the request's line of the access log."""
        first, usage, report = self.seconds_to_first_token, self.usage, self.cache_report
        _access.info(
            "request_id=%s prompt_tokens=%d cached_tokens=%d completion_tokens=%d prepare_ms=%.1f "
            "stages_ms=%s ttft_ms=%s "
            "total_ms=%.1f finish_reason=%s cache_reason=%s",
            self.request_id,
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.completion_tokens,
            (self.submitted - self.arrival) * 1000,
            ",".join(f"{name}:{1000 * value:.1f}" for name, value in self.stages.items()),
            f"{first * 1000:.1f}" if first is not None else "-",
            self.seconds * 1000,
            self.reason,
            report.reason if report is not None else "-",
        )
