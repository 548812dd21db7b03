"""The operator's orders to all replicas: other weights, pause and sleep, all or none
(docs/rollouts.md#replicas).

A replica serves only while it is as the deployment is. One that is new, or has not followed an
order, is brought there first. Everything here runs on the gateway's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Iterable, Mapping
from dataclasses import replace
from typing import Any

from fastapi import Request
from starlette.responses import Response
from starlette.types import Message

from vlm_serve.deploy.channel import ORDER, READY_TYPE
from vlm_serve.deploy.replica_pool import (
    ReplicaCall,
    ReplicaPool,
    no_replica,
)
from vlm_serve.deploy.replies import FAILURES, error_of, forwarded_scope, replies_of, response_of
from vlm_serve.errors import OverloadedError, VlmServeError
from vlm_serve.server.api.weights import check_authority
from vlm_serve.server.config import ServerConfig
from vlm_serve.server.http.body import read_body

_log = logging.getLogger(__name__)

LOOK_SECONDS = 0.25
AGAIN_SECONDS = 10.0
"""After a try in vain to bring a replica to the deployment's state, before the next one."""
UPDATES = ("/update_weights_from_disk", "/update_weights_from_tensor")
PAUSES = ("/pause", "/pause_generation")
RESUMES = ("/resume", "/continue_generation")
SLEEPS = ("/sleep", "/release_memory_occupation", "/wake_up", "/resume_memory_occupation")
_PARTS = frozenset({"weights", "kv_cache"})
_NO_START = "it has other weights than the deployment started with: update from a folder"
_IN_MEMORY = "the weights came from memory, where they are no more: update from a folder"


