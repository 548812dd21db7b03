"""Break everything around a server while ordinary clients ask it.

    python benchmarks/chaos.py [--minutes 10] [--seed 0] [--no-replicas]

Each round starts a server of another configuration: ranks or replicas, drafts, tiers, an adapter.
Clients whose right answers are known from a calm time ask it, while processes are killed, stopped
and continued, files are cut and replaced, the disk is full, the store is frozen, killed or damaged
and the wall clock jumps. Every answer must be right or an error, nothing may take more than four
minutes, and afterwards all must be answered again, with no process, file, thread or memory left
over. The same seed makes the same configurations and deeds. Deeds for which something is missing,
such as a store, are named at the end.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import common  # noqa: F401  # First: it adds examples/ and tests/ to the path.
from chaos import run
from common.machine import describe
from peft_folders import random_adapter

DEMO = Path(__file__).resolve().parents[1] / "vlm_serve" / "demo" / "dense"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-replicas", action="store_true", help="leave out `deploy`")
    options = parser.parse_args()
    print(describe(1))
    with tempfile.TemporaryDirectory() as folder:
        report = run(
            options.seed,
            options.minutes * 60,
            replicas=not options.no_replicas,
            adapter=random_adapter(DEMO, Path(folder), 1),
            say=lambda line: print(line, flush=True),
        )
    print(f"{report.rounds} rounds, {report.right} right answers, errors: {dict(report.errors)}")
    for name, count in sorted(report.deeds.items()):
        print(f"{count:>5} times: {name}")
    for name in sorted(report.skipped):
        print(f"skipped: {name}")
    for text in report.wrong:
        print(f"WRONG: {text}")
    print(f"{len(report.wrong)} wrong")
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
