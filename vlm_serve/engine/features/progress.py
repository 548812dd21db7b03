"""Progress of prompts that take several steps, for the requests that ask for it."""

from __future__ import annotations

import logging
from time import monotonic

from vlm_serve.engine.core.hooks import CommittedRow
from vlm_serve.engine.requests.outputs import Delta, PromptProgress
from vlm_serve.engine.requests.plan import StepOutput
from vlm_serve.engine.requests.sequence import Sequence, SequenceGroup

_log = logging.getLogger(__name__)


class Progress:
    """Tells how much of a prompt has been processed, in a delta of its own, once a step at most."""

    def __init__(self) -> None:
        self._began: dict[SequenceGroup, float] = {}
        self._told: dict[SequenceGroup, int] = {}

    def on_admitted(self, sequence: Sequence) -> None:
        """Note when a prefill began; one that was preempted goes on with its time."""
        self._began.setdefault(sequence.group, monotonic())

    def on_committed(self, rows: list[CommittedRow], output: StepOutput) -> None:
        """Tell of the prompts that are not complete yet."""
        told = [row.sequence for row in rows if self._tell(row.sequence)]
        for on_step in dict.fromkeys(sequence.request.on_step for sequence in told):
            if on_step is not None:
                on_step()

    def report_first(self, sequence: Sequence, delta: Delta) -> Delta:
        """Tell that a prompt is complete, before its answer begins."""
        self._tell(sequence)
        return delta

    def on_ended(self, sequence: Sequence) -> None:
        """Forget a request with its last choice."""
        if sequence.group.finished:
            self._began.pop(sequence.group, None)
            self._told.pop(sequence.group, None)

    def _tell(self, sequence: Sequence) -> bool:
        """Tell of a prompt if more of it has been processed than was told; return whether."""
        group, request = sequence.group, sequence.request
        processed = min(sequence.num_computed, len(request.prompt))
        if group not in self._began or sequence.index or processed <= self._told.get(group, 0):
            return False
        self._told[group] = processed
        progress = PromptProgress(processed, monotonic() - self._began[group])
        delta = Delta(0, usage=group.usage, progress=progress)
        try:
            request.on_delta(delta)
        except Exception:
            _log.exception("a callback of request %s raised", request.request_id)
        return True
