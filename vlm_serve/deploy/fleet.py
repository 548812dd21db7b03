"""The front's view of its replicas: one link to each, on which all answers come.

Everything here runs on the front's event loop.
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

from vlm_serve.deploy.board import BOARD
from vlm_serve.deploy.box import BEGUN, Letter
from vlm_serve.deploy.link import letters_at
from vlm_serve.errors import OverloadedError, VlmServeError
from vlm_serve.routing.view import Spent
from vlm_serve.server.failover.attempt import USAGE

_log = logging.getLogger(__name__)

TICK_SECONDS = 0.25
LAST_LETTERS_SECONDS = 5.0
"""A call that has ended has put all its letters into its box; so long they may be on their way."""
MAX_WAITING_BYTES = 64 << 20
"""Of one answer whose client does not read; more than one message beyond it ends the answer."""


class ReplicaLostError(Exception):
    """The replica that had a request has died or is silent, or none has taken it in time.

    Attributes:
        replica: its name, None if nobody had it.
        died: it did not end in order.
    """

    def __init__(self, replica: str | None, *, died: bool = True) -> None:
        super().__init__(f"replica {replica} is lost")
        self.replica = replica
        self.died = died


class BrokenAnswerError(Exception):
    """A replica has failed at an answer; another one would too."""


@dataclass(frozen=True, slots=True)
class Call:
    """A request as it is sent to a replica; see `EngineReplica.answer`."""

    scope: dict[str, Any]
    body: bytes
    keys: Sequence[bytes] = ()
    tokens: int = 0
    attempt: Any = None
    replica: str | None = None
    avoid: Sequence[str] = ()


@dataclass(slots=True, eq=False)
class _Exchange:
    """A call that has not ended.

    Attributes:
        replica: that is to answer it, or has begun to.
        waiting: bytes of letters that nobody has read yet.
        silent: seconds during which there was no link to its replica, or none had begun.
        over: set when nobody waits for letters any more.
    """

    letters: asyncio.Queue[Message | BaseException | None] = field(default_factory=asyncio.Queue)
    replica: str | None = None
    waiting: int = 0
    silent: float = 0.0
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, letter: Message | BaseException | None) -> None:
        if isinstance(letter, dict):
            self.waiting += len(letter.get("body", b""))
            if self.waiting > MAX_WAITING_BYTES and not self.letters.empty():
                letter = BrokenAnswerError("the client does not read its answer")
        self.letters.put_nowait(letter)


@dataclass(slots=True, eq=False)
class _Link:
    """To one replica.

    Attributes:
        silent: seconds without a sign of life, counted in ticks of the event loop, so that what
            holds up the loop is not held against the replica.
    """

    following: asyncio.Task[None]
    silent: float = 0.0


class Fleet:
    """The replicas of one deployment.

    Args:
        handle: Serve's, of the deployment.
        silence_timeout: seconds after which a silent replica counts as lost.
    """

    def __init__(self, handle: DeploymentHandle[Any], silence_timeout: float) -> None:
        self._handle = handle
        self._timeout = silence_timeout
        self._name = secrets.token_hex(8)
        self._numbers = itertools.count()
        self._open: dict[int, _Exchange] = {}
        self._links: dict[str, _Link] = {}
        self._cut_off: set[str] = set()
        self._watching: set[asyncio.Task[None]] = set()

    @property
    def names(self) -> tuple[str, ...]:
        """The replicas that run, as far as is known here."""
        missing = self.missing
        return tuple(name for name in BOARD.replicas if name not in missing)

    @property
    def missing(self) -> set[str]:
        """Those of which nothing has been heard for too long, or whose link has ended: Ray may
        learn later that they are dead."""
        silent = {name for name, link in self._links.items() if link.silent > self._timeout}
        return silent | self._cut_off

    async def run(self) -> None:
        """Until it is cancelled: keeps a link to every replica, and looks who is silent."""
        self._handle.options(stream=True)  # makes the router, which fills the board
        try:
            while True:
                self._tend()
                await asyncio.sleep(TICK_SECONDS)
        finally:
            for link in self._links.values():
                link.following.cancel()

    async def answers(self, call: Call) -> AsyncGenerator[Message, None]:
        """The messages of an answer. Leaving early ends the request.

        Raises:
            ReplicaLostError: it did not come to its end, and another replica may be asked.
            BrokenAnswerError: it did not come to its end.
            OverloadedError: there is no replica, or no room.
        """
        number, exchange = next(self._numbers), _Exchange(replica=call.replica)
        self._open[number] = exchange
        response = self._handle.answer.remote(
            self._name,
            number,
            call.scope,
            call.body,
            keys=tuple(call.keys),
            tokens=call.tokens,
            attempt=call.attempt,
            replica=call.replica,
            avoid=tuple({*call.avoid, *self.missing}),
        )
        watching = asyncio.ensure_future(self._watch(response, number, exchange))
        self._watching.add(watching)
        watching.add_done_callback(self._watching.discard)
        ended, usage = False, None
        try:
            while (letter := await exchange.letters.get()) is not None:
                if isinstance(letter, BaseException):
                    raise letter
                exchange.waiting -= len(letter.get("body", b""))
                usage = letter.get(USAGE, usage)
                if letter["type"] != BEGUN["type"]:
                    yield letter
            ended = True
        finally:
            exchange.over.set()
            if not ended:  # off the loop: each of these is a call of its own
                asyncio.get_running_loop().run_in_executor(None, response.cancel)
            del self._open[number]
            BOARD.over(number, _spent(usage, call))

    async def _watch(self, response: Any, number: int, exchange: _Exchange) -> None:
        """Tells an exchange how its call has ended, if that was not an answer."""
        try:
            taken = await response
        except asyncio.CancelledError:
            return  # it was ended before a replica had it
        except (RayActorError, TaskCancelledError):
            exchange.put(_lost(exchange.replica or BOARD.routed.get(number)))
        except (BackPressureError, DeploymentUnavailableError):
            exchange.put(OverloadedError("no replica can take the request", code="no_replica"))
        except RayTaskError as error:
            if not exchange.over.is_set():
                _log.error("a replica failed at a request", exc_info=error)
            exchange.put(BrokenAnswerError("a replica failed"))
        except Exception as error:
            _log.error("a request could not be sent", exc_info=error)
            exchange.put(BrokenAnswerError("a request could not be sent"))
        else:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_LETTERS_SECONDS if taken else 0):
                    await exchange.over.wait()
            exchange.put(_lost(exchange.replica))

    def _tend(self) -> None:
        running = BOARD.replicas
        self._cut_off &= set(running)
        for name in running:
            if name not in self._links:
                following = asyncio.ensure_future(self._follow(name))
                self._links[name] = _Link(following)
                following.add_done_callback(partial(self._ended, name))
        busy = {exchange.replica for exchange in self._open.values()}
        for name, link in tuple(self._links.items()):
            link.silent += TICK_SECONDS
            if name not in running and (name not in busy or link.silent > self._timeout):
                link.following.cancel()  # it may end now
            elif link.silent > self._timeout:
                self._lose(name)
        for number, exchange in tuple(self._open.items()):
            if exchange.replica not in self._links:
                exchange.silent += TICK_SECONDS
                if exchange.silent > self._timeout:
                    exchange.put(_lost(exchange.replica or BOARD.routed.get(number)))

    async def _follow(self, name: str) -> None:
        try:
            address = await self._handle.link.remote(self._name, replica=name)
            if address is not None:
                async for letters in letters_at(address):
                    self._cut_off.discard(name)
                    self._links[name].silent = 0.0
                    self._deliver(name, letters)
        except Exception as error:
            _log.warning("the link to replica %s has ended: %s", name, type(error).__name__)

    def _ended(self, name: str, _: asyncio.Task[None]) -> None:
        if name in BOARD.replicas:
            self._cut_off.add(name)
        del self._links[name]
        self._lose(name)

    def _deliver(self, name: str, letters: Sequence[Letter]) -> None:
        for number, message in letters:
            exchange = self._open.get(number)
            if exchange is not None:
                exchange.replica = name
                exchange.put(message)

    def _lose(self, name: str) -> None:
        for exchange in self._open.values():
            if exchange.replica == name:
                exchange.put(_lost(name))


def _spent(usage: Sequence[Mapping[str, int] | None] | None, call: Call) -> Spent | None:
    """What a request has turned out to be, as its last letter told; None: none did, or its counts
    are those of an attempt before."""
    if usage is None or (call.attempt is not None and call.attempt.resumed):
        return None
    counts = [each for each in usage if each is not None]
    names = "prompt_tokens", "cached_tokens", "completion_tokens"
    return Spent(*(sum(each[name] for each in counts) for name in names))


def _lost(replica: str | None) -> ReplicaLostError:
    return ReplicaLostError(replica, died=replica not in BOARD.left)


def no_replica() -> VlmServeError:
    """What a client is told while none can answer."""
    return OverloadedError("no replica is there to answer", code="no_replica")
