"""Tenants beside each other in the real scheduler, over the symbolic executor."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import dataclass, field

from letters import Letters
from symbolic import END_OF_TURN, VOCABULARY, SymbolicExecutor, make_prompt

from vlm_serve.cache.config import CacheConfig
from vlm_serve.cache.embeddings import EmbeddingCache
from vlm_serve.cache.prefix_cache import PrefixCache
from vlm_serve.engine.core.media import MediaPlanner
from vlm_serve.engine.core.planning import SchedulerConfig
from vlm_serve.engine.core.queues import UpdateSlots
from vlm_serve.engine.core.scheduler import Scheduler
from vlm_serve.engine.features.shares import Shares
from vlm_serve.engine.features.table import TABLE, Features, Options
from vlm_serve.engine.features.unread import Unread
from vlm_serve.engine.requests.request import Language, Request
from vlm_serve.engine.requests.sequence import SequenceGroup
from vlm_serve.engine.requests.tenant import NOBODY, Tenant
from vlm_serve.sampling_params import SamplingParams

BLOCK = 8
CHECK_EVERY = 40
"""Steps between two checks of the cache; `simulation.py` checks after each."""


@dataclass
class Asked:
    """A request, and the steps of its tokens by choice."""

    group: SequenceGroup
    since: int
    steps: dict[int, list[int]] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        return self.group.finished

    @property
    def wait(self) -> int:
        """Steps up to the first token."""
        return min(first for first, *_ in self.steps.values()) - self.since


class FairWorld:
    """An engine's core with all features, without drafts.

    Args:
        seats: sequences that run at a time.
        blocks: of the cache.
        shares: tenants have shares.
        budget: tokens of a step.
    """

    def __init__(
        self, seats: int, *, blocks: int = 4000, shares: bool = True, budget: int = 512
    ) -> None:
        self.cache = PrefixCache(
            CacheConfig(
                num_blocks=blocks, block_size=BLOCK, num_live_rows=seats, num_snapshot_rows=400
            )
        )
        config = SchedulerConfig(
            max_num_seqs=seats,
            max_num_batched_tokens=budget,
            block_size=BLOCK,
            chunk_size=BLOCK,
            state_interval=64 * BLOCK,
            decode_state_interval=0,
        )
        self.scheduler = Scheduler(self.cache, MediaPlanner(EmbeddingCache(0), 4), config)
        rows = [row for row in TABLE if shares or row.name != "shares"]
        self.features = Features(self.scheduler, Options(config), rows)
        self.shares, self.unread = self.features.get(Shares), self.features.get(Unread)
        updates = UpdateSlots.of(seats, 0).total
        self.executor = SymbolicExecutor(
            blocks, seats + 400, BLOCK, random.Random(0), num_updates=updates
        )
        self.step, self.planned = 0, 0
        self.finished: list[SequenceGroup] = []
        self.computed: Counter[str] = Counter()
        self.by_number: dict[int, str] = {}
        self.asked: dict[str, Asked] = {}
        self.open: dict[str, Asked] = {}
        self._numbers = itertools.count()
        self._language = Language(
            Letters(), frozenset({END_OF_TURN}), VOCABULARY, (blocks - 1) * BLOCK
        )

    def ask(
        self,
        tenant: Tenant = NOBODY,
        length: int = 20,
        max_tokens: int = 8,
        n: int = 1,
        priority: int = 0,
        beginning: tuple[int, ...] = (),
    ) -> Asked:
        """Send a request whose prompt is no other one's."""
        arrival = next(self._numbers)
        own = random.Random(arrival)
        tokens = beginning + tuple(own.randrange(2, VOCABULARY) for _ in range(length))
        params = SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, temperature=0.0, seed=0, n=n
        )
        request = Request(
            f"r{arrival}",
            make_prompt([tokens], block_size=BLOCK),
            params,
            lambda delta: None,
            priority,
            arrival=arrival,
            tenant=tenant,
        )
        group = SequenceGroup(request, self._numbers, self._language)
        for sequence in group.sequences:
            self.executor.register(sequence.info)
            self.by_number[sequence.number] = tenant.name
        asked = self.asked[request.request_id] = Asked(group, self.step)
        self.open[request.request_id] = asked
        self.scheduler.add(group)
        return asked

    def run(self, steps: int = 1) -> None:
        """Run steps, as many as there is work for."""
        for _ in range(steps):
            plan = self.scheduler.plan()
            assert not self.scheduler.take_failures()
            self.step += 1
            if plan is None:
                continue
            self.planned += plan.num_tokens
            for item in plan.slices:
                self.computed[self.by_number[item.sequence]] += item.end - item.start
            output = self.executor.run(plan)
            self.scheduler.learn(plan, output, 0.01)
            for group, delta in self.scheduler.commit(plan, output):
                asked = self.asked[group.request.request_id]
                asked.steps.setdefault(delta.index, []).append(self.step)
                asked.tokens.setdefault(delta.index, []).extend(delta.token_ids)
                if asked.ended and self.open.pop(group.request.request_id, None) is not None:
                    self.finished.append(group)
            for number in self.scheduler.take_removed():
                self.executor.forget(number)
            if self.step % CHECK_EVERY == 0:
                self.cache.check()

    def open_of(self, tenant: Tenant) -> bool:
        """Return True if a request of a tenant has not ended."""
        return any(each.group.request.tenant is tenant for each in self.open.values())

    def seats(self, tenant: Tenant) -> int:
        """Return how many sequences of a tenant run."""
        return sum(each.request.tenant is tenant for each in self.scheduler.running)
