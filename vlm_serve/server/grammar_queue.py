"""The queue of grammars to compile."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from vlm_serve.errors import EngineClosedError, OverloadedError
from vlm_serve.grammar.state import Grammar
from vlm_serve.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from vlm_serve.engine.engine import Engine

_log = logging.getLogger(__name__)

MAX_QUEUED_GRAMMARS = 16


class GrammarQueue:
    """Compiles grammars one at a time. It is used on the event loop only.

    Args:
        engine: the engine whose compiler is used.
        pool: one thread that waits for the compiler.
    """

    def __init__(self, engine: Engine, pool: ThreadPoolExecutor) -> None:
        self._engine = engine
        self._pool = pool
        self._num_queued = 0

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
        except Exception:
            _log.exception("the grammar compiler did not start; the next grammar tries again")

    async def compile(self, form: StructuredOutputs, after: bytes) -> Grammar:
        """Return the grammar of a form, compiled now if it is new.

        Args:
            form: the form of the answer.
            after: text of the answer up to which nothing is enforced; empty: all is.

        Raises:
            InvalidRequestError: the form cannot be enforced.
            OverloadedError: too many grammars wait already.
        """
        grammars = self._engine.grammars
        found = grammars.find(form, after)
        if found is not None:
            return found
        if self._num_queued >= MAX_QUEUED_GRAMMARS:
            raise OverloadedError(
                f"{MAX_QUEUED_GRAMMARS} grammars wait to be compiled already", code="queue_full"
            )
        self._num_queued += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._pool, grammars.compile, form, after
            )
        finally:
            self._num_queued -= 1
