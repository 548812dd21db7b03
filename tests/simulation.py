"""Seeded random traffic through the real scheduler and the real cache over the symbolic executor.

Every step is followed by the cache's own `check()`, and at the end of every request its tokens and
its routed experts are compared with what the symbolic model answers to the same prompt cold.
`Simulation(seed).run(steps)` replays exactly.
"""

from __future__ import annotations

import itertools
import pickle
import random
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from join_watch import JoinWatch
from letters import Letters
from queued_symbolic import QueuedSymbolic
from simulated_client import Client, Spell, cold_answer
from simulated_drafts import Guesser
from simulated_places import plant
from simulated_prompts import Prompts
from simulated_tenants import Tenants
from simulated_turns import ENDING_MODES, AnyTurn, NextTurns
from symbolic import END_OF_TURN, VOCABULARY, InjectedFailure, SymbolicExecutor
from symbolic_tiers import SymbolicTiers, silence
from tree_follower import Follower

from vlm_serve.cache.config import CacheConfig
from vlm_serve.cache.embeddings import EmbeddingCache
from vlm_serve.cache.prefix_cache import PrefixCache
from vlm_serve.engine.core.executor import StepError
from vlm_serve.engine.core.media import MediaPlanner
from vlm_serve.engine.core.planning import SchedulerConfig
from vlm_serve.engine.core.queues import UpdateSlots
from vlm_serve.engine.core.scheduler import Event, Scheduler
from vlm_serve.engine.features.drafts.drafting import Drafting
from vlm_serve.engine.features.endings.endings import Endings
from vlm_serve.engine.features.shares import Shares
from vlm_serve.engine.features.table import TABLE, FeatureRow, Features, Options
from vlm_serve.engine.features.unread import Unread
from vlm_serve.engine.requests.outputs import Delta
from vlm_serve.engine.requests.plan import StepOutput, StepPlan
from vlm_serve.engine.requests.request import Language, Request
from vlm_serve.engine.requests.sequence import SequenceGroup
from vlm_serve.preprocess.identity.prompt import Prompt
from vlm_serve.sampling_params import SamplingParams

EMBEDDING_BYTES = 4


def _poison_block(executor: SymbolicExecutor | QueuedSymbolic, block: int) -> None:
    executor.poison(blocks=(block,))


def _poison_row(executor: SymbolicExecutor | QueuedSymbolic, row: int) -> None:
    executor.poison(rows=(row,))


