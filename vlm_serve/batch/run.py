"""One run of a batch: its requests on the server's routes, its answers in files."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from starlette.types import ASGIApp

from vlm_serve.batch.asgi import Reply
from vlm_serve.batch.file_store import Draft, FileStore
from vlm_serve.batch.journal import Row
from vlm_serve.batch.lines import answer_row, encode_row, error_row, read_request
from vlm_serve.batch.plan import Place, Run, read_plan
from vlm_serve.batch.pool import RETRY_SECONDS, answer_all, post_patiently
from vlm_serve.batch.record import Batch
from vlm_serve.batch.replies import TokenUsage, usage_of
from vlm_serve.batch.settled import in_thread, settled
from vlm_serve.server.http.json_body import SMALL_BYTES
from vlm_serve.server.http.request_memory import RequestMemory, Share
from vlm_serve.server.http.tenants import state_of
from vlm_serve.server.priority import in_background

EXPIRED = "the completion window ended before this request was answered"


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The parts of the server that all batches share.

    Attributes:
        store: files of clients.
        memory: budget of open requests.
        run: runs work that holds the interpreter lock.
        has_room: tells whether a further request may begin now.
        width: most requests of all batches at a time.
        max_line: most bytes of a line.
    """

    store: FileStore
    memory: RequestMemory
    run: Run
    has_room: Callable[[], bool]
    width: int
    max_line: int


class BatchRun:
    """A batch that runs.

    Args:
        batch: its state.
        around: the server.
        app: the server's routes without authentication.
        checking: one batch at a time reads its whole file.
        slots: of the requests of all batches.
    """

    def __init__(
        self,
        batch: Batch,
        around: Surroundings,
        app: ASGIApp,
        checking: asyncio.Lock,
        slots: asyncio.Semaphore,
    ) -> None:
        self._batch = batch
        self._around = around
        self._app = app
        self._checking = checking
        self._slots = slots
        self._share = Share(around.memory)
        self._drafts: list[Draft] = []
        self._unanswered: dict[int, Place] = {}

    async def work(self) -> None:
        """Check the input and answer its requests.

        Raises:
            InvalidInputError: the input is invalid.
            VlmServeError: the batch cannot go on.
        """
        batch, around = self._batch, self._around
        for _ in range(2):
            self._drafts.append(around.store.draft(batch.owner))
        async with self._checking:
            plan = await read_plan(
                batch.input, batch.endpoint, around.max_line, self._share, around.run
            )
        self._unanswered = dict(enumerate(plan.places))
        batch.total = len(plan.places)
        batch.enter("in_progress")
        await answer_all(plan.queue, around.width, self._answer, lambda index, _: None)

    async def _write(self, index: int, row: bytes, usage: TokenUsage, *, failed: bool) -> None:
        """Write a row and count its request."""
        await self._drafts[failed].write(row)
        del self._unanswered[index]
        self._batch.count(usage, failed=failed)

    async def _answer(self, index: int) -> None:
        """Answer a request and write its row."""
        batch, place, around = self._batch, self._unanswered[index], self._around
        name = f"{batch.id}-{place.number}"
        headers = [(b"x-request-id", name.encode())]
        share = Share(around.memory)
        try:
            async with self._slots:
                while not around.has_room():
                    await asyncio.sleep(RETRY_SECONDS)
                await share.grow(place.memory)
                read = partial(read_request, batch.input.path, place.offset, place.size)
                body = await settled(around.run(read))
                share.shrink(len(body))
                with in_background():
                    state = state_of(batch.owner)
                    reply = await post_patiently(self._app, batch.endpoint, body, headers, state)
            share.shrink(0)
            write = partial(_encoded, _row_id(batch, place), place.custom_id, name, reply)
            large = len(reply.body) > SMALL_BYTES
            row, usage = await in_thread(write) if large else write()
        finally:
            share.leave()
        # A row that is being written is counted even if the batch is cancelled meanwhile.
        await settled(self._write(index, row, usage, failed=reply.status >= 400))

    async def expire(self) -> None:
        """Write an error for each request without an answer.

        Raises:
            VlmServeError: they cannot be stored.
        """
        batch = self._batch
        for index, place in list(self._unanswered.items()):
            name = _row_id(batch, place)
            row = error_row(name, place.custom_id, "batch_expired", EXPIRED)
            await self._write(index, encode_row(row), TokenUsage(), failed=True)

    def publish(self) -> None:
        """Make files of the rows that were written; empty files are left out."""
        batch = self._batch
        ids: list[str | None] = []
        for draft, kind in zip(self._drafts, ("output", "error"), strict=False):
            if draft.num_bytes:
                name = f"{batch.id}_{kind}.jsonl"
                ids.append(draft.finish(name, "batch_output", batch.output_seconds).id)
            else:
                draft.discard()
                ids.append(None)
        batch.output_id, batch.error_id = [*ids, None, None][:2]
        self._share.leave()


def _row_id(batch: Batch, place: Place) -> str:
    return f"batch_req_{batch.id.removeprefix('batch_')}_{place.number}"


def _encoded(name: str, custom_id: str, request_id: str, reply: Reply) -> tuple[bytes, TokenUsage]:
    row: Row = answer_row(name, custom_id, request_id, reply)
    return encode_row(row), usage_of(row["response"]["body"])
