"""Time calls on a GPU by replaying CUDA graphs of them, with a cold L2 cache before every run."""

from __future__ import annotations

from collections.abc import Callable

import torch

WARMED = 3
FLUSHED = 256 << 20
"""Bytes that are read between runs: several times the largest L2 cache."""


class Timer:
    """Times calls with CUDA events.

    A launch takes the host some 40 microseconds, so an eager call of several kernels leaves the GPU
    idle between them. A replay does not. The cache is flushed by reads: after writes, dirty lines
    would be written back while the call is measured.
    """

    def __init__(self) -> None:
        self._flush = torch.zeros(FLUSHED // 4, device="cuda")

    def median(
        self, call: Callable[[], object], repeats: int = 25, *, captured: bool = True
    ) -> tuple[float, bool]:
        """Return the median seconds of a call, and whether a graph of it was replayed.

        Args:
            call: everything that it reads must stay where it is, besides its own allocations.
            captured: False for a call that sends tables from the host, which a graph cannot repeat.
        """
        graph = capture(call) if captured else warm(call)
        run = call if graph is None else graph.replay
        run()
        times = []
        for _ in range(repeats):
            torch.sum(self._flush)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        return sorted(times)[len(times) // 2], graph is not None


def warm(call: Callable[[], object]) -> None:
    """Run a call until its kernels are compiled and its tables lie on the device."""
    for _ in range(WARMED):
        call()
    torch.cuda.synchronize()


def capture(call: Callable[[], object]) -> torch.cuda.CUDAGraph | None:
    """Return a graph of a call after running it a few times; None if it cannot be captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        warm(call)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError as error:
        torch.cuda.synchronize()
        print(f"not captured: {str(error).splitlines()[0]}", flush=True)
        return None
    return graph
