"""The gateway's view of its replicas: one channel to each, for all answers.

Everything in this module runs on the gateway's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ray.exceptions import RayActorError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.types import Message

from vlm_serve.deploy.channel import BEGUN, NumberedMessage, read_batches
from vlm_serve.deploy.shared_state import SHARED_STATE
from vlm_serve.errors import OverloadedError, VlmServeError
from vlm_serve.routing.view import RequestUsage
from vlm_serve.server.failover.attempt import USAGE

_log = logging.getLogger(__name__)

TICK_SECONDS = 0.25
LAST_MESSAGES_SECONDS = 5.0
"""Grace period for an ended call's last messages, which may still be on the channel."""
MAX_UNREAD_BYTES = 64 << 20
"""Per answer. With more unread bytes in more than one message, the answer is aborted."""


class ReplicaLostError(Exception):
    """The replica with the request died or is silent, or no replica took the request in time.

    Attributes:
        replica: its name, None if no replica had the request.
        died: the replica did not shut down in order.
    """

    def __init__(self, replica: str | None, *, died: bool = True) -> None:
        super().__init__(f"replica {replica} is lost")
        self.replica = replica
        self.died = died


class BrokenAnswerError(Exception):
    """A replica failed at an answer; another replica would fail too."""


@dataclass(frozen=True, slots=True)
class ReplicaCall:
    """A request as it is sent to a replica; see `EngineReplica.answer`."""

    scope: dict[str, Any]
    body: bytes
    keys: Sequence[bytes] = ()
    attempt: Any = None
    replica: str | None = None
    avoid: Sequence[str] = ()


@dataclass(slots=True, eq=False)
class _OpenCall:
    """A call in progress.

    Attributes:
        replica: the replica that must answer, or has begun to.
        unread_bytes: body bytes of queued messages.
        silent_seconds: time without a channel to the replica, or without a replica.
        closed: set when the reader of the messages has left.
    """

    messages: asyncio.Queue[Message | BaseException | None] = field(default_factory=asyncio.Queue)
    replica: str | None = None
    unread_bytes: int = 0
    silent_seconds: float = 0.0
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, message: Message | BaseException | None) -> None:
        if isinstance(message, dict):
            self.unread_bytes += len(message.get("body", b""))
            if self.unread_bytes > MAX_UNREAD_BYTES and not self.messages.empty():
                message = BrokenAnswerError("the client does not read its answer")
        self.messages.put_nowait(message)


@dataclass(slots=True, eq=False)
class _OpenChannel:
    """The channel to one replica.

    Attributes:
        reading: task that reads the channel.
        silent_seconds: time without a sign of life. Counted in ticks of the event loop, so that a
            blocked loop is not held against the replica.
    """

    reading: asyncio.Task[None]
    silent_seconds: float = 0.0


