"""Measure what a target for the time of a step costs a long prompt and gives a short one.

    python benchmarks/pacing.py [CHECKPOINT] [--tokens 4000] [--rounds 9]

Two engines in one process, with `step_time_target` as it is by default and without one, take turns.
Alone: one prompt that nobody has seen and one token. Beside: the same, and a short question that
comes when it has begun; milliseconds until the question's first token. Prints medians and the
median of the pairs' ratios; fails if the lone prompt takes more than 1.03 times as long.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path
from queue import SimpleQueue

import common  # noqa: F401  # First: it adds examples/ and tests/ to the path.
from common.engine_cases import checkpoint

from vlm_serve.engine.engine import Engine
from vlm_serve.engine.requests.outputs import Delta
from vlm_serve.options.config import EngineConfig
from vlm_serve.sampling_params import SamplingParams

MOST = 1.03
SHORT = 24
VOCABULARY = 200
KINDS = ("with", "without")


def config(target: float | None, length: int) -> EngineConfig:
    options = {} if target is None else {"step_time_target": target}
    return EngineConfig(
        device="cpu", cache_memory="512MiB", max_model_len=length + 64, threads=1, **options
    )


def submit(engine: Engine, count: int, rng: random.Random) -> SimpleQueue[float]:
    """A prompt of its own; the queue gets the time of its only token."""
    prompt = engine.preprocessor.prepare_tokens([rng.randrange(VOCABULARY) for _ in range(count)])
    done: SimpleQueue[float] = SimpleQueue()

    def on_delta(delta: Delta) -> None:
        assert delta.error is None, delta.error
        done.put(time.perf_counter())

    engine.submit(prompt, SamplingParams(max_tokens=1, temperature=0.0), on_delta)
    return done


def alone(engine: Engine, count: int, rng: random.Random) -> float:
    """Milliseconds of one prompt."""
    begin = time.perf_counter()
    return 1000 * (submit(engine, count, rng).get(timeout=300) - begin)


def beside(engine: Engine, count: int, rng: random.Random, share: float) -> float:
    """Milliseconds of a short prompt that comes a while after a long one, which takes some."""
    long = submit(engine, count, rng)
    time.sleep(share)
    begin = time.perf_counter()
    taken = 1000 * (submit(engine, SHORT, rng).get(timeout=300) - begin)
    long.get(timeout=300)
    return taken


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", type=Path, nargs="?", help="default: a random 49M model")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    rng = random.Random(0)
    found: dict[str, dict[str, list[float]]] = {
        case: {kind: [] for kind in KINDS} for case in ("alone", "beside")
    }
    with checkpoint(options.checkpoint) as path:
        engines = {
            kind: Engine.from_checkpoint(str(path), config(target, options.tokens))
            for kind, target in zip(KINDS, (None, 0.0), strict=True)
        }
        for engine in engines.values():  # the pace is learnt
            for _ in range(2):
                alone(engine, options.tokens, rng)
        for number in range(options.rounds):
            for kind in KINDS[:: 1 if number % 2 else -1]:
                engine = engines[kind]
                found["alone"][kind].append(alone(engine, options.tokens, rng))
                share = rng.uniform(0.1, 0.6) * found["alone"][kind][-1] / 1000
                found["beside"][kind].append(beside(engine, options.tokens, rng, share))
        for engine in engines.values():
            engine.close()
    ratios = {}
    for case, times in found.items():
        pairs = zip(times["with"], times["without"], strict=True)
        ratios[case] = statistics.median(ours / theirs for ours, theirs in pairs)
        named = ", ".join(f"{kind} {statistics.median(times[kind]):.1f} ms" for kind in KINDS)
        print(f"{case:<8}{named}; ratio {ratios[case]:.3f}")
    return 0 if ratios["alone"] <= MOST else 1


if __name__ == "__main__":
    sys.exit(main())
