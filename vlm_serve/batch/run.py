"""One run of a batch: its input checked and ordered, its requests on the server's routes, its
answers in files.

An input file is read in groups of lines. Memory for each group is charged to the budget of open
requests before its lines are parsed.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from starlette.types import ASGIApp

from vlm_serve.batch.asgi import HttpReply, TokenUsage, usage_of
from vlm_serve.batch.file_store import Draft, FileStore, StoredFile, in_thread, settled
from vlm_serve.batch.journal import Row, encode_row
from vlm_serve.batch.lines import (
    Line,
    RawLine,
    answer_row,
    error_row,
    line_of,
    parsing_bytes,
    raw_lines,
    read_request,
)
from vlm_serve.batch.order import ReuseKey, ReuseQueue
from vlm_serve.batch.pool import RETRY_SECONDS, answer_all, post_patiently
from vlm_serve.batch.record import Batch, Problem
from vlm_serve.server.answers.generation import in_background
from vlm_serve.server.http.auth import state_of
from vlm_serve.server.http.body import SMALL_BYTES
from vlm_serve.server.http.request_memory import RequestMemory, Share

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
        checking: one batch at a time reads its whole file.
        slots: of the requests of all batches, `width` of them.
    """

    store: FileStore
    memory: RequestMemory
    run: RunBlocking
    has_room: Callable[[], bool]
    width: int
    max_line: int
    checking: asyncio.Lock
    slots: asyncio.Semaphore


class BatchRun:
    """A batch that runs.

    Args:
        batch: its state.
        around: the server.
        app: the server's routes without authentication.
    """

    def __init__(self, batch: Batch, around: Surroundings, app: ASGIApp) -> None:
        self._batch = batch
        self._around = around
        self._app = app
        self._share = Share(around.memory)
        self._drafts: list[Draft] = []
        self._unanswered: dict[int, RequestPlace] = {}

    async def work(self) -> None:
        """Check the input and answer its requests.

        Raises:
            InvalidInputError: the input is invalid.
            VlmServeError: the batch cannot go on.
        """
        batch, around = self._batch, self._around
        for _ in range(2):
            self._drafts.append(around.store.draft(batch.owner))
        async with around.checking:
            places, queue = await read_plan(
                batch.input, batch.endpoint, around.max_line, self._share, around.run
            )
        self._unanswered = dict(enumerate(places))
        batch.total = len(places)
        batch.enter("in_progress")
        await answer_all(queue, around.width, self._answer, lambda index, _: None)

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
            async with around.slots:
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


def _row_id(batch: Batch, place: RequestPlace) -> str:
    return f"batch_req_{batch.id.removeprefix('batch_')}_{place.number}"


def _encoded(
    name: str, custom_id: str, request_id: str, reply: HttpReply
) -> tuple[bytes, TokenUsage]:
    row: Row = answer_row(name, custom_id, request_id, reply)
    return encode_row(row), usage_of(row["response"]["body"])


MAX_LINES = 50_000
"""Most requests of a batch, as in OpenAI's API."""
MAX_PROBLEMS = 50
"""A batch is refused with its first problems; the rest of its file is not read."""
LINE_BYTES = 1024
"""Most bytes of a line in the plan, beside its texts."""
_GROUP_BYTES = 1 << 18

T = TypeVar("T")


class RunBlocking(Protocol):
    """A way to run blocking work on a thread."""

    def __call__(self, work: Callable[[], T]) -> Coroutine[Any, Any, T]: ...


class InvalidInputError(Exception):
    """The input file cannot be run.

    Args:
        problems: why.
    """

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__(problems)
        self.problems = problems


class RequestPlace(NamedTuple):
    """A request of the input.

    Attributes:
        number: of its line, from 1.
        offset, size: position of its bytes.
        memory: most bytes that parsing it takes.
    """

    number: int
    offset: int
    size: int
    memory: int
    custom_id: str


