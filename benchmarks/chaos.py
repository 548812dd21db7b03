"""Break everything around a server while ordinary clients ask it.

    make chaos ARGS="[--seed N] [--minutes 10] [--rounds N] [--round N] [--no-replicas]"

Each round starts a server of another configuration: ranks or replicas, drafts, tiers, an adapter.
Clients whose right answers are known from a calm time ask it, while processes are killed, stopped
and continued, files are cut and replaced, the disk is full, the store is frozen, killed or damaged
and the wall clock jumps. The seed, which comes first, makes the same configurations and deeds; so
`--seed N --round 3 --rounds 1` does the fourth round of a run again. Every deed is logged with its
time; at the end come the deeds by kind, and each promise with whether it was kept. Statuses: 0 all
were kept, 1 one was broken, 3 nothing happened that could have broken one. See docs/chaos.md.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import tempfile
from pathlib import Path

import common  # noqa: F401  # First: it adds examples/ and tests/ to the path.
from chaos import PROMISES, Run, result, shown
from common.machine import describe
from peft_folders import random_adapter

DEMO = Path(__file__).resolve().parents[1] / "vlm_serve" / "demo" / "dense"


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, help="default: a random one, which is printed")
    parser.add_argument("--minutes", type=float, help="then the round comes to its end; default 10")
    parser.add_argument("--rounds", type=int, help="end after so many, whatever time it takes")
    parser.add_argument("--round", type=int, default=0, help="number of the first round")
    parser.add_argument("--no-replicas", action="store_true", help="leave out `deploy`")
    given = parser.parse_args()
    given.seed = secrets.randbelow(10**9) if given.seed is None else given.seed
    if given.minutes is None and given.rounds is None:
        given.minutes = 10.0
    return given


def main() -> int:
    given = options()
    print(f"seed {given.seed}", flush=True)
    print(describe(1))
    for promise, text in PROMISES.items():
        print(f"promised, {promise}: {text}")
    with tempfile.TemporaryDirectory() as folder:
        report = Run(
            given.seed,
            None if given.minutes is None else given.minutes * 60,
            most_rounds=given.rounds,
            first=given.round,
            replicas=not given.no_replicas,
            adapter=random_adapter(DEMO, Path(folder), 1),
            say=lambda line: print(line, flush=True),
        ).run()
    for line in result(report):
        print(line)
    print(f"seed {given.seed}: {'BROKEN' if report.broken else 'kept'}")
    if report.broken:
        return 1
    return 0 if shown(report) else 3


if __name__ == "__main__":
    sys.exit(main())
