"""Compare policies of snapshots: how much of what prompts share each of them reuses.

    python benchmarks/reuse.py --trace FILE --rows 64 256 1024 [--policies all] [--requests 1500]
    python benchmarks/reuse.py --trace FILE --memory 16GiB 64GiB [--host 64GiB]
    python benchmarks/reuse.py [--workload NAME ...] [--rows 16 64 256] [--seed 52]

The real scheduler and the real cache run without a model: eight seats, 2 048 tokens a step, blocks
of 64 tokens, regular snapshots 1 024 tokens apart, junctions from four blocks on. 100 % is the
tokens up to the deepest cut point that each prompt shares with any prompt or answer before it, as
if every cut had its snapshot and nothing were ever evicted.

With a trace (`common/reuse_trace.py`), prompts are its whole blocks of 512 tokens and one token of
their own, and answers three fixed tokens. Without, the workloads of `common/reuse_workloads.py`
run, and traffic of coding agents after published statistics (`common/reuse_agents.py`).

With `--rows`, KV is never short. With `--memory`, a model of 4B has so much memory, split as the
engine splits it, and blocks run out too; `--host` adds a tier of host memory.

Policies (`common/reuse_policies.py`): default; fixed, places at the interval alone; none, no
interval; lru, ends of prompts and junctions, least recently used ones evicted; thin, the interval,
the path of the least recently used one thinned out; marconi, as lru with FLOP-aware eviction;
clairvoyant, an upper bound from all later requests, with rows alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

from benchmarks.common.reuse_agents import published_agents
from benchmarks.common.reuse_clairvoyant import Clairvoyant
from benchmarks.common.reuse_policies import CLAIRVOYANT, POLICIES
from benchmarks.common.reuse_runs import Run, make_prompt, reusable
from benchmarks.common.reuse_shape import BLOCK_BYTES, BLOCK_SIZE, SEATS, STATE_BYTES
from benchmarks.common.reuse_trace import asked_of, read_trace
from benchmarks.common.reuse_workloads import BUDGETS, SEED, WORKLOADS, Asked, workload
from vlm_serve.commands.plan import make as make_plan
from vlm_serve.options.config import EngineConfig
from vlm_serve.options.declared import parse_size

MODEL = Path(__file__).resolve().parent.parent / "tests" / "data" / "qwen3.5-4b.json"
EVERY = {**WORKLOADS, "coding agents": published_agents}


@dataclass(frozen=True)
class Budget:
    """One line of a table.

    Attributes:
        name: for its first column.
        rows: for snapshots.
        blocks: of KV; None: enough for everything.
        host_bytes: of a host tier; None: there is none.
    """

    name: str
    rows: int
    blocks: int | None = None
    host_bytes: int | None = None


def of_rows(rows: int) -> Budget:
    return Budget(f"{rows} rows", rows)


def of_memory(text: str, host: str | None) -> Budget:
    """Split memory as the engine does by default."""
    config = EngineConfig(
        device="cuda",
        dtype="bfloat16",
        block_size=BLOCK_SIZE,
        max_num_seqs=SEATS,
        cache_memory=text,
    )
    memory = make_plan(str(MODEL), config).memory
    assert (memory.block_bytes, memory.snapshot_bytes) == (BLOCK_BYTES, STATE_BYTES)
    rows, blocks = memory.num_snapshot_rows, memory.num_blocks
    name = f"{text} ({rows} rows, {blocks} blocks)" + (f", host {host}" if host else "")
    return Budget(name, rows, blocks, parse_size(host, "host") if host else None)


class Table:
    """Prints a line of Markdown for each budget of a workload.

    Args:
        policies: names, the columns.
    """

    def __init__(self, policies: Sequence[str]) -> None:
        self._policies = policies
        print(f"| workload | requests | budget | {' | '.join(policies)} |")
        print("|---" * (3 + len(policies)) + "|")

    def add(self, name: str, asked: Sequence[Asked], budgets: Sequence[Budget]) -> None:
        prompts = [make_prompt(one) for one in asked]
        every = reusable(asked, prompts)
        if not every:
            raise SystemExit(f"{name}: no prompt shares anything with an earlier one")
        for budget in budgets:
            shares = []
            for policy in self._policies:
                if policy == CLAIRVOYANT:
                    whole = budget.blocks is None
                    cached = Clairvoyant(asked, prompts).cached(budget.rows) if whole else None
                else:
                    run = Run(
                        asked,
                        prompts,
                        budget.rows,
                        policy=POLICIES[policy],
                        blocks=budget.blocks,
                        host_bytes=budget.host_bytes,
                    )
                    cached = run.run().cached
                shares.append("" if cached is None else f"{100 * cached / every:.2f}")
            line = " | ".join([name, str(len(asked)), budget.name, *shares])
            print(f"| {line} |", flush=True)


def chosen_policies(names: Sequence[str]) -> list[str]:
    """Return the policies by their names; `all` stands for all."""
    every = [*POLICIES, CLAIRVOYANT]
    return every if "all" in names else [name for name in every if name in names]


def number(least: int) -> Callable[[str], int]:
    """Return a reader of whole numbers from `least` on, for argparse."""

    def read(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}")
        return int(text)

    return read


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trace", type=Path, help="requests of hashed blocks, as JSON lines")
    parser.add_argument("--requests", type=number(1), help="of the trace; default: all")
    parser.add_argument("--skip", type=number(0), default=0, help="so many of the trace before")
    parser.add_argument("--workload", action="append", choices=list(EVERY))
    parser.add_argument("--seed", type=int, default=SEED, help="of the workloads")
    parser.add_argument("--rows", type=number(0), nargs="+", help="budgets of snapshots")
    parser.add_argument("--memory", nargs="+", default=[], help="budgets of rows and blocks")
    parser.add_argument("--host", help="size of a host tier below each --memory")
    names = [*POLICIES, CLAIRVOYANT, "all"]
    parser.add_argument("--policies", nargs="+", choices=names, default=["all"])
    options = parser.parse_args(arguments)
    if options.host and not options.memory:
        parser.error("--host needs --memory: with --rows alone, nothing but rows is short")
    if not options.trace and (options.requests or options.skip):
        parser.error("--requests and --skip need --trace")
    if options.rows is None:
        options.rows = [] if options.memory else list(BUDGETS)
    return options


def main() -> None:
    options = parsed()
    budgets = [of_rows(rows) for rows in options.rows]
    budgets += [of_memory(text, options.host) for text in options.memory]
    table = Table(chosen_policies(options.policies))
    if options.trace:
        trace = read_trace(options.trace, options.requests, options.skip)
        table.add(options.trace.name.split(".")[0], asked_of(trace), budgets)
    names = options.workload or ([] if options.trace else list(EVERY))
    for name in names:
        table.add(name, workload(name, options.seed, EVERY), budgets)


if __name__ == "__main__":
    main()
