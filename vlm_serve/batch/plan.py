"""Checks a batch's input file and plans the order of its requests.

A file is read in groups of lines. Memory for each group is charged to the budget of open requests
before its lines are parsed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from vlm_serve.batch.file_store import StoredFile
from vlm_serve.batch.lines import Line, RawLine, line_of, parsing_bytes, raw_lines
from vlm_serve.batch.order import ReuseKey, ReuseQueue
from vlm_serve.batch.record import Problem
from vlm_serve.batch.settled import settled
from vlm_serve.server.http.request_memory import Share

MAX_LINES = 50_000
"""Most requests of a batch, as in OpenAI's API."""
MAX_PROBLEMS = 50
"""A batch is refused with its first problems; the rest of its file is not read."""
LINE_BYTES = 1024
"""Most bytes of a line in the plan, beside its texts."""
_GROUP_BYTES = 1 << 18

T = TypeVar("T")


class Run(Protocol):
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


class Place(NamedTuple):
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


@dataclass(frozen=True, slots=True)
class Plan:
    """The requests of a valid input, and their order."""

    places: list[Place]
    queue: ReuseQueue


async def read_plan(file: StoredFile, endpoint: str, max_line: int, share: Share, run: Run) -> Plan:
    """Check all lines of a file and order them.

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
        self._places: list[Place] = []
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
        self._places.append(Place(line.number, line.offset, line.size, memory, line.custom_id))
        self._keys.append(line.reuse_key)
        self.plan_bytes += LINE_BYTES + sys.getsizeof(line.custom_id)
        key = line.reuse_key
        texts = sum(map(sys.getsizeof, (key.salt, key.text, *key.media)))
        self.num_bytes += LINE_BYTES + sys.getsizeof(line.custom_id) + texts

    def plan(self) -> Plan:
        """Return the plan.

        Raises:
            InvalidInputError: see `read_plan`.
        """
        if self._problems:
            raise InvalidInputError(self._problems)
        if not self._places:
            raise InvalidInputError([Problem("empty_file", "the file has no requests")])
        return Plan(self._places, ReuseQueue(self._keys))
