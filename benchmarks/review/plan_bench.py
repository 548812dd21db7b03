"""Time to plan, batch and commit a step, over the real scheduler and cache.

    python benchmarks/review/plan_bench.py [RUNNING] [QUEUED] [BLOCKS] [PROMPT] [--steps 30]

The executor answers at once, without a model. Times are of this thread's processor.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import checkout  # noqa: F401
import torch
from letters import Letters
from symbolic import make_prompt

from vlm_serve.cache.config import CacheConfig
from vlm_serve.cache.embeddings import EmbeddingCache
from vlm_serve.cache.prefix_cache import PrefixCache
from vlm_serve.engine.core.media import MediaPlanner
from vlm_serve.engine.core.planning import SchedulerConfig
from vlm_serve.engine.core.scheduler import Scheduler
from vlm_serve.engine.requests.plan import SampledToken, StepOutput
from vlm_serve.engine.requests.request import Language, Request
from vlm_serve.engine.requests.sequence import SequenceGroup
from vlm_serve.engine.steps.batching import KnownSequence, make_batch
from vlm_serve.sampling_params import SamplingParams

BLOCK = 64


class Traffic:
    """Sequences that decode for ever, and the processor seconds of each part of their steps."""

    def __init__(self, running: int, blocks: int, prompt: int, *, state: bool) -> None:
        rows = max(64, running)
        cache = PrefixCache(
            CacheConfig(
                num_blocks=blocks,
                block_size=BLOCK,
                num_live_rows=running,
                num_snapshot_rows=rows,
                has_state=state,
            )
        )
        config = SchedulerConfig(
            max_num_seqs=running,
            max_num_batched_tokens=running + 8192,
            block_size=BLOCK,
            chunk_size=64,
            state_interval=4096,
            decode_state_interval=0,
        )
        self.scheduler = Scheduler(cache, MediaPlanner(EmbeddingCache(1000), 4), config)
        self.seconds: dict[str, list[float]] = {"plan": [], "batch": [], "commit": []}
        self._prompt = prompt
        self._numbers = itertools.count()
        self._language = Language(Letters(), frozenset({1}), 50, 1 << 20)
        self._chosen = random.Random(0)
        self._known: dict[int, KnownSequence] = {}

    def submit(self, number: int) -> None:
        """Add a request with a prompt of its own."""
        tokens = tuple(self._chosen.choices(range(5, 50), k=self._prompt))
        params = SamplingParams(max_tokens=100_000, temperature=0.0, ignore_eos=True)
        prompt = make_prompt([tokens], block_size=BLOCK)
        request = Request(f"r{number}", prompt, params, lambda delta: None, 0, number)
        group = SequenceGroup(request, self._numbers, self._language)
        positions = torch.arange(self._prompt).expand(3, -1)
        for each in group.sequences:
            info = replace(each.info, positions=positions, rope_delta=0)
            self._known[each.number] = KnownSequence(info)
        self.scheduler.add(group)

    def step(self) -> int:
        """Run a step; return its slices."""
        times = [time.thread_time()]
        plan = self.scheduler.plan()
        self.scheduler.take_failures()
        times.append(time.thread_time())
        if plan is None:
            return 0
        for item in plan.slices:
            self._known[item.sequence].take(item)
        make_batch(sorted(plan.slices, key=lambda item: item.kind), self._known, {}, BLOCK)
        times.append(time.thread_time())
        sampled = {
            task.sequence: (SampledToken(7, {}),) for item in plan.slices for task in item.samples
        }
        output = StepOutput(sampled)
        begin = time.thread_time()
        self.scheduler.commit(plan, output)
        spent = (times[1] - times[0], times[2] - times[1], time.thread_time() - begin)
        for name, seconds in zip(self.seconds, spent, strict=True):
            self.seconds[name].append(seconds)
        return len(plan.slices)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, standard in (("running", 64), ("queued", 64), ("blocks", 20_000), ("prompt", 2048)):
        parser.add_argument(name, type=int, nargs="?", default=standard)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--no-state", action="store_true", help="a model without state layers")
    given = parser.parse_args(arguments)
    traffic = Traffic(given.running, given.blocks, given.prompt, state=not given.no_state)
    for number in range(given.running):
        traffic.submit(number)
    scheduler = traffic.scheduler
    while len(scheduler.running) < given.running or any(s.prefilling for s in scheduler.running):
        if not traffic.step():
            raise SystemExit("the blocks are too few for so many sequences")
    for number in range(given.queued):
        traffic.submit(given.running + number)
    for _ in range(5):
        traffic.step()
    gc.collect()
    slices = [traffic.step() for _ in range(given.steps)][-1]
    print(f"{len(scheduler.running)} run, {len(scheduler.waiting)} wait, {slices} slices a step")
    for name, seconds in traffic.seconds.items():
        last = [1000 * each for each in seconds[-given.steps :]]
        print(f"{name:8}{statistics.median(last):8.2f} ms, at most {max(last):.2f} ms")


if __name__ == "__main__":
    main()