class ReplicaPool:
    """The replicas of one deployment.

    Args:
        handle: Serve's handle of the deployment.
        silence_timeout: seconds after which a silent replica counts as lost.
    """

    def __init__(self, handle: DeploymentHandle[Any], silence_timeout: float) -> None:
        self._handle = handle
        self._timeout = silence_timeout
        self._name = secrets.token_hex(8)
        self._numbers = itertools.count()
        self._open: dict[int, _OpenCall] = {}
        self._channels: dict[str, _OpenChannel] = {}
        self._disconnected: set[str] = set()
        self._watching: set[asyncio.Task[None]] = set()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the replicas that serve, as far as known."""
        return tuple(filter(SHARED_STATE.serves, self.running))

    @property
    def running(self) -> tuple[str, ...]:
        """Names of the running replicas, as far as known; see `admit`."""
        unreachable = self.unreachable
        return tuple(name for name in SHARED_STATE.replicas if name not in unreachable)

    @property
    def unreachable(self) -> set[str]:
        """Silent or disconnected replicas; Ray may learn of their death later."""
        silent = {
            name
            for name, channel in self._channels.items()
            if channel.silent_seconds > self._timeout
        }
        return silent | self._disconnected

    def admit(self, names: frozenset[str]) -> None:
        """Let only these replicas serve from now on."""
        SHARED_STATE.admitted = names

    def expel(self, name: str) -> None:
        """Have other replicas take over what one does that is no longer admitted."""
        self._fail_calls(name)

    async def decide(self, name: str, order: str, *, go: bool) -> None:
        """Tell a replica whether to swap the weights that it has read for an order. Raise
        ReplicaLostError if it cannot be told."""
        try:
            async with asyncio.timeout(self._timeout):
                await self._handle.decide.remote(order, go=go, replica=name)
        except Exception as error:
            _log.warning("replica %s was not told of a decision: %r", name, error)
            raise _lost(name) from error

    async def run(self) -> None:
        """Keep a channel to every replica and watch for silent ones, until cancelled."""
        self._handle.options(stream=True)  # creates the router, which fills the shared state
        try:
            while True:
                self._check_replicas()
                await asyncio.sleep(TICK_SECONDS)
        finally:
            for channel in self._channels.values():
                channel.reading.cancel()

    async def answers(self, call: ReplicaCall) -> AsyncGenerator[Message, None]:
        """Yield the messages of an answer. Leaving early ends the request.

        Raises:
            ReplicaLostError: the answer did not complete; another replica may resume it.
            BrokenAnswerError: the answer did not complete.
            OverloadedError: there is no replica, or none has capacity.
        """
        number, open_call = next(self._numbers), _OpenCall(replica=call.replica)
        self._open[number] = open_call
        response = self._handle.answer.remote(
            self._name,
            number,
            call.scope,
            call.body,
            keys=tuple(call.keys),
            attempt=call.attempt,
            replica=call.replica,
            avoid=tuple({*call.avoid, *self.unreachable}),
        )
        watching = asyncio.ensure_future(self._watch(response, number, open_call))
        self._watching.add(watching)
        watching.add_done_callback(self._watching.discard)
        ended, usage = False, None
        try:
            while (message := await open_call.messages.get()) is not None:
                if isinstance(message, BaseException):
                    raise message
                open_call.unread_bytes -= len(message.get("body", b""))
                usage = message.get(USAGE, usage)
                if message["type"] != BEGUN["type"]:
                    yield message
            ended = True
        finally:
            open_call.closed.set()
            if not ended:  # off the loop: each cancellation is a remote call
                asyncio.get_running_loop().run_in_executor(None, response.cancel)
            del self._open[number]
            SHARED_STATE.finish(number, _usage_of(usage, call))

    async def _watch(self, response: Any, number: int, open_call: _OpenCall) -> None:
        """Fail an open call if its remote call ends without an answer."""
        try:
            taken = await response
        except asyncio.CancelledError:
            return  # cancelled before any replica had it
        except (RayActorError, TaskCancelledError):
            open_call.put(_lost(open_call.replica or SHARED_STATE.routed.get(number)))
        except (BackPressureError, DeploymentUnavailableError):
            open_call.put(OverloadedError("no replica can take the request", code="no_replica"))
        except RayTaskError as error:
            if not open_call.closed.is_set():
                _log.error("a replica failed at a request", exc_info=error)
            open_call.put(BrokenAnswerError("a replica failed"))
        except Exception as error:
            _log.error("a request could not be sent", exc_info=error)
            open_call.put(BrokenAnswerError("a request could not be sent"))
        else:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_MESSAGES_SECONDS if taken else 0):
                    await open_call.closed.wait()
            open_call.put(_lost(open_call.replica or SHARED_STATE.routed.get(number)))

    def _check_replicas(self) -> None:
        running = SHARED_STATE.replicas
        self._disconnected &= set(running)
        for name in running:
            if name not in self._channels:
                reading = asyncio.ensure_future(self._read_channel(name))
                self._channels[name] = _OpenChannel(reading)
                reading.add_done_callback(partial(self._channel_ended, name))
        busy = {open_call.replica for open_call in self._open.values()}
        for name, channel in tuple(self._channels.items()):
            channel.silent_seconds += TICK_SECONDS
            silent = channel.silent_seconds > self._timeout
            if name not in running and (name not in busy or silent):
                channel.reading.cancel()  # retired, and idle or silent
            elif silent:
                self._fail_calls(name)
        for number, open_call in tuple(self._open.items()):
            if open_call.replica not in self._channels:
                open_call.silent_seconds += TICK_SECONDS
                if open_call.silent_seconds > self._timeout:
                    open_call.put(_lost(open_call.replica or SHARED_STATE.routed.get(number)))

    async def _read_channel(self, name: str) -> None:
        try:
            address = await self._handle.open_channel.remote(self._name, replica=name)
            if address is not None:
                async for batch in read_batches(address):
                    self._disconnected.discard(name)
                    self._channels[name].silent_seconds = 0.0
                    self._deliver(name, batch)
        except Exception as error:
            _log.warning("the channel to replica %s has ended: %s", name, type(error).__name__)

    def _channel_ended(self, name: str, _: asyncio.Task[None]) -> None:
        if name in SHARED_STATE.replicas:
            self._disconnected.add(name)
        del self._channels[name]
        self._fail_calls(name)

    def _deliver(self, name: str, batch: Sequence[NumberedMessage]) -> None:
        for number, message in batch:
            open_call = self._open.get(number)
            if open_call is not None:
                late = open_call.replica is None and not SHARED_STATE.serves(name)
                open_call.replica = name
                # A request may be on its way when its replica is taken out.
                open_call.put(_lost(name) if late else message)

    def _fail_calls(self, name: str) -> None:
        for open_call in self._open.values():
            if open_call.replica == name:
                open_call.put(_lost(name))


def _usage_of(
    usage: Sequence[Mapping[str, int] | None] | None, call: ReplicaCall
) -> RequestUsage | None:
    """Return a request's usage from its last message.

    None if no message had counts, or if they include those of an earlier attempt.
    """
    if usage is None or (call.attempt is not None and call.attempt.resumed):
        return None
    counts = [counted for counted in usage if counted is not None]
    names = "prompt_tokens", "cached_tokens", "completion_tokens"
    return RequestUsage(*(sum(count[name] for count in counts) for name in names))


def _lost(replica: str | None) -> ReplicaLostError:
    return ReplicaLostError(replica, died=replica not in SHARED_STATE.retired)


def no_replica() -> VlmServeError:
    """Return the error for clients while no replica is available."""
    return OverloadedError("no replica is available", code="no_replica")
