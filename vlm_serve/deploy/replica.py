"""One replica: an engine, its routes, and a channel to each gateway.

An answer travels on its gateway's channel, not as the result of its own call.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message

from vlm_serve.deploy.channel import BEGUN, ORDER, READY_TYPE, Address, Channels
from vlm_serve.errors import InvalidRequestError
from vlm_serve.options.config import EngineConfig
from vlm_serve.server.api.weights import READY
from vlm_serve.server.config import ServerConfig
from vlm_serve.server.http.body import receiver
from vlm_serve.system.child import end_with
from vlm_serve.system.log_output import FORMAT

if TYPE_CHECKING:
    from vlm_serve.server.service import Service

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class ReplicaSetup:
    """The inputs of a replica; plain data.

    Attributes:
        model: as for `serve`.
        names: names of the model that requests may use.
        created: Unix time of the deployment's start in seconds, for lists of models.
        generation: Serve replaces the replicas of any other generation.
        loopback: listen on loopback only.
        folder: working directory, for relative paths; None: the one Ray starts it in.
    """

    model: str
    engine: EngineConfig
    server: ServerConfig
    names: tuple[str, ...]
    created: int
    generation: int = 0
    loopback: bool = False
    folder: str | None = None


class EngineReplica:
    """The class of the Serve deployment; Serve calls its methods.

    Args:
        setup: model, options and names.
    """

    def __init__(self, setup: ReplicaSetup) -> None:
        from vlm_serve.batch.api.routes import BatchRoutes
        from vlm_serve.engine.engine import Engine
        from vlm_serve.server.app import create_routes
        from vlm_serve.server.failover.resuming import Resuming
        from vlm_serve.server.http.errors import error_for
        from vlm_serve.server.http.serving import SWITCH_SECONDS
        from vlm_serve.server.service import Service
        from vlm_serve.system.collector import freeze_startup_objects

        end_with(os.getppid())  # Ray itself does not end a replica that is stopped.
        if setup.folder is not None:
            os.chdir(setup.folder)
        if setup.loopback:
            _bind_to_loopback()
        logging.basicConfig(level=setup.server.log_level.upper(), format=FORMAT)
        sys.setswitchinterval(SWITCH_SECONDS)
        self.name = replica_name()
        self._decisions: dict[str, Future[bool]] = {}
        self._channels = Channels(LOOPBACK if setup.loopback else node_address())
        engine = Engine.from_checkpoint(setup.model, setup.engine)
        self._service: Service = Service(engine, setup.server, setup.names, mounts=(BatchRoutes,))
        self._service.state.created = setup.created
        self._service.grammars.warm_up()
        self._app: ASGIApp = Resuming(create_routes(self._service), error_for)
        freeze_startup_objects()

    async def answer(
        self,
        gateway: str,
        number: int,
        scope: dict[str, Any],
        body: bytes,
        *,
        keys: Sequence[bytes] = (),
        attempt: Any = None,
        replica: str | None = None,
        avoid: Sequence[str] = (),
    ) -> bool:
        """Answer a request with messages in its gateway's outbox.

        Cancelling the call ends the request, as a disconnecting client does. Once the engine has
        ended, nothing more is said to a request that another replica can resume.

        Args:
            scope: a plain ASGI scope.
            keys: affinity keys, also for the router.
            attempt: everything fixed before the first attempt, if known.
            replica: the only replica that may answer, for the router.
            avoid: replicas that should not answer, for the router.

        Returns False if this is not the wanted replica, or the answer is to be resumed.
        """
        if replica is not None and replica != self.name:
            return False
        outbox = self._channels.outbox(gateway)
        outbox.put(number, BEGUN)
        order = scope.get(ORDER, "")
        if order:
            scope[READY] = self._holding(order, lambda ready: outbox.put(number, ready))
        if keys:
            scope["vlm_serve.affinity"] = tuple(keys)
        if attempt is not None:
            scope["vlm_serve.attempt"] = attempt

        def lost() -> bool:
            return attempt is not None and not self._service.engine.alive

        async def send(message: Message) -> None:
            if not lost():
                outbox.put(number, message)

        try:
            await self._app(scope, receiver(body), send)
        finally:
            self._decide(order, go=False)  # nobody is left who could
            if not lost():
                outbox.put(number, None)
        return not lost()

    async def decide(self, order: str, *, go: bool, replica: str) -> None:
        """Have an update that holds read weights swap them, or drop them."""
        if replica == self.name:
            self._decide(order, go=go)

    def _holding(self, order: str, tell: Callable[[Message], None]) -> Callable[[str], None]:
        """Return a function that tells a digest, and waits on its thread for a decision."""
        decision = self._decisions[order] = Future[bool]()
        loop = asyncio.get_running_loop()

        def hold(weights: str) -> None:
            loop.call_soon_threadsafe(tell, {"type": READY_TYPE, "weights": weights})
            if not decision.result():
                raise InvalidRequestError("another replica could not take these weights")

        return hold

    def _decide(self, order: str, *, go: bool) -> None:
        decision = self._decisions.pop(order, None)
        if decision is not None:
            decision.set_result(go)

    async def open_channel(self, gateway: str, *, replica: str) -> Address | None:
        """Return the address of a gateway's channel; None if this is not the wanted replica."""
        return await self._channels.address(gateway) if replica == self.name else None

    def check_health(self) -> None:
        """Raise RuntimeError if the engine has stopped: Serve then replaces the replica."""
        from vlm_serve.server.status import problem

        trouble = problem(self._service)
        if trouble is not None:
            raise RuntimeError(trouble)

    def record_routing_stats(self) -> dict[str, Any]:
        """Return the load and a digest of the cached prefixes, for routers."""
        stats: dict[str, Any] = {"load": float(self._service.admission.open_tokens)}
        digest = getattr(self._service.engine, "affinity_digest", None)
        if digest is not None:
            stats["digest"] = digest()
        return stats

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the open prompt tokens, for `serving.replicas_for`."""
        return {"open_tokens": float(self._service.admission.open_tokens)}

    async def __del__(self) -> None:
        service = getattr(self, "_service", None)
        if service is not None:
            await self._channels.close()
            await service.close()


def replica_name() -> str:
    """Return the cluster-wide name of the replica in this process."""
    from ray import serve

    return str(serve.get_replica_context().replica_id.unique_id)


def node_address() -> str:
    """Return this machine's address in the cluster."""
    util: Any = import_module("ray.util")
    return str(util.get_node_ip_address())


def _bind_to_loopback() -> None:
    """Make Serve's port for calls between deployments listen on loopback; nothing here uses it.

    Serve would listen on all addresses. Call this in a replica's process before Serve opens it.
    """
    replica: Any = import_module("ray.serve._private.replica")
    add_port = replica.add_port_to_grpc_server

    def add_loopback_port(server: Any, address: str) -> int:
        return int(add_port(server, address.replace("[::]", "127.0.0.1")))

    replica.add_port_to_grpc_server = add_loopback_port
