"""The deployment's public server: it admits requests and forwards them to replicas.

It reads a body only as far as affinity keys need, and tracks the delivered part of an answer for
another replica to resume it. Nothing here imports torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qsl, urlencode

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vlm_serve.deploy.gateway_routes import response
from vlm_serve.deploy.orders import Orders
from vlm_serve.deploy.replica_pool import (
    BrokenAnswerError,
    ReplicaCall,
    ReplicaLostError,
    ReplicaPool,
    no_replica,
)
from vlm_serve.deploy.replies import error_of, forwarded_scope
from vlm_serve.deploy.request_keys import keys_of
from vlm_serve.engine.requests.tenant import Tenant
from vlm_serve.errors import OverloadedError, VlmServeError
from vlm_serve.server.config import ServerConfig
from vlm_serve.server.failover.attempt import TOKENS, Attempt, Delivery
from vlm_serve.server.http.admission import OpenRequests
from vlm_serve.server.http.body import read_body
from vlm_serve.server.http.errors import (
    DrainingError,
    NotFoundError,
    error_event,
    error_for,
    public_error,
)
from vlm_serve.server.http.request_id import request_id_of
from vlm_serve.server.http.request_memory import Intake, RequestMemory
from vlm_serve.server.http.streaming import cancelled, disconnected, event
from vlm_serve.server.http.tenants import tenant_of

ONE_REPLICA = ("/v1/cache/tree", "/v1/cache/events", "/v1/cache/nodes/", "/v1/cache/affinity")
"""Routes about a single replica: the one in `?replica=`, by default the first."""


class Gateway:
    """An ASGI application in front of the replicas.

    Args:
        pool: the replicas.
        config: the server's options.
        model: the model's name for clients.
        max_open_per_replica: open requests per replica; beyond that, requests are refused.
        adapters: names of adapters, which requests may give in place of the model's.
        allow_weight_updates: the replicas' option.

    Attributes:
        orders: gives the operator's orders to the replicas.
        num_lost: requests that moved to another replica because theirs was lost.
    """

    def __init__(
        self,
        pool: ReplicaPool,
        config: ServerConfig,
        model: str,
        max_open_per_replica: int,
        adapters: frozenset[str] = frozenset(),
        *,
        allow_weight_updates: bool = False,
    ) -> None:
        self.config = config
        self.orders = Orders(pool, config, allowed=allow_weight_updates)
        self.requests = OpenRequests()
        self.num_lost = 0
        self.pool = pool
        self.memory = RequestMemory(config.max_request_bytes)
        self._model = model
        self._adapters = adapters
        self._max_open_per_replica = max_open_per_replica
        self._running: asyncio.Future[Any] | None = None
        self._streams: set[asyncio.Future[None]] = set()
        self._app: ASGIApp = Intake(self._answer, self.memory, config.max_body_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        else:
            await self._app(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        assert (await receive())["type"] == "lifespan.startup"
        self.start()
        await send({"type": "lifespan.startup.complete"})
        assert (await receive())["type"] == "lifespan.shutdown"
        await self.close()
        await send({"type": "lifespan.shutdown.complete"})

    def start(self) -> None:
        """Start to watch the replicas."""
        if self._running is None:
            self._running = asyncio.gather(self.pool.run(), self.orders.run())

    def end_streams(self) -> None:
        """End the endless streams."""
        for stream in self._streams:
            stream.cancel()

    async def close(self) -> None:
        """Stop accepting requests and watching the replicas."""
        self.requests.draining = True
        self.end_streams()
        if self._running is not None:
            self._running.cancel()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            answer = await response(self, scope, receive)
            if answer is not None:
                await answer(scope, receive, send)
                return
            await self._forward(scope, receive, send)
        except ClientDisconnect:
            return
        except _BrokenOff as broken:
            raise broken.error from None
        except Exception as error:
            problem = public_error(error, request_id_of(scope))
            await error_for(scope, problem)(scope, receive, send)

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Admit a request and forward it to a replica."""
        single = scope["path"].startswith(ONE_REPLICA)
        query, replica = self._named_replica(scope, single)
        with contextlib.nullcontext() if single else self._admitted(tenant_of(scope)):
            body = await read_body(Request(scope, receive), self.config.max_body_bytes)
            keys = await keys_of(scope, body, self._model, self._adapters)
            call = ReplicaCall(forwarded_scope(scope, query), body, keys, replica=replica)
            sending = asyncio.ensure_future(self._send(call, scope, send))
            watching = asyncio.ensure_future(disconnected(receive))
            if single:
                self._streams.add(sending)
            try:
                await asyncio.wait({sending, watching}, return_when=asyncio.FIRST_COMPLETED)
                if sending.done() and not sending.cancelled():
                    sending.result()
            finally:
                self._streams.discard(sending)
                await cancelled(watching)
                await cancelled(sending)

    async def _send(self, call: ReplicaCall, scope: Scope, send: Send) -> None:
        """Send the answer, resuming it on another replica if one is lost.

        A request moves whenever its replica shuts down in order, but survives only one death. What
        began under other weights than the replicas have now would be told by two models.
        """
        limit = self.config.request_timeout
        deadline = None if limit is None else time.time() + limit
        progress = AnswerProgress(Attempt.first(request_id_of(scope), deadline))
        try:
            while True:
                if not progress.delivered:
                    changes = self.orders.changes
                try:
                    await self._send_one(call, progress, send)
                    return
                except ReplicaLostError as lost:
                    if call.replica is not None or not progress.can_resume(died=lost.died):
                        raise
                    if progress.delivered and not self.orders.may_continue(changes):
                        raise _CHANGED from None
                    names = [lost.replica] if lost.replica else []
                    self.num_lost += 1
                    progress.resume(died=lost.died)
                    call = replace(call, avoid=(*call.avoid, *names))
        except (ReplicaLostError, BrokenAnswerError, VlmServeError) as error:
            problem = error if isinstance(error, VlmServeError) else _broken(error)
            if not progress.started:
                raise problem from None
            last = progress.error_event(scope, problem)
            if last is None:
                raise _BrokenOff(problem) from None
            await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _send_one(self, call: ReplicaCall, progress: AnswerProgress, send: Send) -> None:
        call = replace(call, attempt=progress.attempt)
        async with contextlib.aclosing(self.pool.answers(call)) as answers:
            async for message in answers:
                if progress.started and message["type"] == "http.response.start":
                    parts = [part.get("body", b"") async for part in answers]
                    raise error_of(int(message["status"]), b"".join(parts))
                await send(for_client(message))
                progress.record(message)

    @contextlib.contextmanager
    def _admitted(self, tenant: Tenant) -> Iterator[None]:
        """Count one request of a tenant in and out; raise DrainingError or OverloadedError on
        entry."""
        if self.requests.draining:
            raise DrainingError("the server is shutting down", code="shutting_down")
        names = self.pool.names
        if not names:
            raise no_replica()
        self.requests.refuse_if_full(tenant, self._max_open_per_replica * len(names))
        with self.requests.counted(tenant):
            yield

    def _named_replica(self, scope: Scope, single: bool) -> tuple[bytes, str | None]:
        """Return the query without `replica`, and the named replica.

        If none is named: the first for a route about a single replica, else None. Raises
        NotFoundError.
        """
        if not scope["path"].startswith("/v1/cache/"):
            return scope["query_string"], None
        pairs = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        named = [value for name, value in pairs if name == "replica"]
        rest = urlencode([pair for pair in pairs if pair[0] != "replica"]).encode()
        names = self.pool.names
        if not names:
            raise no_replica()
        if not named:
            return scope["query_string"], names[0] if single else None
        if named[-1] not in names:
            raise NotFoundError(
                f"no replica is called {named[-1][:64]!r}; there are: " + ", ".join(names),
                param="replica",
            )
        return rest, named[-1]


