"""Who computes what the scheduler planned, as the rest of the engine sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import torch

from vlm_serve.cache.tiers.transfer import Transfer
from vlm_serve.engine.plan import SequenceInfo, StepOutput, StepPlan
from vlm_serve.errors import EngineError


class ExecutorLostError(EngineError):
    """A part of the executor is gone for good: no step can follow. The message says which one."""


RowsAfter = Literal["whole", "mixed", "folded", "unknown"]


class StepError(Exception):
    """A step has raised.

    Attributes:
        cause: what.
        rows: what is in the state rows of the slices of drafts: "whole": what was there before;
            "folded": the pending updates too; "mixed": they, as far as the step came; "unknown":
            whatever. What is in other rows that the step writes is never known.
    """

    def __init__(self, cause: Exception, rows: RowsAfter) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.rows = rows


class Executor(Protocol):
    """Computes steps and decides nothing. All it is given and gives back can be pickled.

    Attributes:
        pages: reads and writes blocks and rows between steps.
        model_seconds: how long the model itself worked in the last step (on a GPU: until its
            launches were queued).
    """

    pages: Transfer
    model_seconds: float

    def register(self, info: SequenceInfo) -> None:
        """Makes a sequence known, before the first plan that names it."""

    def forget(self, sequence: int) -> None:
        """No plan will name the sequence any more."""

    def run(self, plan: StepPlan) -> StepOutput:
        """Executes one step. Raises StepError with whatever the model raises; a step that has
        raised may be followed by any other. Raises ExecutorLostError if no step can follow."""

    def embedding(self, slot: int) -> torch.Tensor | None:
        """What the vision tower has made for a slot, `[tokens, width]`; None if nothing is there.
        Between steps; not to be changed."""

    def watch(self, lost: Callable[[ExecutorLostError], None]) -> None:
        """Calls, from any thread, when a part of it is lost between steps."""

    def close(self) -> None:
        """No step follows."""
