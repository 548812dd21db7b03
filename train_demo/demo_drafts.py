"""Measurement of drafts on a checkpoint: acceptance rate and speed-up."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

from demo_cases import image_cases
from demo_schemas import schema_cases

from vlm_serve import Pipeline, SamplingParams
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Output
from vlm_serve.structured_outputs import StructuredOutputs

DRAFTS = 4
LEAST_TOKENS = 8
"""Shorter answers say nothing about speed."""

Asked = tuple[list[dict[str, Any]], SamplingParams]


def kinds(checkpoint: Path) -> list[str]:
    """Return the sources of drafts for a checkpoint, as the option names them."""
    config = json.loads((checkpoint / "config.json").read_text())
    layers = config.get("text_config", config).get("mtp_num_hidden_layers")
    return ["suffix", "mtp", "mtp,suffix"] if layers == 1 else ["suffix"]


def requests(count: int, seed: int) -> Iterator[Asked]:
    """Return questions about pictures, and half as many for JSON."""
    greedy = SamplingParams(temperature=0.0, max_tokens=96)
    for case in islice(image_cases(count, seed), count):
        yield case.messages, greedy
    for wanted in schema_cases(count // 2, seed):
        form = StructuredOutputs(json=wanted.schema)
        yield (
            wanted.messages,
            SamplingParams(temperature=0.0, max_tokens=96, structured_outputs=form),
        )


def timed(pipe: Pipeline, asked: Asked) -> tuple[Output, float]:
    """Return an answer and its decoding time: the seconds with a cached prompt."""
    messages, params = asked
    pipe.chat(messages, SamplingParams(temperature=0.0, max_tokens=1))
    begin = time.perf_counter()
    output = pipe.chat(messages, params)
    return output, time.perf_counter() - begin


def print_drafts(checkpoint: Path, count: int, seed: int) -> None:
    """Ask everything with and without drafts, alternating, one request at a time."""
    asked = list(requests(count, seed))
    for kind in kinds(checkpoint):
        off, config = (
            EngineConfig(speculative=each, speculative_tokens=DRAFTS) for each in ("off", kind)
        )
        ratios, different = [], 0
        with Pipeline(checkpoint, off) as plain, Pipeline(checkpoint, config) as drafting:
            for each in chain(asked[:4], asked):  # The first requests are warm-up.
                (without, slow), (output, fast) = timed(plain, each), timed(drafting, each)
                different += output.token_ids != without.token_ids
                if len(output.token_ids) >= LEAST_TOKENS:
                    ratios.append(slow / fast)
            counts = drafting.engine.stats()["drafts"]
        _print_counts(kind, counts, statistics.median(ratios), different)


def _print_counts(kind: str, counts: dict[str, Any], speed: float, different: int) -> None:
    held = ", ".join(str(each) for each in counts["accepted_per_position"])
    slices = counts["drafts"]
    length = 1 + counts["accepted_tokens"] / max(1, slices)
    print(
        f"  drafts by {kind}: {counts['draft_tokens']} in {slices} steps; held by position: {held}"
    )
    verdict = "helps" if speed > 1.02 else "does not help"
    print(f"    {length:.2f} tokens a step, {speed:.2f} times as fast: {verdict}")
    print(f"    {different} answers differ from those without", flush=True)
