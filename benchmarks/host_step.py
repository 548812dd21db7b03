"""What a decode step costs the host, before the model: plan, batch, tables and commit.

    python benchmarks/host_step.py [--running 1 8 64 256 1000] [--text] [--before FOLDER]

The scheduler, its cache and the tables of captured steps are real; an executor answers at once. So
the figures are milliseconds of the engine's thread, medians over steps. `--before` names a checkout
to compare with: both take turns, and the last column is the share of its time. With `--text` a real
tokenizer turns tokens into text; without it a character stands for a token.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import machine

from vlm_serve.cache.config import CacheConfig
from vlm_serve.cache.embeddings import EmbeddingCache
from vlm_serve.cache.prefix_cache import PrefixCache
from vlm_serve.engine.core.media import MediaPlanner
from vlm_serve.engine.core.planning import SchedulerConfig
from vlm_serve.engine.core.scheduler import Scheduler
from vlm_serve.engine.requests.plan import SampledToken, StepOutput, StepPlan
from vlm_serve.engine.requests.request import Language, Request
from vlm_serve.engine.requests.sequence import SequenceGroup
from vlm_serve.engine.steps.batching import KnownSequence, make_batch
from vlm_serve.engine.steps.step_buffers import StepBuffers
from vlm_serve.engine.steps.step_sizes import SequenceLimits, decode_sizes
from vlm_serve.engine.steps.step_tables import HostRing
from vlm_serve.preprocess.identity.keys import PromptKeys
from vlm_serve.preprocess.identity.prompt import Prompt
from vlm_serve.preprocess.text.tokenizer import Tokenizer
from vlm_serve.sampling_params import SamplingParams

with suppress(ImportError):  # an older checkout has none
    from vlm_serve.engine.steps.row_columns import RowColumns

DEMO = Path(__file__).resolve().parents[1] / "vlm_serve" / "demo" / "dense"
BLOCK, PROMPT, LONGEST = 64, 300, 262_144
PARTS = ("plan", "batch", "tables", "commit")


class Letters:
    """A tokenizer of one letter for each token."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token."""
        return bytes([97 + token_id % 26])

    def is_special(self, token_id: int) -> bool:
        """Return True for control tokens."""
        return False


