"""A scheduler over a small cache and a symbolic executor, for tests that follow single steps."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from letters import Letters
from symbolic import (
    END_OF_TURN,
    VOCABULARY,
    SymbolicExecutor,
    chain,
    extended,
    make_prompt,
    next_token,
)

from vlm_serve.cache.config import CacheConfig
from vlm_serve.cache.embeddings import EmbeddingCache
from vlm_serve.cache.prefix_cache import PrefixCache
from vlm_serve.engine.core.media import MediaPlanner
from vlm_serve.engine.core.planning import SchedulerConfig
from vlm_serve.engine.core.queues import UpdateSlots
from vlm_serve.engine.core.scheduler import Scheduler
from vlm_serve.engine.features.drafts.base import Drafter
from vlm_serve.engine.features.endings.endings import Endings
from vlm_serve.engine.features.joins import Joining
from vlm_serve.engine.features.replays import Replays
from vlm_serve.engine.features.table import Features, Options
from vlm_serve.engine.requests.outputs import Delta
from vlm_serve.engine.requests.plan import StepPlan
from vlm_serve.engine.requests.request import Language, NextTurn, Request
from vlm_serve.engine.requests.sequence import Sequence, SequenceGroup
from vlm_serve.preprocess.identity.prompt import Prompt
from vlm_serve.sampling_params import SamplingParams

BLOCK = 8


@dataclass
class Seer:
    """Drafts what will come; from `wrong` on (places in a draft), what will not."""

    wrong: int = 100
    asked: list[int] = field(default_factory=list)

    def propose(self, sequence: Sequence, limit: int) -> tuple[int, ...]:
        self.asked.append(limit)
        digest = chain(sequence.info.positions, sequence.token_ids)[-1]
        drafts: list[int] = []
        for place in range(limit):
            token = next_token(digest, sequence.info.seed)
            drafts.append(token if place < self.wrong else token ^ 1)
            digest = extended(digest, drafts[-1])
        return tuple(drafts)

    def evidence(self, sequence: Sequence) -> int:
        return 0

    def forget(self, sequence: Sequence) -> None:
        pass


class World:
    """Two seats unless `changes` say otherwise, blocks of 8 tokens.

    Args:
        num_blocks: of the cache.
        snapshots: rows for state snapshots.
        drafter: if there are to be drafts.
        changes: fields of the scheduler's config.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        snapshots: int = 0,
        drafter: Drafter | None = None,
        changes: Mapping[str, Any] | None = None,
    ) -> None:
        config = SchedulerConfig(
            max_num_seqs=2,
            max_num_batched_tokens=100,
            block_size=BLOCK,
            chunk_size=BLOCK,
            state_interval=BLOCK,
            decode_state_interval=0,
        )
        config = replace(config, **(changes or {}))
        self.cache = PrefixCache(
            CacheConfig(
                num_blocks=num_blocks,
                block_size=BLOCK,
                num_live_rows=config.max_num_seqs,
                num_snapshot_rows=snapshots,
            )
        )
        self.scheduler = Scheduler(self.cache, MediaPlanner(EmbeddingCache(0), 4), config)
        options = Options(config, drafters=[drafter] if drafter else [])
        self.features = Features(self.scheduler, options)
        joining, endings = self.features.get(Joining), self.features.get(Endings)
        replays = self.features.get(Replays)
        assert joining is not None and replays is not None
        self.joins, self.replays = joining.joins, replays
        self.endings = endings or Endings(self.scheduler.queues, "off", 0)
        updates = UpdateSlots.of(config.max_num_seqs, config.speculative_tokens).total
        self.executor = SymbolicExecutor(
            num_blocks,
            config.max_num_seqs + snapshots,
            BLOCK,
            random.Random(0),
            num_updates=updates,
        )
        self._numbers = itertools.count()
        self._language = Language(
            Letters(), frozenset({END_OF_TURN}), VOCABULARY, (num_blocks - 1) * BLOCK
        )

    def submit(
        self,
        token: int,
        length: int,
        max_tokens: int,
        *,
        ignore_eos: bool = True,
        priority: int = 0,
        before: tuple[int, ...] = (),
        cold: bool = False,
        forced: tuple[tuple[int, ...], ...] = (),
        **params: Any,
    ) -> SequenceGroup:
        """A request whose prompt is one token repeated, behind the tokens `before`; `forced` is
        what its choices begin with."""
        params = {"max_tokens": max_tokens, "ignore_eos": ignore_eos, **params}
        prompt = make_prompt([before, (token,) * length], block_size=BLOCK)
        return self.send(prompt, priority=priority, cold=cold, forced=forced, **params)

    def ask(self, tokens: tuple[int, ...], max_tokens: int, **options: Any) -> SequenceGroup:
        """A request whose prompt has these tokens."""
        prompt = make_prompt([tokens], block_size=BLOCK)
        return self.send(prompt, **{"max_tokens": max_tokens, "ignore_eos": True, **options})

    def send(
        self,
        prompt: Prompt,
        *,
        priority: int = 0,
        cold: bool = False,
        forced: tuple[tuple[int, ...], ...] = (),
        complete_experts: bool = False,
        next_turn: NextTurn | None = None,
        on_progress: Callable[[Delta], None] | None = None,
        **params: Any,
    ) -> SequenceGroup:
        """A request with a symbolic prompt; one with `on_progress` tells how far that is."""
        arrival = next(self._numbers)
        request = Request(
            f"r{arrival}",
            prompt,
            SamplingParams(**{"temperature": 0.0, "seed": 0, **params}),
            on_progress or (lambda delta: None),
            priority,
            arrival=arrival,
            forced=forced,
            cold=cold,
            complete_experts=complete_experts,
            next_turn=next_turn,
            progress=on_progress is not None,
        )
        group = SequenceGroup(request, self._numbers, self._language)
        for sequence in group.sequences:
            self.executor.register(sequence.info)
        self.scheduler.add(group)
        return group

    def plan(self) -> StepPlan:
        plan = self.scheduler.plan()
        assert plan is not None
        return plan

    def run(self, plan: StepPlan) -> list[Delta]:
        return [delta for _, delta in self.scheduler.commit(plan, self.executor.run(plan))]
