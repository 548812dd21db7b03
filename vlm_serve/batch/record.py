"""The state of one batch, as its client sees it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Literal

from vlm_serve.batch.asgi import TokenUsage
from vlm_serve.batch.file_store import StoredFile
from vlm_serve.server.http.auth import Owner

Status = Literal[
    "validating",
    "in_progress",
    "finalizing",
    "completed",
    "failed",
    "expired",
    "cancelling",
    "cancelled",
]
Ending = Literal["completed", "failed", "expired", "cancelled"]


@dataclass(frozen=True, slots=True)
class Problem:
    """A reason why a batch failed.

    Attributes:
        line: number of the input's line; None: the problem is not one of a line.
    """

    code: str
    message: str
    param: str | None = None
    line: int | None = None


@dataclass(slots=True, eq=False)
class Batch:
    """One batch.

    Attributes:
        window: the request's `completion_window`.
        expires_at: Unix time in seconds at which the window ends.
        output_seconds: time until its output files are deleted; None: they stay.
        times: Unix time in seconds of each later status.
        problems: why it failed.
        total, completed, failed: numbers of its requests.
        ending: the end decided on while it runs.
        work: its work while it runs.
        timer: ends it with its window.
    """

    id: str
    owner: Owner
    endpoint: str
    input: StoredFile
    window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    output_seconds: int | None = None
    status: Status = "validating"
    times: dict[str, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    total: int = 0
    completed: int = 0
    failed: int = 0
    usage: TokenUsage = TokenUsage()
    output_id: str | None = None
    error_id: str | None = None
    ending: Ending | None = None
    work: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None

    @property
    def ended(self) -> bool:
        return self.status in ("completed", "failed", "expired", "cancelled")

    def enter(self, status: Status) -> None:
        """Change the status and note the time."""
        self.status = status
        self.times[status] = int(time.time())

    def count(self, usage: TokenUsage, *, failed: bool) -> None:
        """Count one answered request."""
        self.failed += failed
        self.completed += not failed
        self.usage = TokenUsage(*(a + b for a, b in zip(self.usage, usage, strict=True)))