class Simulation:
    """Random traffic from one seed.

    Args:
        seed: everything random follows from it.
        compare_every: steps between two comparisons of the whole tree with its mirror. The cache
            checks itself after every step, and the mirror's reader follows it.
        speculative: with drafts, of which some hold.
        replays: half of the requests come with the beginnings of their answers.
        queued: the second executor works behind the host, see `queued_symbolic`.
        exact_only: prompts come from prefill alone and answers from decode steps.
        left_out: names of features that the engine lacks.
        permuted: features that commute come in another order.
        ahead: steps are planned and run before the results of the ones before are committed.
        small_states: there are as many rows for snapshots as blocks, see `plan_memory`.
    """

    def __init__(
        self,
        seed: int,
        *,
        compare_every: int = 1,
        speculative: bool = False,
        replays: bool = False,
        queued: bool = False,
        exact_only: bool = False,
        left_out: Collection[str] = (),
        permuted: bool = False,
        ahead: bool = False,
        small_states: bool = False,
    ) -> None:
        self._ahead = ahead
        self._under_way: tuple[StepPlan, StepOutput | StepError] | None = None
        self._seed, self._left_out, self._permuted = seed, left_out, permuted
        self._replays = random.Random(f"replays {seed}") if replays else None
        self.rng = random.Random(seed)
        rng = self.rng
        self._reports = random.Random(f"reports {seed}")
        self._ends = random.Random(f"ends {seed}")
        self._clock = random.Random(f"clock {seed}")
        self._bursts = random.Random(f"bursts {seed}")
        self._places = random.Random(f"places {seed}")
        self._tenants = Tenants(seed)
        self._burst_rate = self._bursts.choice([0.0, 0.05, 0.2])
        self._compare_every = compare_every
        self.block_size = rng.choice([4, 8, 16])
        max_num_seqs = rng.choice([1, 2, 3, 6])
        self.max_model_len = self.block_size * rng.choice([8, 16, 24])
        blocks_per_sequence = self.max_model_len // self.block_size + 1
        num_blocks = blocks_per_sequence + rng.choice([0, 3, 20, 100])
        has_state = rng.random() < 0.9 or small_states
        num_snapshot_rows = rng.choice([0, 1, 3, 20])
        config = CacheConfig(
            num_blocks=num_blocks,
            block_size=self.block_size,
            num_live_rows=max_num_seqs,
            num_snapshot_rows=num_blocks if small_states else num_snapshot_rows,
            has_state=has_state,
            enabled=rng.random() < 0.95,
            min_snapshot_gain=rng.choice([1, 4]),
            logprob_bytes=self._reports.choice([0, 2_000, 1 << 20]),
            exact_only=exact_only,
            learned_places=self._places.random() < 0.8,
        )
        self.cache = PrefixCache(config)
        self.follower = Follower(self.cache, limit=100)
        self.tiers = SymbolicTiers(seed, self.cache)
        embeddings = EmbeddingCache(rng.choice([0, 100, 10_000]))
        self.config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + self.block_size * rng.choice([1, 2, 8]),
            block_size=self.block_size,
            chunk_size=min(8, self.block_size),
            state_interval=self.block_size * rng.choice([1, 4, 1000]),
            decode_state_interval=self.block_size * rng.choice([0, 0, 1, 2]),
            reported_tokens=self.block_size * self._reports.choice([1, 3, 1000]),
            complete_experts=rng.random() < 0.5,
            step_seconds=self._reports.choice([0.0, 0.05]),
            min_step_tokens=self.block_size * self._reports.choice([1, 2]),
        )
        self.drafter = Guesser(seed) if speculative else None
        most = self.drafter.most if self.drafter is not None else 0
        mode = self._ends.choice(ENDING_MODES)
        self.config = replace(
            self.config, speculative_tokens=most, answer_ends=mode, extends_steps=ahead
        )
        if exact_only:
            self.config = replace(self.config, answer_ends="off", decode_state_interval=0)
        self.media = MediaPlanner(embeddings, EMBEDDING_BYTES, self.tiers.embeddings)
        self.scheduler = Scheduler(self.cache, self.media, self.config)
        self.features = Features(self.scheduler, self._feature_options(), self._table())
        self.watch = JoinWatch(self.scheduler, self.features)
        self.turns = NextTurns(self._ends)
        self.endings = self.features.get(Endings)
        if self.endings is not None:
            self.endings.ask = self.turns.ask
        sizes = (num_blocks, config.num_rows, self.block_size)
        options: dict[str, Any] = {
            "has_state": has_state,
            "num_updates": UpdateSlots.of(max_num_seqs, most).total,
            "exact_only": exact_only,
        }
        self.executor = SymbolicExecutor(*sizes, rng, **options)
        self.twin = self._second(seed, sizes, options, queued=queued)
        for executor in (self.executor, self.twin):
            # What was freed holds nothing any more, as with the real engine in tests.
            self.cache.events.block_freed.subscribe(partial(_poison_block, executor))
            self.cache.events.row_freed.subscribe(partial(_poison_row, executor))
        self.tiers.transfer.executors = (self.executor, self.twin)
        self._expert_share = rng.choice([0.0, 0.3, 1.0])
        self._logprob_share = self._reports.choice([0.0, 0.2, 0.6])
        self.clients: dict[str, Client] = {}
        self.counts: Counter[str] = Counter()
        self._committed = False
        self._numbers = itertools.count()
        self._failure_rate = rng.choice([0.0, 0.01, 0.1])
        self._prompts = Prompts(rng, self.block_size, self.max_model_len)

    def _feature_options(self) -> Options:
        drafters = self.drafter.company() if self.drafter is not None else []
        return Options(self.config, fetcher=self.tiers.fetcher, drafters=drafters)

    def _table(self) -> list[FeatureRow]:
        """Return the table of features without those left out, the others perhaps permuted."""
        rows = [row for row in TABLE if row.name not in self._left_out]
        if self._permuted:
            order = random.Random(f"order {self._seed}")
            order.shuffle(rows)
            rows.sort(key=lambda row: not row.commutes)
        return rows

    def _second(
        self, seed: int, sizes: tuple[int, int, int], options: dict[str, Any], *, queued: bool
    ) -> SymbolicExecutor | QueuedSymbolic:
        """Return the executor that gets every plan too."""
        own = random.Random(f"twin {seed}")
        if queued:
            return QueuedSymbolic(seed, *sizes, own, **options)
        return SymbolicExecutor(*sizes, own, **options)

    @silence()
    def run(self, steps: int) -> Counter[str]:
        """Runs that many scheduler steps, then drains; returns what happened how often."""
        try:
            for step in range(steps):
                self._traffic()
                self._step()
                self.cache.check()
                self.watch.check(committed=self._committed)
                if step % self._compare_every == 0:
                    self.follower.check()
                else:
                    self.follower.follow()
            self._drain()
        finally:
            self.tiers.close()
        return self.counts

    # Traffic

    def _traffic(self) -> None:
        rng = self.rng
        while len(self.clients) < 8 and rng.random() < 0.3:
            self._submit(self._prompts.take())
        if len(self.clients) < 8 and self._bursts.random() < self._burst_rate:
            self.counts["bursts"] += 1
            for prompt in self._prompts.burst(self._bursts):
                self._submit(prompt)
        if self.clients and rng.random() < 0.03:
            client = rng.choice(list(self.clients.values()))
            self.counts["aborts"] += 1
            self._deliver(self.scheduler.end(client.group))
        self._tenants.read(
            self.features.get(Unread), [each.group for each in self.clients.values()]
        )
        if rng.random() < 0.002:
            self.cache.flush()
            self.counts["flushes"] += 1

    def _submit(self, prompt: Prompt) -> None:
        rng = self.rng
        number = next(self._numbers)
        with_experts = rng.random() < self._expert_share
        with_experts = with_experts and "experts" not in self._left_out
        with_logprobs = self._reports.random() < self._logprob_share
        with_logprobs = with_logprobs and "log-probabilities" not in self._left_out
        params = SamplingParams(
            max_tokens=rng.randint(1, max(1, min(12, self.max_model_len - len(prompt)))),
            temperature=0.0,
            ignore_eos=rng.random() < 0.5,
            seed=rng.randint(0, 3),
            n=rng.choice([1, 1, 1, 2, 3]),
            prompt_logprobs=self._reports.choice([0, 1, 4]) if with_logprobs else None,
            prompt_logprobs_start=self._reports.choice([0, 0, len(prompt) // 2])
            if with_logprobs
            else 0,
            return_routed_experts=with_experts,
            routed_experts_prompt_start=rng.choice([0, len(prompt) // 2]) if with_experts else 0,
        )
        request = Request(
            f"r{number}",
            self._keyed(prompt),
            params,
            self._ignore,
            rng.choice([0, 0, 1]),
            number,
            cold=rng.random() < 0.05,
            next_turn=self._ends.choice([None, AnyTurn()]),
            tenant=self._tenants.take(),
        )
        request = self._with_adapter(request)
        if self._replays is not None and not request.cold and self._replays.random() < 0.5:
            request = replace(request, forced=self._beginnings(request, self._replays))
        self._enter(request, prompt, poisonous=rng.random() < self._failure_rate / 2)
        self.counts["requests"] += 1

    def _enter(self, request: Request, prompt: Prompt, *, poisonous: bool) -> None:
        """Queue a request whose caller asked with this prompt."""
        language = Language(Letters(), frozenset({END_OF_TURN}), VOCABULARY, self.max_model_len)
        group = SequenceGroup(request, self._numbers, language)
        client = Client(
            group,
            asked=prompt,
            poisonous=poisonous,
            complete_experts=self.config.complete_experts,
            weights=self.executor.weights,
        )
        for sequence in group.sequences:
            self.executor.register(sequence.info)
            self.twin.register(pickle.loads(pickle.dumps(sequence.info)))
            if client.poisonous:
                self.executor.poisonous.add(sequence.number)
        self.clients[request.request_id] = client
        self.scheduler.add(group)

    def _keyed(self, prompt: Prompt) -> Prompt:
        return prompt

    def _with_adapter(self, request: Request) -> Request:
        return request

    def _beginnings(self, request: Request, rng: random.Random) -> tuple[tuple[int, ...], ...]:
        """Of its choices: what they would say anyway, as far as some other engine had come."""
        seed, most = request.params.seed, request.params.max_tokens
        assert seed is not None and most is not None
        now = Spell(0, 0, self.executor.weights)
        return tuple(
            tuple(cold_answer(request, seed + index, rng.randint(0, most), [now]))
            for index in range(rng.randint(0, request.params.n))
        )

    @staticmethod
    def _ignore(delta: Delta) -> None:
        pass

    # Steps

    def _step(self) -> None:
        self._committed = False
        if self._under_way is not None:
            self.counts["steps"] += 1
            self._finish(*self._under_way)
            return
        self.executor.fail_next = self.rng.random() < self._failure_rate
        self.tiers.step()
        self.turns.step()
        plant(self._places, self.cache)
        plan = self.scheduler.plan()
        if plan is None and (self.tiers.busy or self._comes_up()):
            return
        if plan is None:
            self.executor.fail_next = False
            assert self.scheduler.running or not self.scheduler.waiting, "stuck"
            assert not self.scheduler.running, "sequences run but none can make a step"
            return
        assert plan.num_tokens <= self.config.max_num_batched_tokens
        self.counts["overtaken"] += self._overtaken(plan)
        self.counts["steps"] += 1
        self._finish(plan, self._result(plan, {}))

    def _result(self, plan: StepPlan, before: dict[int, int]) -> StepOutput | StepError:
        """Run a plan; return its output, or its failure.

        Args:
            plan: with rows whose tokens only the device knows, if it is ahead.
            before: these, by sequence.
        """
        if plan.rows is not None:
            self.counts["rows"] += len(plan.rows)
            plan = StepPlan(plan.rows.slices(self.block_size, before))
        try:
            return self._run(plan)
        except StepError as error:
            return error

    def _finish(self, plan: StepPlan, result: StepOutput | StepError) -> None:
        """Run the step ahead of this one, if there is one; then commit this one."""
        self._under_way = None
        ahead = self.scheduler.plan_ahead(plan) if self._ahead else None
        if isinstance(result, StepError):
            assert isinstance(result.cause, InjectedFailure)
            self.counts["failures"] += 1
            self.counts["void steps"] += ahead is not None
            self._deliver(self.scheduler.fail(plan, result))
        else:
            output = result
            if ahead is not None:
                self.counts["planned ahead"] += 1
                self.executor.fail_next = self.rng.random() < self._failure_rate
                sampled = {number: each[0].token_id for number, each in output.sampled.items()}
                self._under_way = ahead, self._result(ahead, sampled)
            if plan.rows is not None and self._clock.random() < 0.5:
                tokens = [output.sampled[number][0].token_id for number in plan.rows.sequences]
                output = replace(output, tokens=tokens)
            self.scheduler.learn(plan, output, self._clock.uniform(0.0, 0.1))
            self._deliver(self.scheduler.commit(plan, output))
            self._committed = True
            self.counts["folds alone"] += not plan.slices
            self.counts["last tokens"] += sum(
                item.kind == "decode" and not item.samples for item in plan.slices
            )
        self._forget_removed()

    def _comes_up(self) -> bool:
        return bool(self.scheduler.queues.held)

    def _forget_removed(self) -> None:
        for number in self.scheduler.take_removed():
            self.executor.forget(number)
            self.twin.forget(number)
            self.executor.poisonous.discard(number)

    def _overtaken(self, plan: StepPlan) -> bool:
        """Whether a prompt is done in this step although it came after one that is not."""
        prefills = [item for item in plan.slices if item.kind == "prefill"]
        unfinished = [item.sequence for item in prefills if not item.samples]
        return any(
            item.samples and item.sequence > min(unfinished, default=item.sequence)
            for item in prefills
        )

    def _run(self, plan: StepPlan) -> StepOutput:
        """The plan, and what it looks like in another process, have the same output."""
        try:
            output = self.executor.run(plan)
        except StepError:
            self.twin.fail_next, self.twin.strike = True, self.executor.struck
            with suppress(StepError):
                self.twin.run(pickle.loads(pickle.dumps(plan)))
            raise
        other = pickle.loads(pickle.dumps(self.twin.run(pickle.loads(pickle.dumps(plan)))))
        self.counts["steps ahead"] += not other.awaited
        assert other.sampled == output.sampled and other.drafts == output.drafts
        assert other.prompt_logprobs.keys() == output.prompt_logprobs.keys()
        for number, rows in output.prompt_logprobs.items():
            assert np.array_equal(other.prompt_logprobs[number], rows)
        assert other.experts.keys() == output.experts.keys()
        for number, rows in output.experts.items():
            assert np.array_equal(other.experts[number], rows)
        return output

    def _deliver(self, events: list[Event]) -> None:
        for group, delta in events:
            request = group.request
            client = self.clients[request.request_id]
            client.push(delta)
            if len(client.finished) == len(group.sequences):
                client.verify()
                del self.clients[request.request_id]
                self._answered(client)
                self.counts[delta.finish_reason or ""] += 1
                self.counts["cold"] += request.cold
                # Who has tokens was told of once; who was ended before may have been.
                self.counts["hits"] += not request.cold and bool(client.tokens[0])
                self.counts["most hits"] += not request.cold
                assert not (request.cold and group.cached_tokens)
                self.counts["expert gaps"] += client.expert_gaps
                report = group.report
                self.counts["rows reused"] += report.logprobs_reused if report is not None else 0
                self.counts["expert answers"] += request.params.return_routed_experts
                if delta.finish_reason == "error" and not client.poisonous:
                    # Struck once in company and once alone: bad luck, but only by injection.
                    self.counts["unlucky"] += 1
                    assert self._failure_rate > 0

    def _answered(self, client: Client) -> None:
        """Have later prompts go on from an answer."""
        self._prompts.answered(client.asked, client.tokens.get(0, []), self._ends)

    def _drain(self) -> None:
        """Everything ends, everything comes back."""
        self._failure_rate = 0.0
        for _ in range(20_000):
            self.turns.step()
            self._tenants.read_all(self.features.get(Unread), self.clients.values())
            if not (self.scheduler.has_work or self.turns.asked or self._under_way):
                break
            self._step()
            self.watch.check(committed=self._committed)
        assert not self.scheduler.has_work and not self.clients, "requests never end"
        self.cache.check()
        self.cache.flush()
        self.cache.check()
        self.follower.check()
        assert self.tiers.embeddings is None or not self.tiers.embeddings.num_bytes
        assert not self.cache.events.failures, "see the log: a subscriber raised"
        assert self.counts["hits"] <= self.cache.stats.requests <= self.counts["most hits"]
        assert self.cache.free_block_count == self.cache.config.num_blocks, "blocks leaked"
        assert not self.scheduler.queues.followers, "somebody waits for nobody"
        assert not self.scheduler.queues.held, "somebody waits for nobody's client"
        assert not self.scheduler.queues.kept, "an ended answer keeps what it holds"
        self.counts.update(self.watch.counts)
        self.counts["rows left"] += self.cache.stats.saves["left"]
        for kind in ("answer_end", "answer_part", "learned"):
            self.counts[kind] += self.cache.stats.saves[kind]
        if self.endings is not None:
            self.counts["ends dropped"] += self.endings.num_dropped
        self.counts["preemptions"] += self.scheduler.num_preemptions
        self.counts["hit_tokens"] += self.cache.stats.hit_tokens
        self.counts["query_tokens"] += self.cache.stats.query_tokens
        self.counts["computed_tokens"] += self.executor.tokens_computed
        self.counts["rows computed"] += self.executor.rows_computed
        shares = self.features.get(Shares)
        if shares is not None:
            assert not shares._accounts and not shares._marks, "a tenant without requests"
            self.counts["seats given up"] += sum(shares.given_up.values())
        self.counts["held"] += self._tenants.num_held
        drafting = self.features.get(Drafting)
        if drafting is not None:
            self.counts["drafts"] += drafting.counts.draft_tokens
            self.counts["accepted drafts"] += drafting.counts.accepted_tokens
        self.counts["embeddings came up"] += self.media.counts["host"]
        self.counts["came up"] += self.tiers.counts["hit_host"]
        self.counts["tier errors"] += self.tiers.counts["failed"]
        self.counts["mirror read again"] += self.follower.times_read - 1
