"""A decode step of the benchmark checkpoint beside its projections, to show what is not a GEMM."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch
from model_driver import Driver, text_sequence

from vlm_serve.kernels.dispatch import compiled_kernels
from vlm_serve.kernels.linear import Linear
from vlm_serve.models import load_model

BLOCK = 64


class DecodeStep:
    """One token for each of `batch` sequences of `context` tokens, whose caches hold zeros.

    Args:
        checkpoint: a dense one.
    """

    def __init__(self, checkpoint: Path, dtype: torch.dtype, batch: int, context: int) -> None:
        self._model = load_model(checkpoint, dtype, "cpu", compiled=True)
        blocks = batch * -(-context // BLOCK)
        self._driver = Driver(self._model, block_size=BLOCK, num_blocks=blocks, num_rows=batch)
        for pool in self._driver.caches.tensors.values():
            pool.zero_()
        self._model.compile_steps(self._driver.caches)
        decoder = self._model._decoder
        parts: list[Any] = [each.part for layer in decoder.layers for each in layer.branches]
        values = [getattr(part, name) for part in parts for name in part.__slots__]
        self._projections = [*(one for one in values if isinstance(one, Linear)), decoder.head]
        self._sequences = [text_sequence([1] * context) for _ in range(batch)]
        for sequence in self._sequences:
            sequence.started = True
        self._name = f"batch {batch}, context {context}, {str(dtype).removeprefix('torch.')}"
        self._batch = batch

    def run(self) -> None:
        """The whole step."""
        self._driver.step(self._sequences)

    def gemms(self) -> None:
        """The same projections on the same number of rows, and nothing else."""
        with compiled_kernels():
            for weight in self._projections:
                weight(torch.zeros(self._batch, weight.depth, dtype=self._model.dtype))

    def row(self, rounds: int) -> str:
        """Measures the step and its GEMMs in turns and returns the row of the table."""
        times: tuple[list[float], list[float]] = ([], [])
        for round_number in range(-2, rounds):
            for which, function in enumerate((self.run, self.gemms)):
                begin = time.perf_counter()
                function()
                if round_number >= 0:
                    times[which].append(1e3 * (time.perf_counter() - begin))
        share = statistics.median(1 - gemm / all_ for all_, gemm in zip(*times, strict=True))
        best = (min(times[0]), min(times[1]))
        goal = "< 35 %" if self._batch == 8 else ""
        return f"| {self._name} | {best[0]:.2f} | {best[1]:.2f} | {share:.0%} | {goal} |"
