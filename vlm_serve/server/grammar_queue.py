"""The queue of grammars to compile."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from vlm_serve.errors import EngineClosedError, OverloadedError
from vlm_serve.grammar.state import Grammar
from vlm_serve.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from vlm_serve.engine.engine import Engine

_log = logging.getLogger(__name__)

MAX_QUEUED_GRAMMARS = 16
"""Grammars of one share that may wait."""


class GrammarQueue:
    """Compiles grammars one at a time, in turns of the API keys that wait. It is used on the event
    loop only.

    Args:
        engine: the engine whose compiler is used.
        pool: one thread that waits for the compiler.
    """

    def __init__(self, engine: Engine, pool: ThreadPoolExecutor) -> None:
        self._engine = engine
        self._pool = pool
        self._busy = False
        self._waiting: OrderedDict[bytes, deque[asyncio.Future[None]]] = OrderedDict()

    def warm_up(self) -> None:
        """Start the compiler in the background; it takes seconds.

        Requests for it meanwhile wait only for the remaining time.
        """
        self._pool.submit(self._start_compiler)

    def _start_compiler(self) -> None:
        try:
            self._engine.grammars.warm()
        except EngineClosedError:
            return
        except OverloadedError as error:  # It was killed, as all are that an end meets early.
            _log.warning("%s; the next grammar tries again", error)
        except Exception:
            _log.exception("the grammar compiler did not start; the next grammar tries again")

    async def compile(
        self, form: StructuredOutputs, after: bytes, owner: bytes = b"", share: bytes = b""
    ) -> Grammar:
        """Return the grammar of a form, compiled now if it is new to its owner.

        Args:
            form: the form of the answer.
            after: text of the answer up to which nothing is enforced; empty: all is.
            owner: key of the prompt's tenant and adapter; others' grammars are not found.
            share: whose turn it waits for, see `auth.share_of`.

        Raises:
            InvalidRequestError: the form cannot be enforced.
            OverloadedError: too many grammars of this share wait already.
        """
        grammars = self._engine.grammars
        known = grammars.find(form, after, owner)
        if known is not None:
            return known
        await self._turn(share)
        loop = asyncio.get_running_loop()
        try:
            work = self._pool.submit(grammars.compile, form, after, owner)
        except RuntimeError:  # The pool is shut down.
            self._next()
            raise EngineClosedError("the engine has stopped", code="engine_stopped") from None
        # A request that leaves does not end what is being compiled, so the turn lasts until then.
        work.add_done_callback(lambda _: self._soon(loop))
        return await asyncio.wrap_future(work)

    async def _turn(self, share: bytes) -> None:
        """Wait until it is this share's turn, and take it; `_next` ends it."""
        if not self._busy:
            self._busy = True
            return
        waiting = self._waiting.setdefault(share, deque())
        if len(waiting) >= MAX_QUEUED_GRAMMARS:
            raise OverloadedError(
                f"{MAX_QUEUED_GRAMMARS} grammars of this key wait to be compiled already",
                code="queue_full",
            )
        turn = asyncio.get_running_loop().create_future()
        waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self._next()
            else:
                waiting.remove(turn)
                if not waiting:
                    del self._waiting[share]
            raise

    def _soon(self, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.suppress(RuntimeError):  # The loop is closed.
            loop.call_soon_threadsafe(self._next)

    def _next(self) -> None:
        """Give the turn to the share that has waited longest for one."""
        if not self._waiting:
            self._busy = False
            return
        share, waiting = self._waiting.popitem(last=False)
        waiting.popleft().set_result(None)
        if waiting:
            self._waiting[share] = waiting  # Behind all others.
