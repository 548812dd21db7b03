"""Between Serve's routing and ours: which replica a request goes to.

Serve makes one router in every process that calls the replicas, on a thread of its own. What the
front of that process wants to know of it is on the board.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from ray.serve.request_router import (
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from vlm_serve.deploy import board
from vlm_serve.deploy.core import Core

_log = logging.getLogger(__name__)
MAX_OPEN = 65_536
"""Requests of whose ends Serve is yet to tell. Whichever it never tells of count as ended then."""


class AffinityRouter(RequestRouter):
    """Sends requests where their beginning may be cached; a request that names its replica there,
    and none, if it can be helped, to those that it avoids. It never raises: Serve would route
    nothing any more."""

    def initialize_state(self, **_: Any) -> None:
        self._core = Core()
        self._sent: dict[str, tuple[int, tuple[str, Sequence[bytes], int]]] = {}
        self._completed: dict[int, tuple[str, Sequence[bytes], int]] = {}

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Groups of replicas, best first; Serve asks those of a group how busy they are."""
        try:
            if pending_request is not None:
                # Or it would come back at once when all are full, again and again.
                pending_request.routing_context.should_backoff = True
            return self._ranked(candidate_replicas, _wishes(pending_request))
        except Exception:
            _log.exception("a request is sent to any replica")
            return [list(candidate_replicas)]

    def _ranked(
        self, candidates: Sequence[RunningReplica], wishes: dict[str, Any]
    ) -> list[list[RunningReplica]]:
        by_name = {each.replica_id.unique_id: each for each in candidates}
        wanted = wishes.get("replica")
        if wanted is not None:
            return [[by_name[wanted]]] if wanted in by_name else []
        self._settle()
        for name, each in by_name.items():
            self._core.heard(name, each.routing_stats)
        names = self._core.choose(wishes.get("keys", ()), wishes.get("tokens", 0), list(by_name))
        avoided = set(wishes.get("avoid", ()))
        names.sort(key=lambda name: name in avoided)  # stable: the order stays otherwise
        return [[by_name[name]] for name in names]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        left = self._now_running(each.replica_id.unique_id for each in replicas)
        board.BOARD.left = (*board.BOARD.left, *left)[-board.MAX_LEFT :]

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        dead = replica_id.unique_id
        self._now_running(name for name in board.BOARD.replicas if name != dead)

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        if len(pending_request.args) < 2:
            return  # a link, which has no number
        wishes, name = _wishes(pending_request), replica_id.unique_id
        number = pending_request.args[1]
        board.BOARD.routed[number] = name
        request = name, wishes.get("keys", ()), wishes.get("tokens", 0)
        self._sent[pending_request.metadata.internal_request_id] = number, request
        self._core.sent(*request)
        while len(self._sent) > MAX_OPEN:
            self._completed.update([self._sent.pop(next(iter(self._sent)))])

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        if internal_request_id in self._sent:
            self._completed.update([self._sent.pop(internal_request_id)])
        self._settle()

    def _settle(self) -> None:
        """Tells the core of requests that have ended. The call of one may be over before its front
        has read the last letter, which says what the request took; so it waits for that."""
        for number in [each for each in self._completed if each not in board.BOARD.routed]:
            request = self._completed.pop(number)
            self._core.ended(*request, board.BOARD.spent.pop(number, None))

    def _now_running(self, names: Iterable[str]) -> set[str]:
        """Those that did until now, and do no more."""
        before = board.BOARD.replicas
        board.BOARD.replicas = tuple(sorted(names))
        gone = set(before) - set(board.BOARD.replicas)
        for name in gone:
            self._core.removed(name)
        return gone


def _wishes(pending_request: PendingRequest | None) -> dict[str, Any]:
    """The keyword arguments of a call."""
    return {} if pending_request is None else dict(pending_request.kwargs)