async def read_plan(
    file: StoredFile, endpoint: str, max_line: int, share: Share, run: RunBlocking
) -> tuple[list[RequestPlace], ReuseQueue]:
    """Check all lines of a file and return their requests and the order of these.

    Args:
        endpoint: the only route that lines may name.
        max_line: most bytes of a line.
        share: it holds the memory of this; at the end that of the plan.
        run: runs what holds the interpreter lock.

    Raises:
        InvalidInputError: a line is invalid, or there are none or too many.
    """
    reading = min(file.num_bytes, max_line + _GROUP_BYTES)
    await share.grow(reading)
    checking = _Checking(endpoint, max_line)
    with file.path.open("rb") as source:
        lines = raw_lines(source, max_line)

        def take() -> tuple[list[RawLine], list[int]]:
            """Read the next group and count what parsing it takes."""
            group, size = [], 0
            for raw in lines:
                group.append(raw)
                size += len(raw.content)
                if size >= _GROUP_BYTES or len(group) == MAX_LINES:
                    break
            return group, [parsing_bytes(raw.content) for raw in group]

        while True:
            group, memory = await settled(run(take))
            if not group:
                break
            await share.grow(reading + checking.num_bytes + sum(memory))
            await settled(run(partial(checking.add, group, memory)))
            share.shrink(reading + checking.num_bytes)
            del group
    plan = await settled(run(checking.plan))
    share.shrink(checking.plan_bytes)
    return plan


class _Checking:
    """Findings about the lines so far.

    Attributes:
        num_bytes: memory of it.
        plan_bytes: memory of the plan without the keys of the order.
    """

    def __init__(self, endpoint: str, max_line: int) -> None:
        self._endpoint = endpoint
        self._max_line = max_line
        self._keys: list[ReuseKey] = []
        self._places: list[RequestPlace] = []
        self._first: dict[str, int] = {}
        self._problems: list[Problem] = []
        self.num_bytes = self.plan_bytes = 0

    def add(self, group: list[RawLine], memory: list[int]) -> None:
        """Check the next lines.

        Raises:
            InvalidInputError: see `read_plan`.
        """
        for raw, most in zip(group, memory, strict=True):
            if len(self._places) == MAX_LINES:
                problem = f"the file has more than {MAX_LINES} requests"
                raise InvalidInputError([Problem("too_many_requests", problem)])
            self._add(line_of(raw, self._max_line, self._endpoint), most)
            if len(self._problems) == MAX_PROBLEMS:
                raise InvalidInputError(self._problems)

    def _add(self, line: Line, memory: int) -> None:
        if line.problem is not None:
            code = line.problem.code or "invalid_request"
            problem = Problem(code, line.problem.message, line.problem.param, line.number)
            self._problems.append(problem)
            return
        assert line.custom_id is not None
        first = self._first.setdefault(line.custom_id, line.number)
        if first != line.number:
            message = f"the custom_id is that of line {first}"
            self._problems.append(Problem("duplicate_custom_id", message, "custom_id", line.number))
            return
        self._places.append(
            RequestPlace(line.number, line.offset, line.size, memory, line.custom_id)
        )
        self._keys.append(line.reuse_key)
        self.plan_bytes += LINE_BYTES + sys.getsizeof(line.custom_id)
        key = line.reuse_key
        texts = sum(map(sys.getsizeof, (key.salt, key.text, *key.media)))
        self.num_bytes += LINE_BYTES + sys.getsizeof(line.custom_id) + texts

    def plan(self) -> tuple[list[RequestPlace], ReuseQueue]:
        """Return the requests and their order.

        Raises:
            InvalidInputError: see `read_plan`.
        """
        if self._problems:
            raise InvalidInputError(self._problems)
        if not self._places:
            raise InvalidInputError([Problem("empty_file", "the file has no requests")])
        return self._places, ReuseQueue(self._keys)
