"""One replica: an engine, its routes, and a link to each front.

What a request is answered travels on its front's link, not with its own call.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive

from vlm_serve.config import EngineConfig
from vlm_serve.deploy.box import BEGUN, Boxes
from vlm_serve.deploy.link import Address, Links
from vlm_serve.deploy.loopback import bind_replica
from vlm_serve.server.config import ServerConfig

if TYPE_CHECKING:
    from vlm_serve.server.service import Service

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class ReplicaSetup:
    """What a replica is made from; plain data.

    Attributes:
        model: as for `serve`.
        names: under which requests may ask for it.
        created: seconds since 1970 at which the deployment began, for lists of models.
        generation: Serve replaces replicas of another one.
        loopback: nothing of it listens on another address.
        folder: the current one, from which relative paths lead; None: the one that Ray started in.
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
    """The class of the deployment; Serve calls its methods.

    Args:
        setup: plain data.
    """

    def __init__(self, setup: ReplicaSetup) -> None:
        from vlm_serve.engine.engine import Engine
        from vlm_serve.server.app import create_routes
        from vlm_serve.server.http.draining import SWITCH_SECONDS
        from vlm_serve.server.main import freeze_startup_objects
        from vlm_serve.server.service import Service

        if setup.folder is not None:
            os.chdir(setup.folder)
        if setup.loopback:
            bind_replica()
        logging.basicConfig(
            level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
        )
        sys.setswitchinterval(SWITCH_SECONDS)
        self.name = replica_name()
        self._boxes = Boxes()
        self._links = Links(self._boxes, LOOPBACK if setup.loopback else node_address())
        engine = Engine.from_checkpoint(setup.model, setup.engine)
        self._service: Service = Service(engine, setup.server, setup.names)
        self._service.state.created = setup.created
        self._service.grammars.warm_up()
        self._app: ASGIApp = create_routes(self._service)
        freeze_startup_objects()

    async def answer(
        self,
        front: str,
        number: int,
        scope: dict[str, Any],
        body: bytes,
        *,
        keys: Sequence[bytes] = (),
        tokens: int = 0,
        attempt: Any = None,
        replica: str | None = None,
        avoid: Sequence[str] = (),
    ) -> bool:
        """Answers a request, letter by letter, in its front's box. Cancelling it ends the request
        as a client does that goes away.

        Args:
            scope: a plain ASGI scope.
            keys: affinity keys, also for the router.
            attempt: what was fixed before the first attempt, if it is known.
            replica: the only one that may answer, for the router.
            avoid: those that should not, for the router.

        Returns whether it was answered: not by another replica than the wanted one.
        """
        if replica is not None and replica != self.name:
            return False
        box = self._boxes[front]
        box.put(number, BEGUN)
        if keys:
            scope["vlm_serve.affinity"] = tuple(keys)
        if attempt is not None:
            scope["vlm_serve.attempt"] = attempt

        async def send(message: Message) -> None:
            box.put(number, message)

        try:
            await self._app(scope, receiver(body), send)
        finally:
            box.put(number, None)
        return True

    async def link(self, front: str, *, replica: str) -> Address | None:
        """Where a front can read its letters; None: this is another replica than the wanted one."""
        return await self._links.address(front) if replica == self.name else None

    def check_health(self) -> None:
        """For Serve, which replaces a replica whose engine has stopped."""
        from vlm_serve.server.status import problem

        trouble = problem(self._service)
        if trouble is not None:
            raise RuntimeError(trouble)

    def record_routing_stats(self) -> dict[str, Any]:
        """For routers: the load, and the paths that the cache holds."""
        stats: dict[str, Any] = {"load": float(self._service.admission.open_tokens)}
        digest = getattr(self._service.engine, "affinity_digest", None)
        if digest is not None:
            stats["digest"] = digest()
        return stats

    def record_autoscaling_stats(self) -> dict[str, float]:
        """For `serving.replicas_for`."""
        return {"open_tokens": float(self._service.admission.open_tokens)}

    async def __del__(self) -> None:
        service = getattr(self, "_service", None)
        if service is not None:
            await self._links.close()
            await service.close()


def replica_name() -> str:
    """The name by which everybody knows the replica in this process."""
    from ray import serve

    return str(serve.get_replica_context().replica_id.unique_id)


def node_address() -> str:
    """Of this machine, as the others of the cluster know it."""
    util: Any = import_module("ray.util")
    return str(util.get_node_ip_address())


def receiver(body: bytes) -> Receive:
    """Of a request whose body is there already and whose client stays."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    return receive
