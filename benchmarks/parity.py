"""Compare the engine with transformers, and hits with cold runs.

    python benchmarks/parity.py [--family qwen3_vl ...] [--pairs 200]
    python benchmarks/parity.py CHECKPOINT

Prints, per case: how many greedy answers of 64 tokens equal transformers' token for token, how many
differ first at a near tie of the reference (top-2 logit gap at most 1e-4), and the largest logit
error up to there. Then, unless `--pairs 0` leaves it out, the share of hits whose first logits have
the very bits of a cold run, with and without `deterministic`, and what that option costs. Without a
checkpoint small random ones are made, in several shapes of each family that is named (of all, if
none is); hits are then compared with cold runs in the first shape of each. Needs torchvision (`make
test` installs it): it is part of the reference. Exits with 1 if an answer is wrong.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import common  # noqa: F401  # First: it adds examples/ and tests/ to the path.
from exactness import random_pairs
from families import FAMILIES
from make_checkpoint import make_checkpoint
from parity import Comparison, check, greedy
from parity_cases import conversations, photograph, random_ids, user

from vlm_serve import EngineConfig, Pipeline
from vlm_serve.models import read_spec

TOKENS = 64
LOGIT_ERROR = 1e-4
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 257, 1024, 3000)


def config(**options: Any) -> EngineConfig:
    settings: dict[str, Any] = {"dtype": "float32", "block_size": 16, "cache_memory": "256MiB"}
    return EngineConfig(**(settings | options))


def small_pool(pipe: Pipeline, blocks: int, snapshots: int) -> EngineConfig:
    memory = pipe.engine.memory
    total = blocks * memory.block_bytes + snapshots * memory.snapshot_bytes
    return config(cache_memory=total, prefix_cache_state_budget=snapshots)


def cases(checkpoint: Path, pipe: Pipeline) -> Iterator[tuple[str, list[Comparison]]]:
    """Every case on fresh caches, hits right after what makes them hits."""
    spec = read_spec(checkpoint)
    media = spec.vision is not None
    known = conversations(media=media, videos=bool(spec.family.video_pad))

    def run(*batches: Sequence[Any], on: Pipeline = pipe) -> list[Comparison]:
        on.engine.flush()
        return [one for batch in batches for one in check(on, checkpoint, list(batch), TOKENS)[1]]

    for name, conversation in known.items():
        yield f"{name}, cold and again", run([conversation], [conversation])
    yield "8 mixed requests at once", run([*list(known.values())[:7], random_ids(77, 1)])
    yield "prompts of 1 ... 3 000 tokens", run(*([random_ids(n, n)] for n in LENGTHS))
    pictures = photograph("coffee.png"), photograph("rocket.jpg")
    questions = ("What is this?", "How hot might it be?", "Who made it?")
    if media:
        yield "same image, other questions", run(*([[user(pictures[0], q)]] for q in questions))
        yield "other image, same text", run(*([[user(p, questions[0])]] for p in pictures))
    shared = random_ids(300, 5)
    junction = [[shared + random_ids(40, 6 + i)] for i in range(3)]
    with Pipeline(checkpoint, config(prefix_cache_state_interval=1000)) as sparse:
        yield "junction, three requests", run(*junction, on=sparse)
    with Pipeline(checkpoint, small_pool(pipe, 110, 4)) as crowded:
        names = known.keys() & {"one image", "several turns", "text"} if media else known.keys()
        yield "after eviction", run(*([known[name]] for name in sorted(names) * 2), on=crowded)
    with Pipeline(checkpoint, small_pool(pipe, 36, 4)) as crowded:
        yield "after preemption", run([random_ids(120, 20 + i) for i in range(4)], on=crowded)
        assert crowded.engine.stats()["num_preemptions"] > 0
    with Pipeline(checkpoint, config(max_num_batched_tokens=64)) as slow:
        longest = known["one image" if media else "words"]
        yield "budget of 64 tokens", run([longest, random_ids(500, 3)], on=slow)


def print_cases(checkpoint: Path) -> int:
    """Returns how many answers are wrong."""
    failures = 0
    print(f"{'case':<32}{'answers':>8}{'equal':>7}{'near ties':>11}{'wrong':>7}{'logit error':>13}")
    with Pipeline(checkpoint, config()) as pipe:
        for name, results in cases(checkpoint, pipe):
            equal = sum(one.equal for one in results)
            ties = sum(one.near_tie for one in results)
            error = max(one.logit_error for one in results)
            wrong = len(results) - equal - ties
            failures += wrong + (error > LOGIT_ERROR)
            print(f"{name:<32}{len(results):>8}{equal:>7}{ties:>11}{wrong:>7}{error:>13.1e}")
            pipe.engine.check()
    return failures


def print_exactness(checkpoint: Path, count: int) -> None:
    for dtype in ("float32", "bfloat16"):
        for deterministic in (True, False):
            with Pipeline(checkpoint, config(dtype=dtype, deterministic=deterministic)) as pipe:
                pairs = list(random_pairs(pipe, count, seed=3))
            bits = sum(pair.same_bits for pair in pairs)
            tokens = sum(pair.same_tokens for pair in pairs)
            print(
                f"hit vs cold, {dtype}, deterministic={deterministic}: {bits} of {len(pairs)} with "
                f"the same bits, {tokens} with the same tokens"
            )
        print(f"price of deterministic, {dtype}: {price(checkpoint, dtype):.2f}x the prefill time")


def price(checkpoint: Path, dtype: str) -> float:
    """Median of paired ratios of the time of a cold 2 000-token prefill."""
    with (
        Pipeline(checkpoint, config(dtype=dtype, deterministic=True)) as exact,
        Pipeline(checkpoint, config(dtype=dtype)) as plain,
    ):
        ratios = []
        for seed in range(11):
            times = [_prefill_seconds(pipe, seed) for pipe in (exact, plain)]
            ratios.append(times[0] / times[1])
    return statistics.median(ratios[1:])


def _prefill_seconds(pipe: Pipeline, seed: int) -> float:
    begin = time.perf_counter()
    pipe.generate(random_ids(2000, 1000 + seed), greedy(1))
    return time.perf_counter() - begin


def main() -> int:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", nargs="?", help="default: small random ones")
    parser.add_argument("--family", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--pairs", type=int, default=200, help="hits to compare with cold runs")
    options = parser.parse_args()
    if options.checkpoint:
        return compare(options.checkpoint, Path(options.checkpoint), options.pairs)
    failures = 0
    for family in options.family:
        for index, (name, spec) in enumerate(FAMILIES[family].items()):
            with tempfile.TemporaryDirectory() as folder:
                path, pairs = make_checkpoint(folder, spec), 0 if index else options.pairs
                failures += compare(f"{family}: {name}", path, pairs)
    return min(failures, 1)


def compare(name: str, checkpoint: Path, pairs: int) -> int:
    """Prints everything about one checkpoint; returns how many answers are wrong."""
    print(f"\n{name}, float32", flush=True)
    failures = print_cases(checkpoint)
    if pairs:
        print_exactness(checkpoint, pairs)
    return failures


if __name__ == "__main__":
    sys.exit(main())
