"""Break off random requests for all APIs anywhere and resume them on another replica.

    python benchmarks/resume.py [--requests 1000] [--seed 0] [--speculative suffix] [--experts 8]

Two engines with small pools, several requests at once, so that caches are cold and warm, replays
meet decodes and some of them are preempted. Every answer, what was delivered and what followed,
must have the bytes of an undisturbed one; printed is how many have.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import common  # noqa: F401  # First: it adds examples/ and tests/ to the path.
from attempts import Replica, difference, random_request, undisturbed
from checkpoint_spec import CheckpointSpec
from guesses import draft_freely
from make_checkpoint import make_checkpoint

from vlm_serve import EngineConfig
from vlm_serve.engine.engine import Engine

AT_ONCE = 8


async def run(replicas: list[Replica], options: argparse.Namespace) -> Counter[str]:
    """Counts what happened."""
    counts: Counter[str] = Counter()
    numbers = iter(range(options.requests))

    async def worker() -> None:
        for number in numbers:
            seed = options.seed * 10**6 + number
            rng = random.Random(seed)
            first, second = rng.sample(replicas, 2)
            case = await undisturbed(first, random_request(rng), seed)
            drafts = options.speculative != "off"
            wrong = await difference(case, second, rng, drafts=drafts)
            counts["requests"] += 1
            counts["equal"] += wrong is None
            counts[case.asked.path] += 1
            if wrong is not None:
                print(f"seed {seed}: {case.asked}: {wrong}")

    await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
    for replica in replicas:
        stats = replica.engine.stats()
        counts["preemptions"] += stats["num_preemptions"]
        for name, count in stats["replays"].items():
            counts[f"replays: {name}"] += count
        replica.engine.check()
        await replica.service.close()
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", nargs="?", help="default: a small random one")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--speculative", default="off")
    parser.add_argument("--experts", type=int, default=0, help="of the random checkpoint")
    parser.add_argument("--cache-memory", default="1536KiB")
    options = parser.parse_args()
    config: dict[str, Any] = {
        "dtype": "float32",
        "block_size": 16,
        "threads": 1,
        "max_num_seqs": 6,
        "max_model_len": 768,
        "cache_memory": options.cache_memory,
        "speculative": options.speculative,
    }
    with tempfile.TemporaryDirectory() as name:
        spec = CheckpointSpec(num_experts=options.experts)
        checkpoint = options.checkpoint or make_checkpoint(Path(name) / "checkpoint", spec)
        engines = [
            Engine.from_checkpoint(str(checkpoint), EngineConfig(**config)) for _ in range(2)
        ]
        if options.speculative != "off":
            for engine in engines:
                draft_freely(engine)
        begin = time.monotonic()
        counts = asyncio.run(run([Replica(engine) for engine in engines], options))
        counts["seconds"] = int(time.monotonic() - begin)
    for what, count in counts.items():
        print(f"{what:<26}{count:>9}")


if __name__ == "__main__":
    main()