class Host:
    """Memory of captured steps without a device: a copy is an ordinary one."""

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        """Return memory for the tables of a step."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def move(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Do nothing: that is the device's work."""

    def send(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        """Copy at once."""
        target.copy_(source)
        return lambda: None


class Bench:
    """Sequences that decode for ever.

    Args:
        running: number of sequences.
        tokenizer: turns their tokens into text.
        tokens: ids that they sample, in turns.
    """

    def __init__(self, running: int, tokenizer: Any, tokens: Sequence[int]) -> None:
        blocks = running * (2 + PROMPT // BLOCK + 8)
        cache = PrefixCache(
            CacheConfig(
                num_blocks=blocks,
                block_size=BLOCK,
                num_live_rows=running,
                num_snapshot_rows=max(64, running),
                has_state=True,
            )
        )
        config = SchedulerConfig(
            max_num_seqs=running,
            max_num_batched_tokens=running + 8192,
            block_size=BLOCK,
            chunk_size=64,
            state_interval=4096,
            decode_state_interval=0,
            **({"extends_steps": True} if "extends_steps" in SchedulerConfig.__slots__ else {}),
        )
        self.scheduler = Scheduler(cache, MediaPlanner(EmbeddingCache(1000), 4), config)
        self._known: dict[int, KnownSequence] = {}
        self._tokens = tokens
        self._step = 0
        self._columns: Any = None
        self.seconds: dict[str, list[float]] = {part: [] for part in PARTS}
        sizes = decode_sizes(running)
        size = next(size for size in sizes if size.decodes >= running)
        limits = SequenceLimits(BLOCK, LONGEST // BLOCK, running)
        self._buffers = StepBuffers(size, limits, HostRing(Host()), torch.device("cpu"))  # type: ignore[arg-type]
        language = Language(tokenizer, frozenset({1}), 1 << 18, 1 << 20)
        numbers, rng = itertools.count(), random.Random(0)
        for index in range(running):
            group = self._group(index, language, numbers, rng)
            for sequence in group.sequences:
                positions = torch.arange(PROMPT).expand(3, -1)
                info = replace(sequence.info, positions=positions, rope_delta=0)
                self._known[sequence.number] = KnownSequence(info)
            self.scheduler.add(group)
        while len(self.scheduler.running) < running or any(
            sequence.prefilling for sequence in self.scheduler.running
        ):
            self.step()

    def _group(self, index: int, language: Language, numbers: Any, rng: Any) -> SequenceGroup:
        ids = tuple(rng.choices(range(5, 50), k=PROMPT))
        keys = PromptKeys(b"0" * 32, list(ids), block_size=BLOCK)
        prompt = Prompt(ids, torch.zeros(3, PROMPT, dtype=torch.int64), 0, keys)
        params = SamplingParams(max_tokens=100_000, temperature=0.0, ignore_eos=True)
        request = Request(f"r{index}", prompt, params, lambda delta: None, 0, index)
        return SequenceGroup(request, numbers, language)

    def step(self) -> None:
        """Run a step, and keep its times if all of it decodes."""
        clock = time.thread_time
        times = [clock()]
        plan = self.scheduler.plan()
        assert plan is not None and not self.scheduler.take_failures()
        times.append(clock())
        batch = self._batch(plan)
        times.append(clock())
        if self._buffers.accepts(batch):
            self._buffers.fill(batch)
        times.append(clock())
        token = self._tokens[self._step % len(self._tokens)]
        output = self._output(plan, token)
        self._step += 1
        begin = clock()
        self.scheduler.commit(plan, output)
        times.append(times[-1] + clock() - begin)
        for part, (first, last) in zip(PARTS, itertools.pairwise(times), strict=True):
            self.seconds[part].append(last - first)

    def _output(self, plan: StepPlan, token: int) -> StepOutput:
        if getattr(plan, "rows", None) is not None:
            return StepOutput({}, tokens=[token] * len(plan.rows))
        tasks = [task for item in plan.slices for task in item.samples]
        return StepOutput({task.sequence: (SampledToken(token, {}),) for task in tasks})

    def _batch(self, plan: StepPlan) -> Any:
        if getattr(plan, "rows", None) is not None:
            if self._columns is None or self._columns.numbers is not plan.rows.sequences:
                self._columns = RowColumns(plan.rows, self._known, BLOCK)
            return self._columns.batch(plan.rows, {})
        for item in plan.slices:
            self._known[item.sequence].take(item)
        packed = sorted(plan.slices, key=lambda item: item.kind)
        return make_batch(packed, self._known, {}, BLOCK)[0]


def measure(running: int, steps: int, *, text: bool) -> dict[str, float]:
    """Return the median milliseconds of each part of a step."""
    bench = Bench(running, *(demo_text() if text else (Letters(), [7])))
    for _ in range(5):
        bench.step()
    gc.collect()
    gc.freeze()
    bench.seconds = {part: [] for part in PARTS}
    for _ in range(steps):
        bench.step()
    return {part: 1000 * statistics.median(values) for part, values in bench.seconds.items()}


def demo_text() -> tuple[Any, list[int]]:
    """Return the demo model's tokenizer, and the ids of a sentence."""
    tokenizer = Tokenizer(DEMO)
    return tokenizer, tokenizer.encode_plain("The triangle is at the top right.")


def in_checkout(folder: Path, running: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Measure the code of a checkout, in a process of its own."""
    command = [sys.executable, __file__, "--one", str(running), "--steps", str(arguments.steps)]
    paths = os.pathsep.join(map(str, (folder, Path(__file__).parent)))
    done = subprocess.run(
        [*command, *(["--text"] if arguments.text else [])],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
    )
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def medians(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the median of each part over several processes."""
    return {part: statistics.median(row[part] for row in rows) for part in PARTS}


def main() -> None:
    """Print a row for each number of sequences."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--running", type=int, nargs="+", default=[1, 8, 64, 256, 1000])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--turns", type=int, default=3, help="processes of each side")
    parser.add_argument("--before", type=Path, help="a checkout to compare with")
    parser.add_argument("--text", action="store_true", help="with a real tokenizer")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one, arguments.steps, text=arguments.text)))
        return
    print(machine.describe(1))
    sides = {"now": Path(__file__).parents[1]}
    if arguments.before is not None:
        sides["before"] = arguments.before.resolve()
    print(f"{'sequences':>9}  {'':6}  {'  '.join(f'{part:>7}' for part in (*PARTS, 'sum'))}")
    for running in arguments.running:
        found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
        for _, (side, folder) in itertools.product(range(arguments.turns), sides.items()):
            found[side].append(in_checkout(folder, running, arguments))
        sums = {}
        for side, rows in found.items():
            row = medians(rows)
            sums[side] = sum(row.values())
            cells = "  ".join(f"{value:7.3f}" for value in (*row.values(), sums[side]))
            share = f"  {sums['now'] / sums['before']:.2f}" if side == "before" else ""
            print(f"{running:9}  {side:6}  {cells}{share}", flush=True)


if __name__ == "__main__":
    main()
