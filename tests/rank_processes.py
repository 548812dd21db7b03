"""Processes of ranks that many engines share, one after the other: starting one takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vlm_serve.engine.engine import Engine
from vlm_serve.engine.start.build import build
from vlm_serve.engine.steps.ranks.process import RankProcesses
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Pipeline


@contextmanager
def rank_processes(size: int) -> Iterator[RankProcesses]:
    """All ranks but the first of `size`."""
    processes = RankProcesses(size - 1)
    try:
        yield processes
    finally:
        processes.close()


@contextmanager
def on_ranks_of(
    processes: RankProcesses, checkpoint: Path | str, config: EngineConfig, *, poison: bool = True
) -> Iterator[Pipeline]:
    """A pipeline over these processes, which stay. Freed memory is poisoned on every rank."""
    parts = build(str(checkpoint), config, poison=poison, processes=processes)
    pipe = Pipeline.from_engine(Engine(parts))
    try:
        yield pipe
        pipe.engine.check()
    finally:
        pipe.close()
