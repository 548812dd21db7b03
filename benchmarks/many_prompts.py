"""Show what `chat_many` holds while it answers many conversations, and whether it finds all.

    python benchmarks/many_prompts.py [--counts 1000 10000] [--tokens 2]

For each count a process of its own has the demo answer so many different short questions, every
hundredth with a picture that does not exist, and takes the answers one by one. The run fails if one
is missing, if an index is wrong, or if the peak of resident memory exceeds that of the first count
by more than a tenth.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from collections.abc import Iterator

import common  # noqa: F401  # First: it adds examples/ and tests/ to the path.
from common.machine import describe

from vlm_serve import EngineConfig, Pipeline, SamplingParams
from vlm_serve.errors import MediaFetchError

MOST = 1.1
"""Peak of a count, as a multiple of the first one's."""


def questions(count: int) -> Iterator[str | tuple[str, str]]:
    """Yield questions; those of index 99, 199, ... are bad."""
    for index in range(count):
        said = f"What is {index} and {index + 1}?"
        yield (said, "nosuch.png") if index % 100 == 99 else said


def answer(count: int, tokens: int) -> None:
    """Answer so many questions and print what came, and the process's peak of memory."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens)
    config = EngineConfig(cache_memory="64MiB")
    answered = failed = misplaced = 0
    with Pipeline("demo", config) as pipe:
        ended = pipe.chat_many(questions(count), params, as_completed=True, progress=True)
        for index, result in ended:
            bad = isinstance(result, MediaFetchError)
            answered, failed = answered + (not bad), failed + bad
            misplaced += bad != (index % 100 == 99)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps([answered, failed, misplaced, peak]))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--counts", type=int, nargs="+", default=[1000, 10000])
    parser.add_argument("--tokens", type=int, default=2, help="of an answer")
    parser.add_argument("--run", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run is not None:
        answer(options.run, options.tokens)
        return 0
    print(describe(1))
    print("| prompts | answers | errors | wrong index | peak, MiB | times the first |")
    print("|---|---|---|---|---|---|")
    first, right = 0, True
    for count in options.counts:
        command = [sys.executable, __file__, "--run", str(count), "--tokens", str(options.tokens)]
        said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        answered, failed, misplaced, peak = json.loads(said.splitlines()[-1])
        first = first or peak
        ratio = peak / first
        right &= (answered, failed) == (count - count // 100, count // 100) and not misplaced
        right &= ratio <= MOST
        print(
            f"| {count} | {answered} | {failed} | {misplaced} | {peak >> 10} | {ratio:.3f} |",
            flush=True,
        )
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
