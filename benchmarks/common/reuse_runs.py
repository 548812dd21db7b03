"""Runs workloads through the real scheduler and the real cache, with scripted answers."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from letters import Letters
from symbolic import SymbolicMedia

from benchmarks.common.reuse_policies import DEFAULT, Policy
from benchmarks.common.reuse_shape import BLOCK_BYTES, BLOCK_SIZE, SEATS, STATE_BYTES, STEP_TOKENS
from benchmarks.common.reuse_tiers import HostTier
from benchmarks.common.reuse_workloads import END_OF_TURN, VOCABULARY, Asked, render
from vlm_serve.cache.config import CacheConfig
from vlm_serve.cache.embeddings import EmbeddingCache
from vlm_serve.cache.matching import key_at
from vlm_serve.engine.core.media import MediaPlanner
from vlm_serve.engine.core.planning import SchedulerConfig
from vlm_serve.engine.core.scheduler import Scheduler
from vlm_serve.engine.features.table import Features, Options
from vlm_serve.engine.requests.plan import SampledToken, SequenceInfo, StepOutput, StepPlan
from vlm_serve.engine.requests.request import Language, Request
from vlm_serve.engine.requests.sequence import SequenceGroup
from vlm_serve.preprocess.identity.keys import PromptKeys
from vlm_serve.preprocess.identity.prompt import MediaSpan, Prompt
from vlm_serve.sampling_params import SamplingParams

_ROOT = hashlib.sha256(b"workloads").digest()


def make_prompt(asked: Asked) -> Prompt:
    """Return the prompt of a request, as the engine gets it."""
    found = render(asked.messages)
    spans = tuple(
        MediaSpan(start, end, "video", content, (1, 2, 2), item, patch, 2)
        for start, end, content, patch, item in found.spans
    )
    media = tuple(
        SymbolicMedia(
            "video", (each.count, 2, 2), True, tuple(map(each.content, range(each.count)))
        )
        for each in found.media
    )
    keys = PromptKeys(
        _ROOT,
        found.token_ids,
        block_size=BLOCK_SIZE,
        spans=spans,
        end_of_turn_ids=(END_OF_TURN,),
    )
    return Prompt(
        token_ids=tuple(found.token_ids),
        positions=torch.zeros(3, 0, dtype=torch.int64),
        rope_delta=0,
        keys=keys,
        spans=spans,
        media=media,
        media_ends=tuple(found.media_ends),
        message_ends=tuple(found.message_ends),
        system_end=found.system_end,
        stable_end=found.stable_end,
    )


def places(one: Asked, prompt: Prompt) -> tuple[dict[bytes, int], list[bytes]]:
    """Return the keys of the cut points from which a prompt can start, deepest first, each with its
    tokens; and those of all states that it passes, its answer included."""
    keys = prompt.keys
    possible = {
        key_at(keys, cut): cut
        for cut in reversed(keys.cuts)
        if cut < len(prompt) and not keys.inside_span(cut)
    }
    whole = keys.fork()
    whole.extend((*one.answer, END_OF_TURN))
    return possible, [*whole.block_keys, *whole.tails.values()]


def reusable(asked: Sequence[Asked], prompts: Sequence[Prompt]) -> int:
    """Return the tokens open to reuse by all requests if every cut point of all earlier prompts
    and answers, in the order of sending, had its snapshot and nothing were ever evicted."""
    seen: set[bytes] = set()
    total = 0
    for one, prompt in zip(asked, prompts, strict=True):
        possible, passed = places(one, prompt)
        total += next((cut for key, cut in possible.items() if key in seen), 0)
        seen.update(passed)
    return total


class Scripted:
    """An executor without a model; it answers as told."""

    def __init__(self) -> None:
        self.answers: dict[int, tuple[int, ...]] = {}

    def register(self, info: SequenceInfo, answer: tuple[int, ...]) -> None:
        self.answers[info.sequence] = (*answer, END_OF_TURN)

    def forget(self, sequence: int) -> None:
        del self.answers[sequence]

    def run(self, plan: StepPlan) -> StepOutput:
        sampled: dict[int, tuple[SampledToken, ...]] = {
            task.sequence: (SampledToken(self.answers[task.sequence][task.position], {}),)
            for item in plan.slices
            for task in item.samples
        }
        return StepOutput(sampled)


@dataclass
class Outcome:
    """What came of a workload.

    Attributes:
        cached, prompt: tokens taken from the cache, and of all prompts.
        by_request: cached tokens of each request.
        reasons: requests by reason.
        saves, evictions: of snapshots, by kind and in all.
        blocks_evicted: blocks of KV that were evicted.
    """

    cached: int = 0
    prompt: int = 0
    by_request: list[int] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    saves: Counter[str] = field(default_factory=Counter)
    evictions: int = 0
    blocks_evicted: int = 0


class Run:
    """One workload with one configuration.

    Args:
        asked: the requests; prompts are made once and shared by all runs.
        prompts: of the requests.
        rows: budget of snapshot rows.
        policy: where snapshots are made, and which one is evicted.
        blocks: budget of KV blocks; None: there are enough for everything.
        host_bytes: of a host tier below; None: there is none.
        seats: most requests in flight, each with a row beside the budget. Snapshots may borrow idle
            ones, as in the engine.
    """

    def __init__(
        self,
        asked: Sequence[Asked],
        prompts: Sequence[Prompt],
        rows: int,
        *,
        policy: Policy = DEFAULT,
        blocks: int | None = None,
        host_bytes: int | None = None,
        seats: int = SEATS,
    ) -> None:
        self._asked, self._prompts, self._seats = asked, prompts, seats
        longest = max(map(len, prompts)) + 1024
        total = sum(
            len(prompt) + len(one.answer) for prompt, one in zip(prompts, asked, strict=True)
        )
        self.cache = policy.cache(
            CacheConfig(
                num_blocks=blocks or (total + seats * longest) // BLOCK_SIZE,
                block_size=BLOCK_SIZE,
                num_live_rows=seats,
                num_snapshot_rows=rows,
                learned_places=policy.learned,
                block_bytes=BLOCK_BYTES,
                snapshot_bytes=STATE_BYTES,
            )
        )
        limits = SchedulerConfig(
            max_num_seqs=seats,
            max_num_batched_tokens=STEP_TOKENS,
            block_size=BLOCK_SIZE,
            chunk_size=BLOCK_SIZE,
            state_interval=policy.interval,
            decode_state_interval=0,
            answer_ends="auto",
        )
        self.scheduler = Scheduler(self.cache, MediaPlanner(EmbeddingCache(1 << 30), 4), limits)
        self._tier = None if host_bytes is None else HostTier(self.cache, host_bytes)
        fetcher = None if self._tier is None else self._tier.fetcher
        self.features = Features(self.scheduler, Options(limits, fetcher=fetcher))
        self._executor = Scripted()
        self._language = Language(Letters(), frozenset({END_OF_TURN}), VOCABULARY, longest)
        self._numbers = itertools.count()
        self._in_flight: dict[int, SequenceGroup] = {}
        self.outcome = Outcome()

    def run(self) -> Outcome:
        """Send everything, each request as soon as a seat is free and its session goes on."""
        self.outcome.by_request = [0] * len(self._asked)
        for index, one in enumerate(self._asked):
            while len(self._in_flight) >= self._seats or one.after in self._in_flight:
                self._step()
            self._send(index, one)
            self._step()
        while self._in_flight or self.scheduler.has_work:
            self._step()
        if self._tier is not None:
            self._tier.close()
        self.cache.check()
        assert not self.cache.events.failures, "an observer of the cache has failed"
        evictions = self.cache.stats.evictions
        self.outcome.saves = self.cache.stats.saves
        self.outcome.evictions, self.outcome.blocks_evicted = evictions["snapshot"], evictions["kv"]
        return self.outcome

    def _send(self, index: int, one: Asked) -> None:
        params = SamplingParams(max_tokens=len(one.answer) + 1, temperature=0.0, seed=0)
        request = Request(
            str(index), self._prompts[index], params, lambda delta: None, arrival=index
        )
        group = SequenceGroup(request, self._numbers, self._language)
        self._executor.register(group.sequences[0].info, one.answer)
        self._in_flight[index] = group
        self.scheduler.add(group)

    def _step(self) -> None:
        if self._tier is not None:
            self._tier.step()
        plan = self.scheduler.plan()
        if plan is None:
            assert not self.scheduler.running, "sequences run but none can make a step"
            return
        for group, delta in self.scheduler.commit(plan, self._executor.run(plan)):
            if delta.finish_reason is not None:
                self._end(group)
        for number in self.scheduler.take_removed():
            self._executor.forget(number)

    def _end(self, group: SequenceGroup) -> None:
        index, outcome = group.request.arrival, self.outcome
        del self._in_flight[index]
        assert group.report is not None
        outcome.cached += group.report.boundary
        outcome.prompt += len(self._prompts[index])
        outcome.by_request[index] = group.report.boundary
        outcome.reasons[group.report.reason] += 1
