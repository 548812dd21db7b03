"""Ways to choose a replica: ours, and those that are printed beside it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from routing_trace import Question

from vlm_serve.preprocess.affinity import AffinityDigest
from vlm_serve.routing.router import Policy, Router
from vlm_serve.routing.view import ReplicaView, Spent

ROUTERS = 4


class Chooser(Protocol):
    """What sends requests to replicas, which are numbered."""

    def choose(self, question: Question, queues: Sequence[int]) -> int:
        """`queues`: requests at each replica now; ours does not look at them."""
        ...

    def ended(self, question: Question, replica: int, spent: Spent) -> None: ...

    def told(self, replica: int, digest: AffinityDigest, load: float) -> None:
        """What a replica has said some seconds ago."""
        ...


class Random:
    def __init__(self, replicas: int, seed: int) -> None:
        self._rng = random.Random(seed)
        self._replicas = replicas

    def choose(self, question: Question, queues: Sequence[int]) -> int:
        return self._rng.randrange(self._replicas)

    def ended(self, question: Question, replica: int, spent: Spent) -> None:
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

    def ended(self, question: Question, replica: int, spent: Spent) -> None:
        name = self._views[replica].id
        self._chose.pop(id(question)).ended(name, question.affinity, 0, spent)

    def told(self, replica: int, digest: AffinityDigest, load: float) -> None:
        name = self._views[replica].id
        self._views[replica] = ReplicaView(name, load)
        for router in self._routers:
            router.digest(name, digest)

    def check(self) -> None:
        assert not any(router.failures for router in self._routers), "a router's call failed"
