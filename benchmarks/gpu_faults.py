"""Check what faults of a GPU leave behind: an error that stays ends the engine, memory that ran out
does not.

    python benchmarks/gpu_faults.py [--fault memory assertion]

Each fault runs in a process of its own, since the first one leaves no usable GPU in its process.
Exits with 1 if an engine behaves otherwise.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from typing import Any

import common  # noqa: F401  # First: it adds examples/ and tests/ to the path.
import torch
from parity import executor_of

from vlm_serve import EngineConfig, Pipeline, SamplingParams
from vlm_serve.errors import EngineError

FAULTS = ("memory", "assertion")
PROMPT = list(range(3, 60))
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def memory(pipe: Pipeline) -> str:
    """Let one step ask for more memory than there is; return what is wrong."""
    expected, compute, left = pipe.generate(PROMPT, GREEDY).token_ids, _steps(pipe), [1]

    def greedy_step(plan: Any) -> Any:
        if left:
            left.pop()
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        return compute(plan)

    executor_of(pipe.engine)._compute = greedy_step  # type: ignore[method-assign]
    again = pipe.generate([1, 2, *PROMPT], GREEDY)
    if left or len(again.token_ids) != GREEDY.max_tokens:
        return f"the request was not tried again: {again}"
    same = pipe.generate(PROMPT, GREEDY).token_ids == expected
    return "" if same else "another answer than before"


def assertion(pipe: Pipeline) -> str:
    """Let a step fail on the device itself; return what is wrong."""
    pipe.generate(PROMPT, GREEDY)
    compute = _steps(pipe)

    def broken_step(plan: Any) -> Any:
        torch._assert_async(torch.zeros((), device="cuda"))
        return compute(plan)

    executor_of(pipe.engine)._compute = broken_step  # type: ignore[method-assign]
    try:
        answer = pipe.generate([1, 2, *PROMPT], GREEDY)
    except EngineError as error:
        if "can compute nothing more" not in str(error):
            return f"another error: {error}"
        return "the engine goes on" if pipe.engine.alive else ""
    return f"it answered: {answer}"


def _steps(pipe: Pipeline) -> Any:
    return executor_of(pipe.engine)._compute


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fault", nargs="+", choices=FAULTS, default=FAULTS)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("No GPU found: nothing was checked. Run this script as it is on a machine with one.")
        return 0
    if len(given.fault) > 1:
        own = [sys.executable, __file__, "--fault"]
        return max(subprocess.run([*own, fault], check=False).returncode for fault in given.fault)
    (fault,) = given.fault
    with Pipeline("demo", EngineConfig(cache_memory="64MiB", speculative="off")) as pipe:
        wrong = {"memory": memory, "assertion": assertion}[fault](pipe)
    print(f"- {fault}: {wrong or 'right'}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
