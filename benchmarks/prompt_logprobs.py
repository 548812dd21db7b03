"""Measure what four choices over one long document cost, scored as lm-eval scores them.

    python benchmarks/prompt_logprobs.py [CHECKPOINT] [--tokens 6000] [--rounds 7] [--seconds 240]

Without a checkpoint the 49M-parameter random one is made. Each round has a document of its own. It
is scored with four continuations (`echo`, `logprobs: 1`, `max_tokens: 1`, token ids), one after the
other, beside the cost of one prefill plus the tails: one scoring of the document that nobody has
seen, and three of prompts as short as what the others have to compute. The same four are then
scored under salts of their own, uncached. Every round is printed as it ends, and no further one
begins after --seconds. The run fails if a number differs in any bit between the two, or if the
median of the rounds' ratios is above 1.15.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import common  # noqa: F401  # First: it adds examples/ and tests/ to the path.
import httpx
from common.engine_cases import checkpoint
from server_process import server_process

SERVE = ("--cache-memory", "512MiB", "--max-num-seqs", "4")
CHOICES = 4
MOST = 1.15
VOCABULARY = 200
TIMES = ("one prefill", "three tails", "four choices", "four uncached")


def tokens(count: int, rng: random.Random) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(count)]


def score(client: httpx.Client, prompt: list[int], salt: str = "") -> tuple[float, Any, Any]:
    """Milliseconds, the numbers and the cache report of one continuation."""
    body = {
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "echo": True,
        "seed": 1234,
        "cache_salt": salt,
        "cache_report": True,
    }
    begin = time.perf_counter()
    answer = client.post("/v1/completions", json=body)
    taken = 1000 * (time.perf_counter() - begin)
    answer.raise_for_status()
    fields = answer.json()
    return taken, fields["choices"][0]["logprobs"], fields["cache_report"]


def measure(client: httpx.Client, count: int, number: int) -> dict[str, float]:
    """One round: milliseconds by what they were spent on, and the rows that were reused."""
    rng = random.Random(number)
    document = tokens(count, rng)
    prompts = [[*document, VOCABULARY + choice, *tokens(7, rng)] for choice in range(CHOICES)]
    scored = [score(client, prompt, f"round-{number}") for prompt in prompts]
    uncached = [score(client, prompt, f"{number}-{i}") for i, prompt in enumerate(prompts)]
    for (_, ours, _), (_, theirs, report) in zip(scored, uncached, strict=True):
        assert ours == theirs, "a number differs"
        assert not report["logprobs_reused"], "the reference was not cold"
    tails = [
        score(client, tokens(len(prompt) - report["boundary"], rng), f"tail-{number}-{i}")
        for i, (prompt, (_, _, report)) in enumerate(zip(prompts, scored, strict=True))
        if i
    ]
    return {
        "four choices": sum(taken for taken, _, _ in scored),
        "one prefill": uncached[0][0],
        "three tails": sum(taken for taken, _, _ in tails),
        "four uncached": sum(taken for taken, _, _ in uncached),
        "rows reused": sum(report["logprobs_reused"] for _, _, report in scored),
        "rows": sum(len(prompt) - 1 for prompt in prompts),
    }


def ratio_of(found: dict[str, float]) -> float:
    return found["four choices"] / (found["one prefill"] + found["three tails"])


def measure_all(client: httpx.Client, options: argparse.Namespace) -> list[dict[str, float]]:
    """All rounds for which there is time, one at least; says what came of each."""
    end = time.monotonic() + options.seconds
    measure(client, options.tokens, -1)  # warms up
    rounds: list[dict[str, float]] = []
    for number in range(options.rounds):
        if rounds and time.monotonic() >= end:
            print(f"{options.seconds:g} s have passed: {len(rounds)} of {options.rounds} rounds")
            break
        rounds.append(measure(client, options.tokens, number))
        taken = ", ".join(f"{name} {rounds[-1][name]:.0f} ms" for name in TIMES)
        print(f"round {number}: {taken}: {ratio_of(rounds[-1]):.3f}", flush=True)
    return rounds


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", type=Path, nargs="?", help="default: a random 49M model")
    parser.add_argument("--tokens", type=int, default=6000, help="of the document")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=240.0, help="no round begins after that")
    options = parser.parse_args()
    limit = str(options.tokens + 100)
    with (
        checkpoint(options.checkpoint) as path,
        server_process(str(path), *SERVE, "--max-model-len", limit) as server,
        httpx.Client(base_url=server.url, timeout=600, trust_env=False) as client,
    ):
        rounds = measure_all(client, options)
    for name in TIMES:
        print(f"{name:<14}{statistics.median(each[name] for each in rounds):10.1f} ms")
    reused, rows = (sum(each[name] for each in rounds) for name in ("rows reused", "rows"))
    print(f"rows reused   {reused / len(rounds):10.0f} of {rows / len(rounds):.0f}")
    ratios = [ratio_of(each) for each in rounds]
    ratio = statistics.median(ratios)
    print(f"four choices / (one prefill + three tails)   {ratio:.3f}   (at most {MOST})")
    low, high = min(ratios), max(ratios)
    print(f"rounds between {low:.3f} and {high:.3f}; every number equal to the bit")
    return 0 if ratio <= MOST else 1


if __name__ == "__main__":
    sys.exit(main())
