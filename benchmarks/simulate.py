"""Send random traffic through the real scheduler and the real cache, checking every step.

    python benchmarks/simulate.py [--steps 1000000] [--seed 0] [--workers 2] [--speculative]
        [--queued] [--adapters | --weights]

Each seed makes a world of its own (pool sizes, block size, budgets, failure rates) and runs 1 000
steps in it: shared prefixes, growing videos, two tenants, bursts of askers that part at two depths,
several choices, aborts, flushes, steps that raise, preemption. The executor computes identities,
not numbers, and so notices every block, state or embedding that does not belong to the prefix
(tests/symbolic.py). A second one gets every plan through pickle and must answer the same. With
`--queued` that one works behind the host, as a GPU does: plans reach it in the tables of captured
steps, and it computes them when something is read back (tests/queued_symbolic.py). With
`--adapters` most requests have one of some adapters: more than there are slots, loaded and unloaded
under names that change their content (tests/simulated_adapters.py). With `--weights` the weights
change at random moments, also back (tests/simulated_weights.py). The first violation ends the run
with the seed that replays it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import common  # noqa: F401  # First: it adds examples/ and tests/ to the path.
from simulated_adapters import AdapterSimulation
from simulated_weights import WeightSimulation
from simulation import Simulation

STEPS_PER_SEED = 1000
SEEDS_PER_ROUND = 50
COMPARE_EVERY = 10
"""Steps between two comparisons of the whole tree with what a reader knows who follows it."""


KINDS = {"": Simulation, " --adapters": AdapterSimulation, " --weights": WeightSimulation}
"""Worlds by the flag that asks for them."""


def run_seed(speculative: bool, queued: bool, flag: str, seed: int) -> Counter[str]:
    """One world; what happened in it how often."""
    try:
        options = {"speculative": speculative, "queued": queued}
        world = KINDS[flag](seed, compare_every=COMPARE_EVERY, **options)
        return world.run(STEPS_PER_SEED)
    except Exception:
        flags = " --speculative" * speculative + " --queued" * queued + flag
        print(f"seed {seed} violates a promise; replay: --steps 1 --seed {seed}{flags}", flush=True)
        raise


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=1_000_000, help="scheduler steps in all")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count(), help="processes (default: one per core)"
    )
    parser.add_argument(
        "--speculative", action="store_true", help="with drafts, right and wrong ones"
    )
    parser.add_argument(
        "--queued", action="store_true", help="the second executor works behind the host"
    )
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--adapters", action="store_true", help="most requests have one")
    kinds.add_argument("--weights", action="store_true", help="they change at random moments")
    options = parser.parse_args()
    flag = " --adapters" * options.adapters + " --weights" * options.weights
    run = partial(run_seed, options.speculative, options.queued, flag)
    totals: Counter[str] = Counter()
    begin = time.perf_counter()
    seed = options.seed
    with ProcessPoolExecutor(options.workers) as pool:
        while (missing := options.steps - totals["steps"]) > 0:
            # Not all at once: a violation ends the run within a round.
            last = seed + min(SEEDS_PER_ROUND, -(-missing // STEPS_PER_SEED))
            for counts in pool.map(run, range(seed, last)):
                totals.update(counts)
            seed = last
            print(f"{totals['steps']:>9} steps, {time.perf_counter() - begin:.0f} s", flush=True)
    seconds = time.perf_counter() - begin
    print(f"{seed - options.seed} seeds, no violation, {seconds:.0f} s")
    for name, count in sorted(totals.items()):
        print(f"{name:<18}{count:>12}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
