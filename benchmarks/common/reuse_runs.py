"""Runs workloads through the real scheduler and the real cache, with scripted answers."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from letters import Letters
from symbolic import SymbolicMedia

from vlm_serve.cache.config import CacheConfig
from vlm_serve.cache.embeddings import EmbeddingCache
from vlm_serve.cache.matching import key_at
from vlm_serve.cache.prefix_cache import PrefixCache
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

from .reuse_workloads import BLOCK_SIZE, END_OF_TURN, VOCABULARY, Asked, render

SEATS = 8
STATE_INTERVAL = 1024
# Of a model of 4B: 64 tokens of eight layers' keys and values, and 24 layers' states.
BLOCK_BYTES, STATE_BYTES = 2_097_152, 51_511_296
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


def reusable(asked: Sequence[Asked], prompts: Sequence[Prompt]) -> int:
    """Return the tokens open to reuse by all requests if every cut point of all earlier prompts
    and answers, in the order of sending, had its snapshot and nothing were ever evicted."""
    seen: set[bytes] = set()
    total = 0
    for one, prompt in zip(asked, prompts, strict=True):
        keys = prompt.keys
        possible = (
            cut
            for cut in reversed(keys.cuts)
            if cut < len(prompt) and not keys.inside_span(cut) and key_at(keys, cut) in seen
        )
        total += next(possible, 0)
        whole = keys.fork()
        whole.extend((*one.answer, END_OF_TURN))
        seen.update(whole.block_keys, whole.tails.values())
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
    """

    cached: int = 0
    prompt: int = 0
    by_request: list[int] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    saves: Counter[str] = field(default_factory=Counter)
    evictions: int = 0


class Run:
    """One workload with one configuration; at most `SEATS` requests are in flight.

    Args:
        asked: the requests; prompts are made once and shared by all runs.
        prompts: of the requests.
        rows: budget of snapshot rows.
        learned: False: regular snapshots stand at the fixed interval.
        changes: fields of the scheduler's config.
    """

    def __init__(
        self,
        asked: Sequence[Asked],
        prompts: Sequence[Prompt],
        rows: int,
        *,
        learned: bool = True,
        changes: Mapping[str, Any] | None = None,
    ) -> None:
        self._asked, self._prompts = asked, prompts
        longest = max(map(len, prompts)) + 1024
        total = sum(
            len(prompt) + len(one.answer) for prompt, one in zip(prompts, asked, strict=True)
        )
        self.cache = PrefixCache(
            CacheConfig(
                num_blocks=(total + SEATS * longest) // BLOCK_SIZE,
                block_size=BLOCK_SIZE,
                num_live_rows=SEATS,
                num_snapshot_rows=rows,
                learned_places=learned,
                block_bytes=BLOCK_BYTES,
                snapshot_bytes=STATE_BYTES,
            )
        )
        config: dict[str, Any] = {
            "max_num_seqs": SEATS,
            "max_num_batched_tokens": 2048,
            "block_size": BLOCK_SIZE,
            "chunk_size": BLOCK_SIZE,
            "state_interval": STATE_INTERVAL,
            "decode_state_interval": 0,
            "answer_ends": "auto",
        }
        limits = SchedulerConfig(**config | dict(changes or {}))
        self.scheduler = Scheduler(self.cache, MediaPlanner(EmbeddingCache(1 << 30), 4), limits)
        self.features = Features(self.scheduler, Options(limits))
        self._executor = Scripted()
        self._language = Language(Letters(), frozenset({END_OF_TURN}), VOCABULARY, longest)
        self._numbers = itertools.count()
        self._in_flight: dict[int, SequenceGroup] = {}
        self.outcome = Outcome()

    def run(self) -> Outcome:
        """Send everything, each request as soon as a seat is free and its session goes on."""
        self.outcome.by_request = [0] * len(self._asked)
        for index, one in enumerate(self._asked):
            while len(self._in_flight) >= SEATS or one.after in self._in_flight:
                self._step()
            self._send(index, one)
            self._step()
        while self._in_flight or self.scheduler.has_work:
            self._step()
        self.cache.check()
        self.outcome.saves = self.cache.stats.saves
        self.outcome.evictions = self.cache.stats.evictions["snapshot"]
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