class Orders:
    """Gives orders to all replicas, and lets a replica serve once it has followed them.

    Args:
        pool: the replicas.
        config: the server's options.
        allowed: the option `allow_weight_updates`; without it nothing is ever ordered.

    Attributes:
        changes: is odd while weights are swapped, and differs once they were.
        parts: what the replicas have given back by order.
        apart: why a replica does not serve, by its name.
    """

    def __init__(self, pool: ReplicaPool, config: ServerConfig, *, allowed: bool) -> None:
        self.changes = 0
        self.parts: frozenset[str] = frozenset()
        self.apart: dict[str, str] = {}
        self._pool, self._config, self._allowed = pool, config, allowed
        self._weights: str | None = None
        self._source: ReplicaCall | None = None
        """The update from a folder that brings a replica from its start to the weights."""
        self._lost = _NO_START
        """The reason if there is no such update."""
        self._paused = False
        self._serving: frozenset[str] = frozenset()
        self._tried: dict[str, float] = {}
        self._turns, self._cut = asyncio.Lock(), asyncio.Event()

    async def run(self) -> None:
        """Bring new replicas to the deployment's state until cancelled."""
        if not self._allowed:
            return
        self._serve(())
        while True:
            running = set(self._pool.running)
            for known in (self._tried, self.apart):
                for name in known.keys() - running:
                    del known[name]
            self._serve(self._serving & running)
            for name in sorted(running - self._serving):
                if time.monotonic() - self._tried.get(name, -AGAIN_SECONDS) >= AGAIN_SECONDS:
                    async with self._turns:
                        await self._join(name)
            await asyncio.sleep(LOOK_SECONDS)

    def may_continue(self, changes: int) -> bool:
        """Return True if an answer that began at `changes` has the same weights everywhere."""
        return changes == self.changes and not changes % 2

    async def follow(self, request: Request) -> Response:
        """Answer a request of `UPDATES`, `PAUSES`, `RESUMES` or `SLEEPS`.

        Raises:
            VlmServeError: the client may not, or a replica has not followed; the others are as
                before then.
        """
        check_authority(request.scope, self._config, allowed=self._allowed)
        body = await read_body(request, self._config.max_body_bytes)
        call = ReplicaCall(forwarded_scope(request.scope), body)
        path = request.scope["path"]
        if path in (*PAUSES, *RESUMES):
            self._cut.set()  # a pause that waits for requests in flight holds the turn
        async with self._turns:
            self._cut.clear()
            if path in UPDATES:
                return await self._update(call)
            return await self._order(call, path)

    async def _order(self, call: ReplicaCall, path: str) -> Response:
        """Have all replicas follow an order, or none."""
        names = self._targets()
        asking = asyncio.ensure_future(replies_of(self._pool, call, names))
        cut = asyncio.ensure_future(self._cut.wait())
        await asyncio.wait({asking, cut}, return_when=asyncio.FIRST_COMPLETED)
        cut.cancel()
        if not asking.done() and path in PAUSES:
            self._paused = False
            await replies_of(self._pool, _own(RESUMES[1], {}), names)
        replies = await asking
        self._take_out(set(names) - replies.keys(), f"it was lost at {path}")
        if not replies:
            raise OverloadedError("all replicas were lost", code="replica_lost")
        refusals = [name for name, reply in replies.items() if reply.status_code != 200]
        done = [name for name in replies if name not in refusals]
        if not done:
            return replies[refusals[0]]
        if refusals:
            await self._match_all(done)
            raise _named(refusals[0], replies[refusals[0]])
        if path in SLEEPS:
            self.parts = frozenset(json.loads(bytes(replies[done[0]].body))["tags"])
        else:
            self._paused = path in PAUSES
        return replies[done[0]]

    async def _update(self, call: ReplicaCall) -> Response:
        """Have all replicas read weights, and then all swap them."""
        from_folder = call.scope["path"] == UPDATES[0]
        if not (from_folder or self._serving):
            problem = "no replica has the weights that tensors would change: update from a folder"
            raise OverloadedError(problem, code="no_replica")
        names, order = self._targets(), secrets.token_hex(8)
        call = replace(call, scope={**call.scope, ORDER: order})
        reading = [_Update(self._pool, call, name) for name in names]
        decided = False
        try:
            await asyncio.gather(*(each.read() for each in reading))
            trouble = next((each for each in reading if each.weights is None), None)
            digests = {each.weights for each in reading}
            if trouble is not None:
                raise trouble.refusal()
            if len(digests) > 1:
                raise OverloadedError("the replicas have read different weights", code="unequal")
            decided = True
        finally:
            if not decided:
                await asyncio.gather(*(each.decide(order, go=False) for each in reading))
        self.changes += 1
        try:
            await asyncio.gather(*(each.decide(order, go=True) for each in reading))
        finally:
            self.changes += 1
        done = [each for each in reading if each.status == 200]
        left = [each.name for each in reading if each not in done]
        self._take_out(
            left if done else [each.name for each in reading if not each.status],
            "it has not taken the weights of an update",
        )
        if not done:
            raise reading[0].refusal()
        (self._weights,) = digests
        self._source = call if from_folder else None
        self._lost = _IN_MEMORY
        self.parts -= {"weights"}
        self._tried.clear()  # what could not be brought to the old weights may be to these
        assert done[0].answer is not None
        return done[0].answer

    def _targets(self) -> tuple[str, ...]:
        """Return the replicas that serve; if none does, all that run. Raise OverloadedError if
        there are none."""
        running = self._pool.running
        if not running:
            raise no_replica()
        # One out of reach is not given the order. It may be back before `run` looks again, so it
        # serves no longer from here on: whoever serves has followed.
        self._serve(self._serving.intersection(running))
        return tuple(name for name in running if name in self._serving) or running

    async def _join(self, name: str) -> None:
        """Bring a replica to the deployment's state and let it serve, or say why it cannot."""
        try:
            await self._bring(name)
        except Exception as error:
            self._tried[name] = time.monotonic()
            reason = f"it could not be asked ({type(error).__name__})"
            reason = error.message if isinstance(error, VlmServeError) else reason
            if self.apart.get(name) != reason:
                _log.error("replica %s does not serve: %s", name, reason)
            self.apart[name] = reason
            return
        self.apart.pop(name, None)
        self._serve(self._serving | {name})
        _log.info("replica %s serves, with weights %s", name, self._weights)

    async def _bring(self, name: str) -> None:
        """Bring a replica to the deployment's weights, and to its pause and sleep."""
        info = await self._ask(_own("/server_info", None), name)
        found = json.loads(bytes(info.body))["weights"]
        start = self._source is None and self._lost is _NO_START
        if self._weights is None or (start and not self._serving):
            self._weights = found
        if self._source is not None:
            scope = {key: value for key, value in self._source.scope.items() if key != ORDER}
            updated = await self._ask(replace(self._source, scope=scope), name)
            found = json.loads(bytes(updated.body))["weights"]
        if found != self._weights:
            changed = "the folder of the last update has changed: update from another one"
            raise VlmServeError(changed if self._source is not None else self._lost)
        await self._match(name)

    async def _match(self, name: str) -> None:
        """Have a replica sleep and pause as the deployment does."""
        for path, tags in ((SLEEPS[3], _PARTS - self.parts), (SLEEPS[1], self.parts)):
            if tags:
                await self._ask(_own(path, {"tags": sorted(tags)}), name)
        if self._paused:
            await self._ask(_own(PAUSES[1], {"mode": "retract"}), name)
        else:
            await self._ask(_own(RESUMES[1], {}), name)

    async def _match_all(self, names: Iterable[str]) -> None:
        """Undo what some replicas have done of an order that others have refused."""
        for name in names:
            try:
                await self._match(name)
            except FAILURES:
                self._take_out([name], "it could not be brought back to the deployment's state")

    async def _ask(self, call: ReplicaCall, name: str) -> Response:
        """Return a replica's reply. Raise VlmServeError for another status than 200."""
        answers = self._pool.answers(replace(call, replica=name))
        reply = response_of([message async for message in answers])
        if reply.status_code != 200:
            raise error_of(reply.status_code, bytes(reply.body))
        return reply

    def _take_out(self, names: Iterable[str], reason: str) -> None:
        """Let replicas serve no longer, until they are as the deployment is."""
        gone = [name for name in names if name in self._pool.running]
        self._serve(self._serving.difference(names))
        for name in gone:
            _log.error("replica %s does not serve: %s", name, reason)
            self.apart[name] = reason
            self._tried.pop(name, None)
            self._pool.expel(name)

    def _serve(self, names: Iterable[str]) -> None:
        self._serving = frozenset(names)
        self._pool.admit(self._serving)


