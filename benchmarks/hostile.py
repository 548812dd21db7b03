"""Send thousands of hostile requests beside ordinary clients to one server process.

    python benchmarks/hostile.py [--cases 5000] [--first 0] [--only SEED ...] [--model demo]
        [--busy] [--serve "--speculative suffix --quantization int8"]
    python benchmarks/hostile.py --groups chains grammars pins readers --cases 400 --runs 5
    python benchmarks/hostile.py --groups model --cases 200 --runs 5

Every case is made from its seed alone: wrong values, broken JSON, bombs, damaged media, odd HTTP,
clients that leave, trickle or do not read. Eight hostile connections at a time, from a process that
gets what nobody else wants of the processors; sixteen ordinary clients ask beside them, and before
that alone. The run fails if anything is answered with a 5xx or not at all, if /health takes more
than 100 ms in 99 % of the cases or ever more than 1 s, if the ordinary time to first token is more
than 1.5 times (median) or 3 times (99 %) what it was, if resident memory leaves its bound
(docs/limits.md), or if it does not come back to within 25 % or 128 MiB, not counting what caches
keep within their own bounds. Keys of three tenants are used: the ordinary clients', and two of
hostile ones, which also take as much as they can of what keys share. With `--groups` one hostile
tenant does nothing but that; with `model` it only uses the model, whose fair half the ordinary ones
then have: at most 2.2 times the median. `--runs` measures so often, each time with a new server,
and reports all. On a machine with other work `--busy` gives hostile clients niceness 15 instead of
only what nobody else wants, which is nothing there; times say little then. At the end it says in
which stages ordinary questions waited, and which hostile cases were open meanwhile. `--only` runs
single seeds and says what came of them.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import common  # noqa: F401  # First: it adds examples/ and tests/ to the path.
from common.hostile_beside import beside_lines
from common.hostile_stages import stage_lines
from hostile_cases import make_case
from hostile_client import run_case
from hostile_shares import GROUPS, KEYS_FILE, OPERATOR
from hostile_traffic import (
    KINDS,
    Result,
    came_back,
    describe,
    measure,
    memory_bound,
    percentile,
)
from server_process import ServerProcess, server_process

SERVE = (
    *("--cache-memory", "64MiB", "--threads", "1", "--max-num-seqs", "16"),
    *("--max-body-size", "16MiB", "--max-request-memory", "256MiB"),
    *("--response-store", "16MiB"),
)
HEALTH_MS, HEALTH_MAX_MS = 100.0, 1000.0
MEDIAN_RATIO, LATE_RATIO, HALF_RATIO = 1.5, 3.0, 2.2
MIB = 1 << 20
MOST_NAMED = 200


def ratio_bars(groups: Sequence[str]) -> Iterator[tuple[str, float, float]]:
    """Name, share of the questions, and most times what it was alone."""
    if list(groups) == ["model"]:
        yield "median", 0.5, HALF_RATIO
    else:
        yield "median", 0.5, MEDIAN_RATIO
        yield "p99", 0.99, LATE_RATIO


def bars(
    result: Result, bound: int, errors: list[str], groups: Sequence[str]
) -> Iterator[tuple[bool, str]]:
    """What was to be reached, each with whether it was."""
    quiet, hostile = result.quiet, result.hostile
    wrong = sum(bool(outcome.wrong) for outcome in result.outcomes)
    yield not wrong, f"cases that went wrong: {wrong}"
    yield not hostile.wrong, f"ordinary questions and probes that failed: {len(hostile.wrong)}"
    yield not errors, f"errors in the server's log: {len(errors)}"
    for name, share, most in (("p99", 0.99, HEALTH_MS), ("max", 1.0, HEALTH_MAX_MS)):
        taken, alone = percentile(hostile.health, share), percentile(quiet.health, share)
        yield taken <= most, f"/health {name} {taken:.0f} ms ({alone:.0f} ms undisturbed)"
    for name, share, most in ratio_bars(groups):
        taken, alone = (percentile(each.first_tokens(), share) for each in (hostile, quiet))
        ratio = taken / alone if alone else float("inf")
        text = f"time to first token, {name} {taken:.0f} ms: {ratio:.2f} x {alone:.0f} ms"
        yield ratio <= most, text
    most_mib, bound_mib = hostile.most_memory // MIB, bound // MIB
    yield most_mib <= bound_mib, f"memory at most {most_mib} MiB of {bound_mib} MiB"
    told = (
        f"{each.resident // MIB} MiB, of that {each.caches // MIB} MiB caches"
        for each in (result.after, result.before)
    )
    yield came_back(result.before, result.after), "memory afterwards {}; {} before".format(*told)


def report(result: Result, bound: int, errors: list[str], groups: Sequence[str]) -> bool:
    """Prints everything; whether every bar was kept."""
    wrong = [outcome for outcome in result.outcomes if outcome.wrong]
    statuses = sorted(Counter(outcome.status for outcome in result.outcomes).items())
    print(f"{len(result.outcomes)} cases in {result.seconds:.0f} s; by status: {dict(statuses)}")
    found = list(bars(result, bound, errors, groups))
    for kept, text in found:
        print(f"{'kept  ' if kept else 'BROKEN'}  {text}")
    late = percentile(result.hostile.own_lag, 0.99)
    print(f"        (the measuring process itself was late by {late:.0f} ms in 1 %)")
    for kind in KINDS:
        times = (each.first_tokens(kind) for each in (result.quiet, result.hostile))
        named = (f"{percentile(each, 0.5):.0f} / {percentile(each, 0.99):.0f} ms" for each in times)
        print(f"        {kind}: median / p99 {', beside hostile ones '.join(named)}")
    kinds = Counter((outcome.kind, outcome.conduct) for outcome in wrong)
    for (kind, conduct), count in kinds.most_common():
        print(f"{count:>5} wrong: {kind}, {conduct}")
    for outcome in wrong[:MOST_NAMED]:
        print("  --only", describe(outcome).removeprefix("seed "))
    for text, count in Counter(result.hostile.wrong).most_common(MOST_NAMED):
        print(f"{count:>5} times: {text}")
    for text, count in Counter(errors).most_common(MOST_NAMED):
        print(f"{count:>5} times in the log: {text}")
    slow = sorted(result.outcomes, key=lambda outcome: -outcome.seconds)[:10]
    print("slowest:", *(describe(outcome) for outcome in slow), sep="\n  ")
    return all(kept for kept, _ in found)


def logged_errors(log: Path) -> list[str]:
    """What ended the tracebacks in the server's log, or the lines of errors without one."""
    found, inside = [], False
    for line in log.read_text(errors="replace").splitlines():
        if line.startswith("Traceback (most recent call last)"):
            inside = True
        elif inside and line and not line.startswith(" "):
            found.append(line[:200])
            inside = False
    return found


