"""Replicas without a model: the real prefix cache, the real snapshot policy, and a clock."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.routing_policies import Chooser
from common.routing_trace import BLOCK_SIZE, Question
from vlm_serve.cache.config import CacheConfig
from vlm_serve.cache.placement import plan_snapshots
from vlm_serve.cache.prefix_cache import Lease, PrefixCache
from vlm_serve.engine.features.affinity_map import AffinityMap
from vlm_serve.engine.features.mirror import TreeMirror
from vlm_serve.preprocess.identity.affinity import AffinityDigest
from vlm_serve.routing.view import RequestUsage

WINDOW_SECONDS = 10.0
DIGEST_SECONDS, DIGEST_AGE = 1.0, 5.0
"""Replicas say what they hold so often; routers learn of it so much later."""
STATE_INTERVAL, MIN_GAIN = 1024, 4
# Of a model of 0.8B: 64 tokens of six layers' keys and values, and eighteen layers' states.
BLOCK_BYTES, STATE_BYTES = 786_432, 19_500_000


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Replica:
    """Works through its queue, one request after the other.

    Args:
        tokens: that its cache holds.
        rows: states that its cache holds.
        speed: tokens a second.
    """

    def __init__(self, tokens: int, rows: int, speed: float) -> None:
        config = CacheConfig(
            num_blocks=tokens // BLOCK_SIZE,
            block_size=BLOCK_SIZE,
            num_live_rows=2,
            num_snapshot_rows=rows,
            min_snapshot_gain=MIN_GAIN,
            block_bytes=BLOCK_BYTES,
            snapshot_bytes=STATE_BYTES,
        )
        self.cache = PrefixCache(config)
        self.mirror = TreeMirror(self.cache.events)
        self.affinity = AffinityMap(self.mirror, has_state=True)
        self.queue: deque[Question] = deque()
        self.running: tuple[Question, Lease, int] | None = None
        self.speed = speed
        self.hit_tokens = 0
        self.windows: dict[int, float] = {}

    @property
    def length(self) -> int:
        """Of its queue, the running one included."""
        return len(self.queue) + (self.running is not None)

    @property
    def load(self) -> float:
        """Tokens of what waits and runs, as an engine knows them: hits are not known yet."""
        return float(sum(len(each.prompt) for each in self.queue))

    def start(self, question: Question, now: float) -> tuple[float, float]:
        """Begins with a request; returns when its first token comes and when it ends."""
        prompt = question.prompt
        match = self.cache.match(prompt.keys, limit=len(prompt) - 1)
        lease = self.cache.open(match)
        assert self.cache.take_row(lease) and self.cache.grow(lease, len(prompt) + 128)
        planned = plan_snapshots(
            prompt,
            start=match.boundary,
            junction=match.kv_boundary if match.junction else 0,
            interval=STATE_INTERVAL,
            min_gain=MIN_GAIN * BLOCK_SIZE,
        )
        for position, kind in planned:
            self.cache.reserve_snapshot(lease, position, kind)
        self.running = (question, lease, match.boundary)
        self.hit_tokens += match.boundary
        computed = len(prompt) - match.boundary
        first = now + computed / self.speed
        end = first + len(question.answer) / self.speed
        self._note_work(now, end)
        return first, end

    def end(self) -> tuple[Question, RequestUsage]:
        """The running request has been answered."""
        assert self.running is not None
        question, lease, cached = self.running
        prompt = question.prompt
        keys = prompt.keys.fork()
        self.cache.commit(lease, keys, len(prompt), exact_until=len(prompt))
        states = self.cache.snapshot_positions(prompt.keys, len(prompt))
        keys.extend(question.answer)
        self.cache.commit(lease, keys, len(keys), exact_until=len(prompt))
        self.cache.close(lease)
        self.mirror.publish()
        self.affinity.note(question.affinity, prompt, states)
        self.running = None
        return question, RequestUsage(len(prompt), cached, len(question.answer))

    def _note_work(self, begin: float, end: float) -> None:
        while begin < end:
            window = int(begin // WINDOW_SECONDS)
            until = min(end, (window + 1) * WINDOW_SECONDS)
            work = (until - begin) * self.speed
            self.windows[window] = self.windows.get(window, 0.0) + work
            begin = until if until > begin else end


@dataclass
class Outcome:
    """What came of a trace.

    Attributes:
        hit_tokens, prompt_tokens: of all requests.
        first_tokens: seconds until each request's first token.
        busiest: of every full window, the busiest replica's computed tokens over the mean.
    """

    hit_tokens: int = 0
    prompt_tokens: int = 0
    first_tokens: list[float] = field(default_factory=list)
    busiest: list[float] = field(default_factory=list)
    utilisation: float = 0.0

    def first_token(self, share: float) -> float:
        ordered = sorted(self.first_tokens)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def simulate(
    trace: Sequence[Question],
    replicas: Sequence[Replica],
    chooser: Chooser,
    clock: Clock,
) -> Outcome:
    """Sends a trace through replicas."""
    outcome, order = Outcome(), itertools.count()
    ends: list[tuple[float, int, int]] = []
    reports: deque[tuple[float, int, AffinityDigest, float]] = deque()
    next_report = DIGEST_SECONDS

    def begin(number: int) -> None:
        replica = replicas[number]
        if replica.running is None and replica.queue:
            question = replica.queue.popleft()
            first, end = replica.start(question, clock.now)
            outcome.first_tokens.append(first - question.time)
            heapq.heappush(ends, (end, next(order), number))

    def until(now: float) -> None:
        """All that happens before that time."""
        nonlocal next_report
        while True:
            times = [next_report, *(each[0][0] for each in (ends, reports) if each)]
            clock.now = min(times)
            if clock.now > now:
                clock.now = now
                return
            if ends and ends[0][0] == clock.now:
                number = heapq.heappop(ends)[2]
                question, spent = replicas[number].end()
                chooser.ended(question, number, spent)
                begin(number)
            elif reports and reports[0][0] == clock.now:
                chooser.told(*reports.popleft()[1:])
            else:
                next_report += DIGEST_SECONDS
                for number, replica in enumerate(replicas):
                    report = (replica.affinity.digest(), replica.load)
                    reports.append((clock.now + DIGEST_AGE, number, *report))

    for question in trace:
        until(question.time)
        number = chooser.choose(question, [replica.length for replica in replicas])
        replicas[number].queue.append(question)
        outcome.prompt_tokens += len(question.prompt)
        begin(number)
    last = int(clock.now // WINDOW_SECONDS)
    while ends:
        until(ends[0][0])
    for window in range(last):
        work = [replica.windows.get(window, 0.0) for replica in replicas]
        outcome.busiest.append(max(work) * len(work) / max(1.0, sum(work)))
    outcome.hit_tokens = sum(replica.hit_tokens for replica in replicas)
    work_done = sum(sum(replica.windows.values()) for replica in replicas)
    outcome.utilisation = work_done / sum(replica.speed for replica in replicas) / trace[-1].time
    return outcome