class _Update:
    """An update of one replica, which waits between reading weights and swapping them.

    Attributes:
        weights: digest of what it has read; None: it has not.
        answer: what it has said at the end; None: it is lost, or still waits.
    """

    def __init__(self, pool: ReplicaPool, call: ReplicaCall, name: str) -> None:
        self.name = name
        self.weights: str | None = None
        self.answer: Response | None = None
        self._pool = pool
        self._messages: AsyncGenerator[Message, None] = pool.answers(replace(call, replica=name))

    @property
    def status(self) -> int | None:
        return None if self.answer is None else self.answer.status_code

    async def read(self) -> None:
        """Wait until the replica has read the weights, or has refused them."""
        with contextlib.suppress(*FAILURES):
            first = await anext(self._messages)
            if first["type"] == READY_TYPE:
                self.weights = first["weights"]
            else:
                self.answer = response_of([first, *[each async for each in self._messages]])

    async def decide(self, order: str, *, go: bool) -> None:
        """Have the replica swap what it has read or drop it, and wait until it has."""
        if self.weights is None:
            return
        try:
            await self._pool.decide(self.name, order, go=go)
            self.answer = response_of([message async for message in self._messages])
        except (*FAILURES, TimeoutError):
            await self._messages.aclose()

    def refusal(self) -> VlmServeError:
        """Return why the replica has not followed, with its name."""
        if self.answer is not None:
            return _named(self.name, self.answer)
        problem = f"replica {self.name} was lost during the update: nothing has changed"
        return OverloadedError(problem, code="replica_lost")


def _own(path: str, body: Mapping[str, Any] | None) -> ReplicaCall:
    """Return a request of the gateway itself, as the operator's; without a body: GET."""
    data = b"" if body is None else json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))]
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "GET" if body is None else "POST",
        "scheme": "http",
        "path": path,
        "query_string": b"",
        "headers": headers,
        "client": None,
        "server": None,
    }
    return ReplicaCall(forwarded_scope(scope), data)


def _named(name: str, reply: Response) -> VlmServeError:
    """Return the error of a reply, with the replica's name in its message."""
    error = error_of(reply.status_code, bytes(reply.body))
    error.message = f"replica {name}: {error.message}"
    return error
