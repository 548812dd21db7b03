"""The rows of kernels_gpu.py: kernels, their errors and times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from common.gpu_timing import Timer
from common.gpu_work import Device, Work


@dataclass(frozen=True)
class Row:
    """One line of the table. `error` is None where the kernel is an exact copy that was compared
    bit for bit, or a rival that is only timed."""

    kernel: str
    error: float | None
    microseconds: float
    predicted: float | None
    limit: float | None

    def text(self) -> str:
        error = "" if self.error is None else f"{self.error:.1e}"
        predicted = "" if self.predicted is None else f"{self.predicted:.0f}"
        limit = "" if self.limit is None else f"{100 * self.limit:.0f} %"
        return f"| {self.kernel} | {error} | {self.microseconds:.1f} | {predicted} | {limit} |"


class Bench:
    """Collects rows."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.rows: list[Row] = []
        self._timer = Timer()

    def add(
        self,
        kernel: str,
        call: Callable[[], object],
        work: Work | None = None,
        *,
        error: float | None = None,
        captured: bool = True,
    ) -> None:
        seconds, replayed = self._timer.median(call, captured=captured)
        predicted = limit = None
        if work is not None:
            predicted = 1e6 * work.predicted(self.device)
            limit = work.limit(self.device) / seconds
        name = kernel if replayed else f"{kernel} (eager)"
        row = Row(name, error, 1e6 * seconds, predicted, limit)
        self.rows.append(row)
        print(row.text(), flush=True)
