"""All batches of a server: one of each owner runs at a time, the others wait in order."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from contextvars import Context
from dataclasses import dataclass, field

from starlette.types import ASGIApp

from vlm_serve.batch.file_store import FileStore, StoredFile
from vlm_serve.batch.record import Batch, Ending, Problem
from vlm_serve.batch.run import BatchRun, InvalidInputError, Surroundings
from vlm_serve.errors import EngineClosedError, InvalidRequestError, VlmServeError
from vlm_serve.server.http.auth import Owner
from vlm_serve.server.http.errors import DrainingError, NotFoundError

_log = logging.getLogger(__name__)

MAX_BATCHES = 500
"""Most batches of an owner that are remembered."""


class TooManyBatchesError(VlmServeError):
    """The owner has as many batches as are allowed: HTTP 429."""

    status = 429
    type = "rate_limit_error"


@dataclass(slots=True)
class _Account:
    """Batches of one owner.

    Attributes:
        batches: by id, the oldest first.
        waiting: those that have not begun.
        running: task that runs one after the other.
    """

    batches: dict[str, Batch] = field(default_factory=dict)
    waiting: deque[Batch] = field(default_factory=deque)
    running: asyncio.Task[None] | None = None


class Batches:
    """The batches. They are used on the event loop only.

    Args:
        around: the parts of the server that they use.

    Attributes:
        app: the server's routes without authentication; set before the first batch.
    """

    def __init__(self, around: Surroundings) -> None:
        self.app: ASGIApp | None = None
        self._around = around
        self._accounts: dict[Owner, _Account] = {}
        self._stopped = False

    @property
    def store(self) -> FileStore:
        """The files of clients."""
        return self._around.store

    def find(self, owner: Owner, batch_id: str) -> Batch:
        """Return a batch of an owner.

        Raises:
            NotFoundError: the owner has none of that id.
        """
        account = self._accounts.get(owner)
        batch = account and account.batches.get(batch_id)
        if not batch:
            raise NotFoundError(
                f"there is no batch {batch_id[:128]!r}", param="batch_id", code="batch_not_found"
            )
        return batch

    def batches(self, owner: Owner) -> list[Batch]:
        """Return the batches of an owner, the oldest first."""
        account = self._accounts.get(owner)
        return [] if account is None else list(account.batches.values())

    def create(
        self,
        owner: Owner,
        file: StoredFile,
        endpoint: str,
        window: str,
        seconds: int,
        metadata: dict[str, str] | None = None,
        output_seconds: int | None = None,
    ) -> Batch:
        """Begin a batch, or let it wait for the owner's other ones.

        Args:
            file: the input; it cannot be deleted before the batch has ended.
            window, seconds: time for the batch, in the client's form and in seconds.
            output_seconds: see `Batch`.

        Raises:
            DrainingError: the server is shutting down.
            TooManyBatchesError: too many batches of the owner have not ended.
        """
        if self._stopped:
            raise DrainingError("the server is shutting down", code="shutting_down")
        account = self._accounts.setdefault(owner, _Account())
        self._forget_oldest(account)
        now = int(time.time())
        batch = Batch(
            f"batch_{secrets.token_hex(16)}",
            owner,
            endpoint,
            file,
            window,
            now,
            now + seconds,
            metadata,
            output_seconds,
        )
        self.store.hold(file)
        loop = asyncio.get_running_loop()
        batch.timer = loop.call_later(seconds, self._end_early, batch, "expired")
        account.batches[batch.id] = batch
        account.waiting.append(batch)
        if account.running is None:
            # The context of the request that creates it holds that request's memory.
            account.running = loop.create_task(self._run_all(account), context=Context())
        return batch

    def cancel(self, batch: Batch) -> None:
        """Cancel a batch. Requests in progress end at once; answers so far are kept.

        Raises:
            InvalidRequestError: it has ended.
        """
        if batch.ended:
            raise InvalidRequestError(
                f"the batch {batch.id} has ended with the status {batch.status}",
                code="batch_ended",
            )
        if batch.ending is None:
            batch.enter("cancelling")
            self._end_early(batch, "cancelled")

    def stop(self) -> None:
        """End all batches, since the server ends; no other ones begin."""
        self._stopped = True
        reason = Problem("shutting_down", "the server shut down before the batch had ended")
        for account in self._accounts.values():
            for batch in account.batches.values():
                if not batch.ended and batch.ending is None:
                    batch.problems.append(reason)
                    self._end_early(batch, "failed")

    async def close(self) -> None:
        """End all batches and delete all files."""
        self.stop()
        running = {
            account.running for account in self._accounts.values() if account.running is not None
        }
        if running:
            await asyncio.wait(running)
        await asyncio.to_thread(self.store.close)

    def _forget_oldest(self, account: _Account) -> None:
        """Make room for one more batch."""
        if len(account.batches) < MAX_BATCHES:
            return
        ended = next((batch for batch in account.batches.values() if batch.ended), None)
        if ended is None:
            raise TooManyBatchesError(
                f"{MAX_BATCHES} batches of this key have not ended", code="too_many_batches"
            )
        del account.batches[ended.id]

    def _end_early(self, batch: Batch, ending: Ending) -> None:
        """End a batch that has not ended, whether it waits or runs."""
        if batch.ended or batch.ending is not None:
            return
        batch.ending = ending
        account = self._accounts[batch.owner]
        if batch in account.waiting:
            account.waiting.remove(batch)
            self._end(batch, ending)
        elif batch.work is not None:
            batch.work.cancel()

    def _end(self, batch: Batch, ending: Ending) -> None:
        if batch.timer is not None:
            batch.timer.cancel()
        batch.work = None
        batch.enter(ending)
        self.store.release(batch.input)

    async def _run_all(self, account: _Account) -> None:
        while account.waiting:
            await self._run(account.waiting.popleft())
        account.running = None

    async def _run(self, batch: Batch) -> None:
        assert self.app is not None
        run = BatchRun(batch, self._around, self.app)
        batch.work = asyncio.ensure_future(run.work())
        await asyncio.wait({batch.work})
        ending: Ending = "completed"
        if batch.work.cancelled():
            ending = batch.ending or "failed"
        elif (error := batch.work.exception()) is not None:
            batch.problems += _problems_of(error)
            ending = "failed"
        if ending == "expired":
            try:
                await run.expire()
            except VlmServeError as error:
                batch.problems += _problems_of(error)
        if batch.total and ending in ("completed", "expired"):
            batch.enter("finalizing")
        if ending == "completed":
            batch.problems.clear()  # it ended just before the server would have ended it
        run.publish()
        self._end(batch, ending)


def _problems_of(error: BaseException) -> list[Problem]:
    """Return the reasons of a failed batch."""
    if isinstance(error, InvalidInputError):
        return error.problems
    if isinstance(error, EngineClosedError):
        return [
            Problem(error.code or "engine_stopped", "the engine stopped before the batch had ended")
        ]
    if isinstance(error, VlmServeError):
        return [Problem(error.code or error.type, error.message, error.param)]
    _log.error("a batch failed", exc_info=error)
    return [Problem("internal_error", "internal error; the server's log has the details")]
