"""Check the kernels of candidates/ on a GPU, each combination in a process of its own, and time it.

    python benchmarks/gpu_candidates.py [--seconds 100] [--rehearse]

A kernel that reads out of bounds ends all later calls of its process, so combinations share none.
Each prints its errors against torch on the CPU and whether six runs had the same bits. Those that
are right are timed afterwards, one by one: a prefill of 4096 tokens by a replayed graph. The
combinations bisect: the scan, the early exit and the inverse, one by one and together, then other
numbers of warps and columns. `--rehearse` takes the interpreter and one small case. Exits with 1 if
any combination fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

COMBINATIONS = (
    "serving",
    "scan",
    "prepare",
    "inverse",
    "scan,prepare",
    "scan,inverse",
    "scan,warps=8",
    "scan,columns=16",
    "scan,columns=64,warps=8",
    "inverse,inverse_warps=2",
    "inverse,key_tile=64",
    "inverse,prepare_warps=8",
    "convolution,span=16",
    "convolution,span=64",
)


def run(combination: str, until: float, *options: str) -> tuple[bool, str]:
    """Return whether the process of a combination ended well, and what it printed."""
    script = Path(__file__).parent / "common" / "gpu_candidate.py"
    root = script.parents[2]
    own = map(str, (root, root / "benchmarks", root / "tests"))
    path = os.pathsep.join(filter(None, (*own, os.environ.get("PYTHONPATH"))))
    try:
        done = subprocess.run(
            [sys.executable, str(script), combination, *options],
            capture_output=True,
            text=True,
            timeout=max(1.0, until - time.monotonic()),
            env={**os.environ, "PYTHONPATH": path},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False, f"{combination}: out of time"
    last = done.stderr.strip().splitlines()[-1:] if done.returncode else []
    lines = [done.stdout.strip(), *(f"{combination}: {line[:200]}" for line in last)]
    return done.returncode == 0, "\n".join(filter(None, lines))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=100, help="for all of them")
    parser.add_argument("--only", nargs="*", default=COMBINATIONS)
    parser.add_argument("--rehearse", action="store_true", help="in the interpreter, on a CPU")
    arguments = parser.parse_args()
    until = time.monotonic() + arguments.seconds
    options = ["--rehearse"] if arguments.rehearse else []
    right = []
    with ThreadPoolExecutor(1 if arguments.rehearse else 8) as pool:
        results = pool.map(lambda each: run(each, until, *options), arguments.only)
        for combination, (fine, text) in zip(arguments.only, results, strict=True):
            print(text, flush=True)
            right += [combination] * fine
    for combination in [] if arguments.rehearse else right:
        print(run(combination, until, "--time")[1], flush=True)
    print(f"{len(right)} of {len(arguments.only)} combinations are right")
    return 0 if len(right) == len(arguments.only) else 1


if __name__ == "__main__":
    sys.exit(main())
