"""Adapter between Serve's request routing and ours: chooses a replica for each request.

Serve creates one router in every calling process, on its own thread. The router and the gateway of
a process exchange facts through the shared state.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ray.serve.request_router import (
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

import vlm_serve.deploy.shared_state as shared
from vlm_serve.routing.router import Router
from vlm_serve.routing.view import ReplicaView

_log = logging.getLogger(__name__)
UNKNOWN_TOKENS = 0
"""A prompt's length: gateways do not count it."""
MAX_OPEN = 65_536
"""Most requests that Serve has not reported as ended; beyond that the oldest count as ended."""


class AffinityRouter(RequestRouter):
    """Sends requests where their prefix may be cached.

    A request with `replica` goes there only. Replicas in `avoid` come last, and those that are not
    admitted get no others. No
    method raises: an exception would stop all of Serve's routing.
    """

    def initialize_state(self, **_: Any) -> None:
        self._router = Router()
        self._versions: dict[str, int] = {}
        self._sent: dict[str, tuple[int, tuple[str, Sequence[bytes], int]]] = {}
        self._completed: dict[int, tuple[str, Sequence[bytes], int]] = {}

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return groups of replicas, best first; within a group Serve compares their queues."""
        try:
            if pending_request is not None:
                # When all replicas are full, Serve would otherwise retry in a busy loop.
                pending_request.routing_context.should_backoff = True
            return self._ranked(candidate_replicas, _arguments(pending_request))
        except Exception:
            _log.exception("routing failed; the request may go to any replica")
            serves = shared.SHARED_STATE.serves
            return [[each for each in candidate_replicas if serves(each.replica_id.unique_id)]]

    def _ranked(
        self, candidates: Sequence[RunningReplica], arguments: dict[str, Any]
    ) -> list[list[RunningReplica]]:
        by_name = {candidate.replica_id.unique_id: candidate for candidate in candidates}
        wanted = arguments.get("replica")
        if wanted is not None:
            return [[by_name[wanted]]] if wanted in by_name else []
        self._settle()
        by_name = {name: by_name[name] for name in by_name if shared.SHARED_STATE.serves(name)}
        if not by_name:
            return []
        views = [self._view(name, replica.routing_stats) for name, replica in by_name.items()]
        names = self._router.choose(arguments.get("keys", ()), UNKNOWN_TOKENS, views)
        avoided = set(arguments.get("avoid", ()))
        names.sort(key=lambda name: name in avoided)  # stable
        return [[by_name[name]] for name in names]

    def _view(self, name: str, stats: Mapping[str, Any]) -> ReplicaView:
        """Return a replica with its load, after taking over its digest if that is new."""
        digest = stats.get("digest")
        if digest is not None and self._versions.get(name) != digest.version:
            self._versions[name] = digest.version
            self._router.digest(name, digest)
        return ReplicaView(name, float(stats.get("load", 0.0)))

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        gone = self._set_running(replica.replica_id.unique_id for replica in replicas)
        retired = (*shared.SHARED_STATE.retired, *gone)
        shared.SHARED_STATE.retired = retired[-shared.MAX_RETIRED :]

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        dead = replica_id.unique_id
        self._set_running(name for name in shared.SHARED_STATE.replicas if name != dead)

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        if len(pending_request.args) < 2:
            return  # the call that opens a channel has no number
        arguments, name = _arguments(pending_request), replica_id.unique_id
        number = pending_request.args[1]
        shared.SHARED_STATE.routed[number] = name
        request = name, arguments.get("keys", ()), UNKNOWN_TOKENS
        self._sent[pending_request.metadata.internal_request_id] = number, request
        self._router.sent(*request)
        while len(self._sent) > MAX_OPEN:
            self._completed.update([self._sent.pop(next(iter(self._sent)))])

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        if internal_request_id in self._sent:
            self._completed.update([self._sent.pop(internal_request_id)])
        self._settle()

    def _settle(self) -> None:
        """Report ended requests to our router.

        The usage is in the last message, and a call may end before its gateway has read it. So a
        completed request waits until the gateway is done with it.
        """
        state = shared.SHARED_STATE
        for number in [completed for completed in self._completed if completed not in state.routed]:
            request = self._completed.pop(number)
            self._router.ended(*request, state.usage.pop(number, None))

    def _set_running(self, names: Iterable[str]) -> set[str]:
        """Set the running replicas; return those gone since."""
        before = shared.SHARED_STATE.replicas
        shared.SHARED_STATE.replicas = tuple(sorted(names))
        gone = set(before) - set(shared.SHARED_STATE.replicas)
        for name in gone:
            self._versions.pop(name, None)
            self._router.removed(name)
        return gone


def _arguments(pending_request: PendingRequest | None) -> dict[str, Any]:
    """Return the keyword arguments of a call."""
    return {} if pending_request is None else dict(pending_request.kwargs)
