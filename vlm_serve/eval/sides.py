"""The two sides of an evaluation: an engine with prefix caching and one without."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace

from vlm_serve.errors import EngineClosedError, VlmServeError
from vlm_serve.eval.comparing import Comparison, compare
from vlm_serve.eval.replies import AnswerRun, BenchmarkPart, Case, Reply, TokenCounts
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Pipeline

Opener = Callable[[bool], AbstractContextManager[Pipeline]]
"""Opens a pipeline with prefix caching (True) or without (False)."""


def opener_of(
    model: str, config: EngineConfig, lora: str | None = None, reasoning_parser: str = "auto"
) -> Opener:
    """Return a function that opens a pipeline over a checkpoint; `lora`: one of its adapters."""
    return lambda caching: Pipeline(
        model,
        replace(config, enable_prefix_caching=caching),
        lora=lora,
        reasoning_parser=reasoning_parser,
    )


def run_sides(
    open_side: Opener, parts: Sequence[BenchmarkPart], concurrency: int = 1
) -> list[Comparison]:
    """Ask both sides all parts, the side with caching first, with one engine at a time.

    Args:
        concurrency: groups of a part to ask concurrently.

    Raises:
        CheckpointError, ConfigError: an engine cannot be built.
        EngineClosedError: an engine has stopped.
    """
    sides: list[list[AnswerRun]] = []
    for caching in (True, False):
        with open_side(caching) as pipe:
            how = "with caching" if caching else "without"
            runs = []
            for part in parts:
                runs.append(run_part(pipe, part, concurrency))
                done = f"{part.name}, {how}: {len(runs[-1].replies)} items"
                print(f"{done} in {runs[-1].seconds:.1f} s", file=sys.stderr, flush=True)
            sides.append(runs)
    return [compare(part.name, part.note, *runs) for part, *runs in zip(parts, *sides, strict=True)]


def run_part(pipe: Pipeline, part: BenchmarkPart, concurrency: int = 1) -> AnswerRun:
    """Ask all questions of a part, starting with an empty cache. Raises like `run_sides`."""
    pipe.engine.flush()
    begin = time.perf_counter()
    with ThreadPoolExecutor(concurrency, thread_name_prefix="vlm-serve-eval") as pool:
        groups = pool.map(lambda group: [_ask(pipe, each) for each in group], part.groups)
        replies = tuple(reply for group in groups for reply in group)
    seconds = time.perf_counter() - begin
    return AnswerRun(replies, seconds, TokenCounts.sum(reply.tokens for reply in replies))


def _ask(pipe: Pipeline, case: Case) -> Reply:
    try:
        return case.ask(pipe)
    except EngineClosedError:  # No later request could succeed.
        raise
    except VlmServeError as error:
        return Reply(case.item, error=error.message)
