"""A decode step of the benchmark checkpoint beside its projections, to see what is not a GEMM."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch
from model_driver import Driver, text_sequence

from vlm_serve.kernels import linear as kernels
from vlm_serve.kernels.dispatch import compiled_kernels
from vlm_serve.models import load_model
from vlm_serve.models.layers import Mlp

BLOCK = 64


class DecodeStep:
    """One token for each of `batch` sequences of `context` tokens, whose caches hold zeros.

    Args:
        checkpoint: a dense one.
        compiled: by compiled kernels, else by torch.
    """

    def __init__(
        self, checkpoint: Path, dtype: torch.dtype, batch: int, context: int, compiled: bool
    ) -> None:
        self._compiled = compiled
        ago = hasattr(kernels, "pack")  # A commit before `Linear`.
        options = {} if ago else {"compiled": compiled}
        self._model = load_model(checkpoint, dtype, "cpu", **options)
        blocks = batch * -(-context // BLOCK)
        self._driver = Driver(self._model, block_size=BLOCK, num_blocks=blocks, num_rows=batch)
        for pool in (self._driver.caches.kv, self._driver.caches.conv):
            pool.zero_()
        self._driver.caches.recurrent.zero_()
        if compiled:
            if ago:
                self._model.use_compiled_kernels()
                self._model.compile_small_steps(self._driver.caches)
            else:
                self._model.compile_steps(self._driver.caches)
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
        with compiled_kernels(self._compiled):
            for layer in self._model._layers:
                mixer, feed_forward = layer.mixer, layer.feed_forward
                assert isinstance(feed_forward, Mlp), "a dense checkpoint"
                for weight in (mixer.in_proj, mixer.out_proj):
                    self._product(weight)
                for weight in (feed_forward.gate, feed_forward.up, feed_forward.down):
                    self._product(weight)
            self._product(self._model._head)

    def _product(self, weight: Any) -> None:
        if hasattr(kernels, "pack"):
            kernels.linear(self._rows(weight.shape[1]), weight)
        else:
            weight(self._rows(weight.depth))

    def _rows(self, depth: int) -> torch.Tensor:
        return torch.zeros(self._batch, depth, dtype=self._model.dtype)

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
