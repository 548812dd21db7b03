"""Ray Serve's own prefix router, without a cluster.

Its class is used unchanged, with its tree of texts in this process instead of in an actor, and with
the current lengths of queues.

The class is the parent of `ray.serve.llm.request_router.PrefixCacheAffinityRouter`, which adds
nothing to it but whose package wants pyarrow and more.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Coroutine, Sequence
from types import SimpleNamespace
from typing import Any

from ray.llm._internal.serve.routing_policies.prefix_aware import prefix_aware_router
from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree import PrefixTree
from ray.serve._private.common import DeploymentID, ReplicaID

from common.routing_policies import Random
from common.routing_trace import Question

# With `ray.llm` comes a handler that writes down whatever any library says.
logging.getLogger("httpx").setLevel(logging.WARNING)

MAX_ONGOING_REQUESTS = 10**9
"""Of a replica, as `ray.serve.llm` has it by default: none is ever full."""


class _Local:
    """An actor's methods, called at once."""

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self._tree, name))


class _Router(prefix_aware_router.PrefixCacheAffinityRouter):  # type: ignore[misc]
    """Knows its replicas, and nothing of Serve's controller."""

    def __init__(self, ids: Sequence[ReplicaID], threshold: float) -> None:
        self._replicas = {
            each: SimpleNamespace(replica_id=each, max_ongoing_requests=MAX_ONGOING_REQUESTS)
            for each in ids
        }
        self._use_replica_queue_len_cache = False
        self.queues: dict[ReplicaID, int] = {}
        tree = PrefixTree()
        tree.add_tenants([each.to_full_id_str() for each in ids], 0.0)
        self.initialize_state(imbalanced_threshold=threshold, tree_actor=_Local(tree))

    def apply_locality_routing(self, pending_request: Any = None) -> list[ReplicaID]:
        return list(self._replicas)  # in Serve a set, whose order is another one in every process

    async def _probe_queue_lens(self, replicas: Sequence[Any], _: int) -> list[tuple[Any, int]]:
        return [(each, self.queues[each.replica_id]) for each in replicas]

    def route(self, request: Any) -> ReplicaID:
        """The replica that gets a request."""
        replicas = list(self._replicas.values())
        (group,) = _result(self.choose_replicas(replicas, request))
        chosen = _result(self._select_from_candidate_replicas(group, 0))
        self.on_request_routed(request, chosen.replica_id, None)
        return chosen.replica_id  # type: ignore[no-any-return]


class RayPrefix(Random):
    """All routers share one tree, as they do in Serve, so one of them stands for all.

    Args:
        threshold: queues that differ by more than this are evened out before anything else.
    """

    def __init__(self, replicas: int, seed: int, threshold: float = float("inf")) -> None:
        super().__init__(replicas, seed)
        random.seed(seed)  # Ray's router draws from it
        prefix_aware_router.ray = SimpleNamespace(get=_same)
        deployment = DeploymentID("replicas")
        self._ids = [ReplicaID(f"replica-{number}", deployment) for number in range(replicas)]
        self._numbers = {each: number for number, each in enumerate(self._ids)}
        self._router = _Router(self._ids, threshold)

    def choose(self, question: Question, queues: Sequence[int]) -> int:
        self._router.queues = dict(zip(self._ids, queues, strict=True))
        said = SimpleNamespace(messages=list(question.messages))
        request = SimpleNamespace(args=[said], metadata=SimpleNamespace(multiplexed_model_id=""))
        return self._numbers[self._router.route(request)]


def _same(value: Any) -> Any:
    return value


def _result(work: Coroutine[Any, Any, Any]) -> Any:
    """Of what waits for nothing."""
    try:
        work.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("it waits")