async def single(server: ServerProcess, seeds: list[int]) -> bool:
    host, port = server.url.removeprefix("http://").split(":")
    fine = True
    for seed in seeds:
        case = make_case(seed)
        print(f"{case.head[:200]!r} + {case.body[:300]!r} ({len(case.body)} bytes)")
        outcome = await run_case(host, int(port), case)
        print(describe(outcome))
        fine = fine and not outcome.wrong
    return fine


def run(options: argparse.Namespace, number: int) -> tuple[bool, Result]:
    """One measurement with a server of its own."""
    log_path = Path(options.log) if options.runs == 1 else Path(f"{options.log}.{number}")
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as keys, log_path.open("w") as log:
        keys.write(KEYS_FILE)
        keys.flush()
        arguments = (*SERVE, *options.serve.split())
        known = ("--api-key", OPERATOR, "--tenant-keys", keys.name)
        with server_process(options.model, *arguments, *known, log=log) as server:
            work = measure(
                server,
                first=options.first + number * options.cases,
                count=options.cases,
                quiet_seconds=options.quiet_seconds,
                groups=options.groups,
                idle=not options.busy,
                verbose=True,
            )
            result = asyncio.run(work)
            bound = result.before.resident + memory_bound(server)
    fine = report(result, bound, logged_errors(log_path), options.groups)
    print(*stage_lines(log_path), sep="\n")
    print(*beside_lines(result.hostile.asked, result.outcomes), sep="\n")
    return fine, result


def ratios(results: Sequence[Result]) -> Iterator[str]:
    """A line for each run: how much longer ordinary clients waited for their first token."""
    for number, result in enumerate(results):
        words = []
        for name, share in (("median", 0.5), ("p99", 0.99)):
            both = (result.hostile.first_tokens(), result.quiet.first_tokens())
            taken, alone = (percentile(each, share) for each in both)
            words.append(f"{name} {taken / alone if alone else 0:.2f} x {alone:.0f} ms")
        yield f"run {number}: {', '.join(words)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first case")
    parser.add_argument("--only", type=int, nargs="+", help="seeds to run alone, one after another")
    parser.add_argument("--serve", default="", help="further options of the server, in one word")
    parser.add_argument("--quiet-seconds", type=float, default=30)
    parser.add_argument("--groups", nargs="+", default=(), choices=GROUPS)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--busy", action="store_true", help="hostile clients at niceness 15")
    parser.add_argument("--log", default="hostile.log", help="file for what the server says")
    options = parser.parse_args()
    if options.only:
        with (
            Path(options.log).open("w") as log,
            server_process(options.model, *SERVE, *options.serve.split(), log=log) as server,
        ):
            return 0 if asyncio.run(single(server, options.only)) else 1
    done = [run(options, number) for number in range(options.runs)]
    print(*ratios([result for _, result in done]), sep="\n")
    return 0 if all(fine for fine, _ in done) else 1


if __name__ == "__main__":
    sys.exit(main())
