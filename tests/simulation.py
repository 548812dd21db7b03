"""Seeded random traffic through the real scheduler and the real cache over the symbolic executor.

Every step is followed by the cache's own `check()`, and at the end of every request its tokens and
its routed experts are compared with what the symbolic model answers to the same prompt cold.
`Simulation(seed).run(steps)` replays exactly.
"""

from __future__ import annotations

import hashlib
import itertools
import pickle
import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from symbolic import (
    END_OF_TURN,
    VOCABULARY,
    InjectedFailure,
    SymbolicExecutor,
    SymbolicMedia,
    chain,
    expert_rows,
    extended,
    logprob_rows,
    make_prompt,
    next_token,
)
from symbolic_tiers import SymbolicTiers

from vlm_serve.cache.config import CacheConfig
from vlm_serve.cache.embeddings import EmbeddingCache
from vlm_serve.cache.listing import Entry, NodeInfo, describe
from vlm_serve.cache.prefix_cache import PrefixCache
from vlm_serve.cache.records import Branch, Node
from vlm_serve.engine.drafts.base import Drafter
from vlm_serve.engine.drafts.mtp import MtpDrafter
from vlm_serve.engine.executor import StepError
from vlm_serve.engine.media import MediaPlanner
from vlm_serve.engine.mirror import Change, TreeMirror
from vlm_serve.engine.outputs import Delta
from vlm_serve.engine.plan import PromptLogprobs, StepOutput, StepPlan
from vlm_serve.engine.planning import SchedulerConfig
from vlm_serve.engine.request import Language, Request
from vlm_serve.engine.scheduler import Event, Scheduler
from vlm_serve.engine.sequence import Job, Sequence
from vlm_serve.engine.update_seats import UpdateSeats
from vlm_serve.preprocess.prompt import Prompt
from vlm_serve.sampling_params import SamplingParams

EMBEDDING_BYTES = 4


class Letters:
    """A tokenizer for tokens that stand for one letter each."""

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([97 + token_id % 26])

    def is_special(self, token_id: int) -> bool:
        return False


@dataclass
class Client:
    """One caller: collects deltas and knows the answer that must come."""

    job: Job
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, str] = field(default_factory=dict)
    poisonous: bool = False
    complete_experts: bool = False
    expert_gaps: int = 0

    def push(self, delta: Delta) -> None:
        assert delta.index not in self.finished, "a delta after the last one"
        self.tokens.setdefault(delta.index, []).extend(delta.token_ids)
        if delta.finish_reason is not None:
            self.finished[delta.index] = delta.finish_reason
        assert (delta.error is not None) == (delta.finish_reason == "error")
        answered = delta.finish_reason in ("stop", "length")
        wanted = self.job.request.params.return_routed_experts
        assert (delta.routed_experts is not None) == (answered and wanted)
        if delta.routed_experts is not None:
            self._verify_experts(delta, delta.routed_experts)
        first = len(self.tokens[delta.index]) == len(delta.token_ids) == 1
        wanted = self.job.request.params.prompt_logprobs is not None
        assert (delta.prompt_logprobs is not None) == (first and wanted)
        if delta.prompt_logprobs is not None:
            self._verify_logprobs(delta.prompt_logprobs)

    def _verify_experts(self, delta: Delta, rows: npt.NDArray[Any]) -> None:
        """Every row outside of the gaps is that of the prefix; gaps lie in what was cached."""
        request = self.job.request
        prompt = request.prompt
        token_ids = [*prompt.token_ids, *self.tokens[delta.index]]
        start = request.params.routed_experts_prompt_start
        expected = expert_rows(chain(prompt.positions, token_ids), start, len(token_ids) - 1).copy()
        for first, last in delta.routed_experts_gaps:
            assert not self.complete_experts, "a gap although only complete rows may be reused"
            assert start <= first < last < len(token_ids)
            expected[first - start : last - start] = 0
            self.expert_gaps += 1
        assert np.array_equal(rows, expected), "rows of another prefix"

    def _verify_logprobs(self, reports: tuple[PromptLogprobs, ...]) -> None:
        """Each is what the model says cold to the same prefix."""
        prompt, params = self.job.request.prompt, self.job.request.params
        digests = chain(prompt.positions, prompt.token_ids)
        first = max(1, params.prompt_logprobs_start)
        rows = logprob_rows(digests, first, len(prompt), params.prompt_logprobs or 0)
        assert len(reports) == len(rows)
        for token, report, row in zip(prompt.token_ids[first:], reports, rows, strict=True):
            others = dict(zip(row["ids"].tolist(), row["logprobs"].tolist(), strict=True))
            assert report.rank == row["rank"]
            assert report.logprobs == {token: float(row["logprob"])} | others

    def verify(self) -> None:
        """What was received is a prefix of (or, if it ended by itself, exactly) the cold answer.
        The report accounts for the whole prompt."""
        self._verify_report()
        for sequence in self.job.sequences:
            received = self.tokens.get(sequence.index, [])
            expected = cold_answer(self.job.request, sequence.info.seed, len(received))
            assert received == expected, "a hit changed the answer"
            if self.finished[sequence.index] == "length":
                assert len(received) == self.job.request.params.max_tokens
            if self.finished[sequence.index] == "stop":
                assert received[-1] == END_OF_TURN

    def _verify_report(self) -> None:
        report, prompt = self.job.report, self.job.request.prompt
        if report is None:
            return
        position, reused = 0, 0
        for segment in report.segments:
            assert position == segment.start < segment.end, "a gap in the report"
            position = segment.end
            reused += segment.end - segment.start if segment.source != "computed" else 0
        assert position == len(prompt) and reused == report.boundary == sum(report.tiers.values())
        assert (report.boundary_key is None) == (report.boundary == 0)
        sources = [media.source for media in report.media]
        if any(self.tokens.values()):
            assert len(sources) == len(prompt.spans)
            for span, source in zip(prompt.spans, sources, strict=True):
                was_there = span.end <= report.boundary
                made = ("encoded", "host")
                assert source in (("reused", *made) if was_there else ("cached", *made))
            assert report.media_encoded <= sources.count("encoded")


