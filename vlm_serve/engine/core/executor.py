"""Interface of executors: they compute the steps that the scheduler plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import torch

from vlm_serve.cache.tiers.transfer import Transfer
from vlm_serve.engine.requests.plan import SequenceInfo, StepOutput, StepPlan
from vlm_serve.errors import EngineError


class ExecutorLostError(EngineError):
    """A part of the executor is gone for good: no step can follow. The message says which one."""


RowsAfter = Literal["whole", "mixed", "folded", "unknown"]


class StepError(Exception):
    """A step has raised.

    Attributes:
        cause: the exception.
        rows: content of the state rows of verify slices. "whole": unchanged; "folded": the pending
            updates are folded in; "mixed": some of them are, up to where the step failed;
            "unknown": undefined. The content of all other rows that the step writes is always
            unknown.
    """

    def __init__(self, cause: Exception, rows: RowsAfter) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.rows = rows


class Executor(Protocol):
    """Computes steps and decides nothing. All arguments and results can be pickled.

    Attributes:
        pages: reads and writes blocks and rows between steps.
        steps_ahead: number of steps that may be submitted before the output of an earlier one is
            collected: 0, or 1 on a device that works behind the host.
        model_seconds: time of the model itself in the last step (on a GPU: until its launches were
            queued).
    """

    steps_ahead: int
    pages: Transfer
    model_seconds: float

    def register(self, info: SequenceInfo) -> None:
        """Register a sequence, before the first plan that names it."""

    def forget(self, sequence: int) -> None:
        """Forget a sequence; no later plan names it."""

    def run(self, plan: StepPlan) -> StepOutput:
        """Run one step. Raise StepError with whatever the model raises; any other step may follow.
        Raise ExecutorLostError if no step can follow."""

    def submit(self, plan: StepPlan) -> None:
        """Begin a step, if steps may be ahead. Its errors are raised when it is collected."""

    def collect(self) -> StepOutput:
        """Wait for the oldest step that was submitted and return its output. Raise as `run`."""

    def embedding(self, slot: int) -> torch.Tensor | None:
        """Return the embedding in a slot, `[tokens, width]`; None if the slot is empty. For use
        between steps; read-only."""

    def watch(self, lost: Callable[[ExecutorLostError], None]) -> None:
        """Call `lost`, from any thread, when a part is lost between steps."""

    def close(self) -> None:
        """Release everything; no step follows."""