_CHANGED = OverloadedError(
    "the replica with this request was lost, and the weights have changed since the answer began",
    code="weights_changed",
)


class _BrokenOff(Exception):
    """An answer broke off after its status was sent: the connection must be closed."""

    def __init__(self, error: VlmServeError) -> None:
        self.error = error


def _broken(error: Exception) -> VlmServeError:
    if isinstance(error, BrokenAnswerError):
        return VlmServeError("a replica failed at this request", code="internal_error")
    return OverloadedError("the replica with this request was lost", code="replica_lost")


MAX_TOKENS = 1 << 20
"""An answer with more tokens cannot be resumed."""
INTERNAL = "vlm_serve."
"""Prefix of message keys that are for the gateway only."""


class AnswerProgress:
    """Progress of one request's answer; sees every message to the client.

    Args:
        attempt: everything fixed before any replica has the request.

    Attributes:
        started: the client has received a status.
    """

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.started = False
        self._delivery = Delivery(attempt)
        self._streams = False
        self._num_tokens = 0

    def record(self, message: Message) -> None:
        """Record a message sent to the client."""
        self._num_tokens += sum(map(len, message.get(TOKENS, {}).values()))
        if message["type"] == "http.response.start":
            self.started = True
            self._streams = any(
                name.lower() == b"content-type" and value.startswith(b"text/event-stream")
                for name, value in message.get("headers", ())
            )
        if self._num_tokens <= MAX_TOKENS:
            self._delivery.passed(message)

    @property
    def delivered(self) -> bool:
        """True if some of the answer was sent, not only its status and what breaks a silence."""
        sent = self._delivery.moved
        return bool(self._num_tokens or sent.delivered)

    def can_resume(self, *, died: bool) -> bool:
        """Return True if another replica may resume the answer.

        Args:
            died: the last replica died; False if it shut down in order.
        """
        if died and self.attempt.deaths:
            return False
        return not self.started or self._num_tokens <= MAX_TOKENS

    def resume(self, *, died: bool) -> None:
        """Set `attempt` to one that resumes from here."""
        self.attempt = self._delivery.next if died else self._delivery.moved
        self._delivery = Delivery(self.attempt)

    def error_event(self, scope: Scope, error: VlmServeError) -> bytes | None:
        """Return the event that ends a broken stream; None if the answer is not a stream."""
        if not self._streams:
            return None
        body = error_event(scope, error)
        return event(body, body.get("type"))


def for_client(message: Message) -> Message:
    """Return the message without its internal keys."""
    return {name: value for name, value in message.items() if not name.startswith(INTERNAL)}
