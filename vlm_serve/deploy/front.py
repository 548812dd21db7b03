"""The server that clients reach: it lets requests in, and passes them on to replicas.

Nothing here reads more of a body than its affinity keys need, and nothing imports torch.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qsl, urlencode

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from vlm_serve.deploy import gather
from vlm_serve.deploy.affinity import keys_of
from vlm_serve.deploy.course import Course, first_attempt, for_client
from vlm_serve.deploy.fleet import BrokenAnswerError, Call, Fleet, ReplicaLostError, no_replica
from vlm_serve.errors import InvalidRequestError, OverloadedError, VlmServeError
from vlm_serve.server.config import ServerConfig
from vlm_serve.server.http.body import read_body
from vlm_serve.server.http.errors import DrainingError, error_for, public_error
from vlm_serve.server.http.open_requests import OpenRequests
from vlm_serve.server.http.request_id import request_id_of
from vlm_serve.server.http.request_memory import Intake, RequestMemory
from vlm_serve.server.http.streaming import cancelled, disconnected

STATE = ("request_id", "tenant_salt", "api_key_digest")
"""What the gate has found out; no client can say it."""
CREDENTIALS = (b"authorization", b"x-api-key")
ONE_REPLICA = ("/v1/cache/tree", "/v1/cache/events", "/v1/cache/nodes/", "/v1/cache/affinity")
"""Routes that look into one replica: the one that `?replica=` names, else the first."""


class UnknownReplicaError(InvalidRequestError):
    """No replica has the name that a request gives: HTTP 404."""

    status = 404


class Front:
    """An ASGI application, and what a server does with it.

    Args:
        fleet: the replicas.
        config: the server's options.
        model: the name by which clients know the model.
        seats_per_replica: requests that each replica may have open.

    Attributes:
        num_lost: times that a request went to another replica because its own was lost.
    """

    def __init__(
        self, fleet: Fleet, config: ServerConfig, model: str, seats_per_replica: int
    ) -> None:
        self.config = config
        self.requests = OpenRequests()
        self.num_lost = 0
        self.fleet = fleet
        self.memory = RequestMemory(config.max_request_bytes)
        self._model = model
        self._seats = seats_per_replica
        self._running: asyncio.Task[None] | None = None
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
        """Begins to look after the replicas."""
        if self._running is None:
            self._running = asyncio.ensure_future(self.fleet.run())

    def end_streams(self) -> None:
        """Ends the streams that would go on for ever."""
        for stream in self._streams:
            stream.cancel()

    async def close(self) -> None:
        """Looks after the replicas no more."""
        self.requests.draining = True
        self.end_streams()
        if self._running is not None:
            self._running.cancel()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            own = await gather.response(self, scope, receive)
            if own is not None:
                await own(scope, receive, send)
                return
            await self._pass_on(scope, receive, send)
        except ClientDisconnect:
            return
        except _Began as began:
            raise began.error from None
        except Exception as error:
            problem = public_error(error, request_id_of(scope))
            await error_for(scope, problem)(scope, receive, send)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets a request in and answers it with what a replica says."""
        single = scope["path"].startswith(ONE_REPLICA)
        query, replica = self._named_replica(scope, single)
        with contextlib.nullcontext() if single else self._admitted():
            body = await read_body(Request(scope, receive), self.config.max_body_bytes)
            keys = await keys_of(scope, body, self._model)
            call = Call(plain(scope, query), body, keys, replica=replica)
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

    async def _send(self, call: Call, scope: Scope, send: Send) -> None:
        """Sends what replicas answer: what one of them cannot end, another one does. A
        request is moved as often as replicas end in order, but goes on after one death only."""
        course = Course(first_attempt(scope, self.config.request_timeout))
        try:
            while True:
                try:
                    await self._send_one(call, course, send)
                    return
                except ReplicaLostError as lost:
                    if call.replica is not None or not course.can_go_on(died=lost.died):
                        raise
                    names = [lost.replica] if lost.replica else []
                    self.num_lost += 1
                    course.go_on(died=lost.died)
                    call = replace(call, avoid=(*call.avoid, *names))
        except (ReplicaLostError, BrokenAnswerError, VlmServeError) as error:
            problem = error if isinstance(error, VlmServeError) else _broken(error)
            if not course.started:
                raise problem from None
            words = course.last_words(scope, problem)
            if words is None:
                raise _Began(problem) from None
            await send({"type": "http.response.body", "body": words, "more_body": False})

    async def _send_one(self, call: Call, course: Course, send: Send) -> None:
        call = replace(call, attempt=course.attempt)
        async with contextlib.aclosing(self.fleet.answers(call)) as answers:
            async for message in answers:
                if course.started and message["type"] == "http.response.start":
                    raise BrokenAnswerError(f"refused with {message['status']} in the middle")
                await send(for_client(message))
                course.passed(message)

    @contextlib.contextmanager
    def _admitted(self) -> Iterator[None]:
        """Counts one request in and out. Raises DrainingError or OverloadedError at once."""
        if self.requests.draining:
            raise DrainingError("the server is shutting down", code="shutting_down")
        names = self.fleet.names
        if not names:
            raise no_replica()
        num_open = self.requests.num_open
        if num_open >= self._seats * len(names):
            raise OverloadedError(f"{num_open} requests are open already", code="queue_full")
        with self.requests.counted():
            yield

    def _named_replica(self, scope: Scope, single: bool) -> tuple[bytes, str | None]:
        """The query without `replica`, and the replica that it named; else the first, if only one
        is to be asked. Raises UnknownReplicaError."""
        if not scope["path"].startswith("/v1/cache/"):
            return scope["query_string"], None
        pairs = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        named = [value for name, value in pairs if name == "replica"]
        rest = urlencode([pair for pair in pairs if pair[0] != "replica"]).encode()
        names = self.fleet.names
        if not names:
            raise no_replica()
        if not named:
            return scope["query_string"], names[0] if single else None
        if named[-1] not in names:
            raise UnknownReplicaError(
                f"there is no replica {named[-1][:64]!r}, but " + ", ".join(names), param="replica"
            )
        return rest, named[-1]


class _Began(Exception):
    """An answer whose status has been sent broke off: its connection must end."""

    def __init__(self, error: VlmServeError) -> None:
        self.error = error


def plain(scope: Scope, query: bytes | None = None) -> dict[str, Any]:
    """What a replica is told of a request: plain data, without credentials."""
    state = scope.get("state", {})
    headers = [(bytes(name), bytes(value)) for name, value in scope["headers"]]
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": scope["http_version"],
        "method": scope["method"],
        "scheme": scope["scheme"],
        "path": scope["path"],
        "raw_path": scope.get("raw_path", scope["path"].encode()),
        "root_path": "",
        "query_string": scope["query_string"] if query is None else query,
        "headers": [pair for pair in headers if pair[0] not in CREDENTIALS],
        "client": scope["client"],
        "server": scope["server"],
        "state": {name: state[name] for name in STATE if name in state},
    }


def _broken(error: Exception) -> VlmServeError:
    if isinstance(error, BrokenAnswerError):
        return VlmServeError("a replica has failed at this request", code="internal_error")
    return OverloadedError("the replica that had this request is lost", code="replica_lost")