def cold_answer(request: Request, seed: int, count: int) -> list[int]:
    digest = chain(request.prompt.positions, request.prompt.token_ids)[-1]
    answer: list[int] = []
    for _ in range(count):
        token = next_token(digest, seed)
        answer.append(token)
        digest = extended(digest, token)
    return answer


class Guesser:
    """Drafts what will come, but for mistakes. What it knows follows from its own seed, so that the
    traffic is the same without it."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(f"drafts {seed}")
        self.most = self._rng.choice([1, 3, 7])
        self._rate = self._rng.choice([0.0, 0.7, 1.0])
        self._digests: dict[int, tuple[int, bytes]] = {}

    def company(self) -> list[Drafter]:
        """Itself, drafts of the model's own layer, or both."""
        return self._rng.choice([[self], [MtpDrafter()], [self, MtpDrafter()]])

    def propose(self, sequence: Sequence, limit: int) -> tuple[int, ...]:
        rng, tokens = self._rng, sequence.token_ids
        if sequence.number in self._digests:
            known, digest = self._digests[sequence.number]
        else:
            known = len(sequence.prompt)
            digest = chain(sequence.info.positions, sequence.prompt.token_ids)[-1]
        for token in tokens[known:]:
            digest = extended(digest, token)
        self._digests[sequence.number] = len(tokens), digest
        drafts: list[int] = []
        for _ in range(rng.randint(0, limit)):
            right = next_token(digest, sequence.info.seed)
            drafts.append(right if rng.random() < self._rate else rng.randrange(VOCABULARY))
            digest = extended(digest, drafts[-1])
        return tuple(drafts)

    def evidence(self, sequence: Sequence) -> int:
        return 0

    def forget(self, sequence: Sequence) -> None:
        self._digests.pop(sequence.number, None)


Facts = tuple[NodeInfo, bytes]
"""Of a node: what is told of it, and its root's key."""


class Follower:
    """The tree as a reader knows it who was told it once and has followed the changes since."""

    def __init__(self, cache: PrefixCache, limit: int) -> None:
        self._cache = cache
        self.mirror = TreeMirror(cache.events, limit)
        self._following = self.mirror.following()
        self._following.__enter__()
        self.times_read = 0
        self._read()

    def _read(self) -> None:
        whole = self.mirror.whole()
        self._sequence = whole.sequence
        self.nodes = {entry.node.key: _facts(entry, self._cache.config) for entry in whole.entries}
        self.times_read += 1

    def follow(self) -> None:
        """Hears what a step has changed."""
        self.mirror.publish()
        self.mirror.publish_use()
        found = self.mirror.since(self._sequence)
        if found is None:
            self._read()
        else:
            self._sequence, changes = found
            for change in changes:
                self._apply(change)

    def check(self) -> None:
        """What the mirror shows, and what its changes tell, is what there is."""
        self.follow()
        tree = tree_of(self._cache)
        shown, seen = self.mirror.whole().entries, set[bytes]()
        for entry in shown:
            parent = entry.node.parent
            assert parent.key in seen or parent.key == entry.root, "a child before its parent"
            seen.add(entry.node.key)
        told = {entry.node.key: _facts(entry, self._cache.config) for entry in shown}
        assert told == tree, "the mirror shows another tree"
        assert self.nodes == tree, "the changes tell of another tree"

    def _apply(self, change: Change) -> None:
        if change.kind == "node_added":
            assert change.key not in self.nodes and change.entry is not None
            self.nodes[change.key] = _facts(change.entry, self._cache.config)
        elif change.kind == "node_evicted":
            del self.nodes[change.key]
        elif change.kind == "hit":
            hit = change.hit
            assert hit is not None and hit.boundary < hit.prompt_tokens and hit.root
            assert bool(hit.key) == bool(hit.boundary)
        else:
            assert change.entry is not None
            known = self.nodes[change.key][0].snapshot
            if change.kind == "snapshot_ready":
                assert known is None and change.snapshot
            elif change.kind == "snapshot_evicted":
                assert known is not None and change.snapshot is None
            else:
                assert change.kind == "pinned"
            self.nodes[change.key] = _facts(change.entry, self._cache.config)


