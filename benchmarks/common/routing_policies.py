"""Policies that choose a replica: ours, and those it is compared with."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from common.routing_trace import Question
from vlm_serve.cache.prefix_cache import PrefixCache
from vlm_serve.preprocess.identity.affinity import AffinityDigest
from vlm_serve.routing.router import Policy, Router
from vlm_serve.routing.view import ReplicaView, RequestUsage

ROUTERS = 4


class Chooser(Protocol):
    """What sends requests to replicas, which are numbered."""

    def choose(self, question: Question, queues: Sequence[int]) -> int:
        """`queues`: requests at each replica now; ours does not look at them."""
        ...

    def ended(self, question: Question, replica: int, spent: RequestUsage) -> None: ...

    def told(self, replica: int, digest: AffinityDigest, load: float) -> None:
        """What a replica has said some seconds ago."""
        ...


class Random:
    def __init__(self, replicas: int, seed: int) -> None:
        self._rng = random.Random(seed)
        self._replicas = replicas

    def choose(self, question: Question, queues: Sequence[int]) -> int:
        return self._rng.randrange(self._replicas)

    def ended(self, question: Question, replica: int, spent: RequestUsage) -> None:
        pass

    def told(self, replica: int, digest: AffinityDigest, load: float) -> None:
        pass


class RoundRobin(Random):
    """Each of several routers goes round on its own."""

    def __init__(self, replicas: int, seed: int) -> None:
        super().__init__(replicas, seed)
        self._next = [self._rng.randrange(replicas) for _ in range(ROUTERS)]

    def choose(self, question: Question, queues: Sequence[int]) -> int:
        router = self._rng.randrange(ROUTERS)
        self._next[router] += 1
        return self._next[router] % self._replicas


class AllKnowing(Random):
    """What is possible: one router that knows at once what every cache holds, how large requests
    and their answers are, and what each replica has been given."""

    WEIGHT, MEMORY_SECONDS = 4.0, 10.0

    def __init__(self, replicas: int, seed: int, clock: Callable[[], float]) -> None:
        super().__init__(replicas, seed)
        self._clock = clock
        self._work = [0.0] * replicas
        self._since = 0.0
        self.caches: Sequence[PrefixCache] = ()

    def choose(self, question: Question, queues: Sequence[int]) -> int:
        keys, length = question.prompt.keys, len(question.prompt)
        faded = math.exp((self._since - self._clock()) / self.MEMORY_SECONDS)
        self._work = [each * faded for each in self._work]
        self._since = self._clock()
        mean = sum(self._work) / self._replicas or 1.0
        costs = [length - each.match(keys, limit=length - 1).boundary for each in self.caches]
        costs = [cost + len(question.answer) for cost in costs]
        prices = [
            cost * math.exp(self.WEIGHT * work / mean)
            for cost, work in zip(costs, self._work, strict=True)
        ]
        chosen = prices.index(min(prices))
        self._work[chosen] += costs[chosen]
        return chosen


class Ours:
    """Independent routers: a request comes to any of them."""

    def __init__(
        self, replicas: int, seed: int, clock: Callable[[], float], policy: Policy | None = None
    ) -> None:
        self._rng = random.Random(seed)
        self._routers = [Router(policy, clock) for _ in range(ROUTERS)]
        self._views = [ReplicaView(f"replica-{number}") for number in range(replicas)]
        self._chose: dict[int, Router] = {}
        self.seconds: list[float] = []

    def choose(self, question: Question, queues: Sequence[int]) -> int:
        router, tokens = self._rng.choice(self._routers), 0
        begin = time.perf_counter()
        name = router.choose(question.affinity, tokens, self._views)[0]
        self.seconds.append(time.perf_counter() - begin)
        router.sent(name, question.affinity, tokens)
        self._chose[id(question)] = router
        return int(name.rpartition("-")[2])

    def ended(self, question: Question, replica: int, spent: RequestUsage) -> None:
        name = self._views[replica].id
        self._chose.pop(id(question)).ended(name, question.affinity, 0, spent)

    def told(self, replica: int, digest: AffinityDigest, load: float) -> None:
        name = self._views[replica].id
        self._views[replica] = ReplicaView(name, load)
        for router in self._routers:
            router.digest(name, digest)

    def check(self) -> None:
        assert not any(router.failures for router in self._routers), "a router's call failed"
