"""Show what the memory of a server is after minutes of chaos.

    python benchmarks/memory.py [--minutes 10] [--seed 0]

Eight clients ask requests that are all different: pictures, grammars, adapters, stored responses,
log-probabilities. Processes are killed meanwhile, files damaged, the disk is full. The server has
small caches and tiers, which all fill up. The table compares it with itself at idle after its
warm-up: what each kind of `held_bytes` has grown by, what the C library has free, and what has no
name. The run fails if that is more than a twentieth of the resident memory. Needs Linux; without
glibc what is free is unknown, and counts as nothing.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import common  # noqa: F401  # First: it adds examples/ and tests/ to the path.
from common.machine import describe
from memory_chaos import run
from memory_ledger import table
from peft_folders import random_adapter

DEMO = Path(__file__).resolve().parents[1] / "vlm_serve" / "demo" / "dense"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(describe(1))
    until = 0.0

    def enough(_: object) -> bool:
        nonlocal until
        until = until or time.monotonic() + options.minutes * 60
        return time.monotonic() > until

    with tempfile.TemporaryDirectory() as folder:
        adapters = [random_adapter(DEMO, Path(folder, f"{seed}"), seed) for seed in range(3)]
        outcome = run(options.seed, adapters, enough, lambda line: print(line, flush=True))
    if outcome is None:
        print("this system does not say how much memory a process has")
        return 1
    print(f"{outcome.load.answered} answers, errors: {dict(outcome.load.errors)}")
    for name, count in sorted(outcome.deeds.items()):
        print(f"{count:>5} times: {name}")
    for line in table(outcome.idle, outcome.after):
        print(line)
    explained = outcome.after.explained(outcome.idle)
    print("explained" if explained else "NOT EXPLAINED")
    return 0 if explained else 1


if __name__ == "__main__":
    sys.exit(main())