def _facts(entry: Entry, config: CacheConfig) -> Facts:
    return describe(config, entry), entry.root


def tree_of(cache: PrefixCache) -> dict[bytes, Facts]:
    """The tree itself."""
    entries: list[Entry] = []
    for node in cache.nodes():
        root: Branch = node
        while isinstance(root, Node):
            root = root.parent
        kind = node.snapshot.kind if node.snapshot is not None else None
        entries.append(Entry(node, root.key, kind))
    return {entry.node.key: _facts(entry, cache.config) for entry in entries}


def _poison_block(executor: SymbolicExecutor, block: int) -> None:
    executor.poison(blocks=(block,))


def _poison_row(executor: SymbolicExecutor, row: int) -> None:
    executor.poison(rows=(row,))


class Simulation:
    """Random traffic from one seed.

    Args:
        seed: everything random follows from it.
        compare_every: steps between two comparisons of the whole tree with its mirror. The cache
            checks itself after every step, and the mirror's reader follows it.
        speculative: with drafts, of which some hold.
        replays: half of the requests come with the beginnings of their answers.
    """

    def __init__(
        self,
        seed: int,
        *,
        compare_every: int = 1,
        speculative: bool = False,
        replays: bool = False,
    ) -> None:
        self._replays = random.Random(f"replays {seed}") if replays else None
        self.rng = random.Random(seed)
        rng = self.rng
        self._reports = random.Random(f"reports {seed}")
        self._clock = random.Random(f"clock {seed}")
        self._compare_every = compare_every
        self.block_size = rng.choice([4, 8, 16])
        max_num_seqs = rng.choice([1, 2, 3, 6])
        self.max_model_len = self.block_size * rng.choice([8, 16, 24])
        blocks_per_sequence = self.max_model_len // self.block_size + 1
        num_blocks = blocks_per_sequence + rng.choice([0, 3, 20, 100])
        has_state = rng.random() < 0.9
        config = CacheConfig(
            num_blocks=num_blocks,
            block_size=self.block_size,
            num_live_rows=max_num_seqs,
            num_snapshot_rows=rng.choice([0, 1, 3, 20]),
            has_state=has_state,
            enabled=rng.random() < 0.95,
            min_snapshot_gain=rng.choice([1, 4]),
            policy=rng.choice(["value", "lru"]),
            logprob_bytes=self._reports.choice([0, 2_000, 1 << 20]),
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
            least_step_tokens=self.block_size * self._reports.choice([1, 2]),
        )
        self.drafter = Guesser(seed) if speculative else None
        most = self.drafter.most if self.drafter is not None else 0
        self.config = replace(self.config, speculative_tokens=most)
        self.media = MediaPlanner(embeddings, EMBEDDING_BYTES, self.tiers.embeddings)
        self.scheduler = Scheduler(
            self.cache,
            self.media,
            self.config,
            self.tiers.fetcher,
            self.drafter.company() if self.drafter is not None else [],
        )
        self.executor, self.twin = (
            SymbolicExecutor(
                num_blocks,
                config.num_rows,
                self.block_size,
                own,
                has_state=has_state,
                num_updates=UpdateSeats.of(max_num_seqs, most).total,
            )
            for own in (rng, random.Random(f"twin {seed}"))
        )
        for executor in (self.executor, self.twin):
            # What was freed holds nothing any more, as with the real engine in tests.
            self.cache.events.block_freed.subscribe(partial(_poison_block, executor))
            self.cache.events.row_freed.subscribe(partial(_poison_row, executor))
        self.tiers.transfer.executors = (self.executor, self.twin)
        self._expert_share = rng.choice([0.0, 0.3, 1.0])
        self._logprob_share = self._reports.choice([0.0, 0.2, 0.6])
        self.clients: dict[str, Client] = {}
        self.counts: Counter[str] = Counter()
        self._numbers = itertools.count()
        self._failure_rate = rng.choice([0.0, 0.01, 0.1])
        self._media = [self._new_media() for _ in range(4)]
        self._histories: list[list[tuple[int, ...] | SymbolicMedia]] = [
            [self._text(rng.randint(1, 3 * self.block_size))] for _ in range(3)
        ]

    def run(self, steps: int) -> Counter[str]:
        """Runs that many scheduler steps, then drains; returns what happened how often."""
        for step in range(steps):
            self._traffic()
            self._step()
            self.cache.check()
            if step % self._compare_every == 0:
                self.follower.check()
            else:
                self.follower.follow()
        self._drain()
        return self.counts

    # Traffic

    def _traffic(self) -> None:
        rng = self.rng
        while len(self.clients) < 8 and rng.random() < 0.3:
            self._submit()
        if self.clients and rng.random() < 0.03:
            client = rng.choice(list(self.clients.values()))
            self.counts["aborts"] += 1
            self._deliver(self.scheduler.end(client.job))
        if rng.random() < 0.002:
            self.cache.flush()
            self.counts["flushes"] += 1

    def _submit(self) -> None:
        rng = self.rng
        prompt = self._prompt()
        number = next(self._numbers)
        with_experts = rng.random() < self._expert_share
        with_logprobs = self._reports.random() < self._logprob_share
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
            prompt,
            params,
            self._ignore,
            rng.choice([0, 0, 1]),
            number,
            cold=rng.random() < 0.05,
        )
        if self._replays is not None and not request.cold and self._replays.random() < 0.5:
            request = replace(request, forced=self._beginnings(request, self._replays))
        language = Language(Letters(), frozenset({END_OF_TURN}), VOCABULARY, self.max_model_len)
        job = Job(request, self._numbers, language)
        client = Client(
            job,
            poisonous=rng.random() < self._failure_rate / 2,
            complete_experts=self.config.complete_experts,
        )
        for sequence in job.sequences:
            self.executor.register(sequence.info)
            self.twin.register(pickle.loads(pickle.dumps(sequence.info)))
            if client.poisonous:
                self.executor.poisonous.add(sequence.number)
        self.clients[request.request_id] = client
        self.scheduler.add(job)
        self.counts["requests"] += 1

    def _beginnings(self, request: Request, rng: random.Random) -> tuple[tuple[int, ...], ...]:
        """Of its choices: what they would say anyway, as far as some other engine had come."""
        seed, most = request.params.seed, request.params.max_tokens
        assert seed is not None and most is not None
        return tuple(
            tuple(cold_answer(request, seed + index, rng.randint(0, most)))
            for index in range(rng.randint(0, request.params.n))
        )

    @staticmethod
    def _ignore(delta: Delta) -> None:
        pass

    def _prompt(self) -> Prompt:
        """A known history, sometimes grown by media and text, under one of two tenants."""
        rng = self.rng
        limit = self.max_model_len - 1
        history = rng.choice(self._histories)
        segments = [*history]
        if rng.random() < 0.5:
            segments.append(rng.choice(self._media))
        if rng.random() < 0.8:
            segments.append(self._text(rng.randint(1, 2 * self.block_size)))
        if rng.random() < 0.2:
            self._media[rng.randrange(len(self._media))] = self._grown(rng.choice(self._media))
        salt = rng.choice(["", "", "tenant"])
        while True:
            prompt = make_prompt(segments, block_size=self.block_size, salt=salt)
            if 0 < len(prompt) <= limit:
                break
            segments = segments[:-1] or [self._text(1)]
        if rng.random() < 0.3:
            self._histories[rng.randrange(len(self._histories))] = segments
        elif rng.random() < 0.1:
            self._histories[rng.randrange(len(self._histories))] = [self._text(3)]
        return prompt

    def _text(self, length: int) -> tuple[int, ...]:
        return tuple(
            END_OF_TURN if self.rng.random() < 0.1 else self.rng.randrange(5, VOCABULARY)
            for _ in range(length)
        )

    def _new_media(self) -> SymbolicMedia:
        patches = self.rng.choice([1, 1, 2, 3])
        hashes = tuple(self._content() for _ in range(patches))
        return SymbolicMedia("video" if patches > 1 else "image", (patches, 2, 2), True, hashes)

    def _grown(self, media: SymbolicMedia) -> SymbolicMedia:
        """A video extended by a frame pair, or a new medium."""
        if media.modality == "image" or len(media.hashes) > 4 or self.rng.random() < 0.3:
            return self._new_media()
        hashes = (*media.hashes, self._content())
        return SymbolicMedia("video", (len(hashes), 2, 2), True, hashes)

    def _content(self) -> bytes:
        return hashlib.sha256(bytes([self.rng.randrange(30)])).digest()

    # Steps

    def _step(self) -> None:
        self.executor.fail_next = self.rng.random() < self._failure_rate
        self.tiers.step()
        plan = self.scheduler.plan()
        if plan is None and self.tiers.busy:
            return
        if plan is None:
            self.executor.fail_next = False
            assert self.scheduler.running or not self.scheduler.waiting, "stuck"
            assert not self.scheduler.running, "sequences run but none can make a step"
            return
        assert plan.num_tokens <= self.config.max_num_batched_tokens
        self.counts["overtaken"] += self._overtaken(plan)
        self.counts["steps"] += 1
        try:
            output = self._run(plan)
        except StepError as error:
            assert isinstance(error.cause, InjectedFailure)
            self.counts["failures"] += 1
            self._deliver(self.scheduler.fail(plan, error))
        else:
            self.scheduler.learn(plan, output, self._clock.uniform(0.0, 0.1))
            self._deliver(self.scheduler.commit(plan, output))

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
        assert other.sampled == output.sampled and other.drafts == output.drafts
        assert other.prompt_logprobs.keys() == output.prompt_logprobs.keys()
        for number, rows in output.prompt_logprobs.items():
            assert np.array_equal(other.prompt_logprobs[number], rows)
        assert other.experts.keys() == output.experts.keys()
        for number, rows in output.experts.items():
            assert np.array_equal(other.experts[number], rows)
        return output

    def _deliver(self, events: list[Event]) -> None:
        for job, delta in events:
            request = job.request
            client = self.clients[request.request_id]
            client.push(delta)
            if delta.finish_reason is not None:
                number = job.sequences[delta.index].number
                self.executor.forget(number)
                self.twin.forget(number)
                self.executor.poisonous.discard(number)
            if len(client.finished) == len(job.sequences):
                client.verify()
                del self.clients[request.request_id]
                self.counts[delta.finish_reason or ""] += 1
                self.counts["cold"] += request.cold
                # Who has tokens was told of once; who was ended before may have been.
                self.counts["hits"] += not request.cold and bool(client.tokens[0])
                self.counts["most hits"] += not request.cold
                assert not (request.cold and job.cached_tokens)
                self.counts["expert gaps"] += client.expert_gaps
                log = job.prompt_log
                self.counts["rows reused"] += log.num_reused if log is not None else 0
                self.counts["expert answers"] += request.params.return_routed_experts
                if delta.finish_reason == "error" and not client.poisonous:
                    # Struck once in company and once alone: bad luck, but only by injection.
                    self.counts["unlucky"] += 1
                    assert self._failure_rate > 0

    def _drain(self) -> None:
        """Everything ends, everything comes back."""
        self._failure_rate = 0.0
        for _ in range(20_000):
            if not self.scheduler.has_work:
                break
            self._step()
        assert not self.scheduler.has_work and not self.clients, "requests never end"
        self.cache.check()
        self.cache.flush()
        self.cache.check()
        self.follower.check()
        assert self.tiers.embeddings is None or not self.tiers.embeddings.num_bytes
        self.tiers.close()
        assert not self.cache.events.failures, "see the log: a subscriber raised"
        assert self.counts["hits"] <= self.cache.stats.requests <= self.counts["most hits"]
        assert self.cache.free_block_count == self.cache.config.num_blocks, "blocks leaked"
        self.counts["preemptions"] += self.scheduler.num_preemptions
        self.counts["hit_tokens"] += self.cache.stats.hit_tokens
        self.counts["query_tokens"] += self.cache.stats.query_tokens
        self.counts["computed_tokens"] += self.executor.tokens_computed
        self.counts["rows computed"] += self.executor.rows_computed
        drafting = self.scheduler.drafting
        if drafting is not None:
            self.counts["drafts"] += drafting.counts.draft_tokens
            self.counts["accepted drafts"] += drafting.counts.accepted_tokens
        self.counts["embeddings came up"] += self.media.counts["host"]
        self.counts["came up"] += self.tiers.counts["hit_host"]
        self.counts["tier errors"] += self.tiers.counts["failed"]
        self.counts["mirror read again"] += self.follower.times_read - 1
