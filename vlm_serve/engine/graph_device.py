"""Device interface of captured steps: graphs, and copies that are queued beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

Step = Callable[[], None]
Size = TypeVar("Size")
Captured = TypeVar("Captured")

_WARM_UP = 2
"""Runs before a capture. In the first one, kernels are compiled and libraries allocate
workspaces."""
CAPTURE_ERRORS = "thread_local"
"""Only calls of the capturing thread may invalidate a capture. "global" would forbid allocations of
another engine that serves meanwhile."""


class GraphDevice(Protocol):
    """Runs steps repeatedly, from fixed inputs to fixed outputs."""

    def warm_up(self, step: Step) -> None:
        """Run a step once, under the conditions of a capture."""

    def capture(self, step: Step) -> Step:
        """Return a step that repeats this one on the current content of its inputs."""

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        """Return uint8 host memory from which `send` copies without waiting."""

    def send(self, target: torch.Tensor, source: torch.Tensor) -> Step:
        """Queue a copy to the device. Return a function that waits until the source has been
        read."""


def largest_first(sizes: Sequence[Size], capture: Callable[[Size], Captured]) -> list[Captured]:
    """Capture steps of all sizes, given in ascending order, and return them in this order. The
    largest is captured first: the others reuse its memory."""
    return [capture(size) for size in reversed(sizes)][::-1]


class CudaGraphs:
    """Captures CUDA graphs with shared memory: only one of them runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, step: Step) -> None:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)

    def capture(self, step: Step) -> Step:
        for _ in range(_WARM_UP):
            self.warm_up(step)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode=CAPTURE_ERRORS):
            step()
        return graph.replay

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def send(self, target: torch.Tensor, source: torch.Tensor) -> Step:
        target.copy_(source, non_blocking=True)
        read = torch.cuda.Event()  # type: ignore[no-untyped-call]
        read.record()
        return read.synchronize
