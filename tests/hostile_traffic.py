"""Hostile clients beside ordinary ones at a server process, and what the ordinary ones notice."""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import json
import os
import random
import re
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from hostile_client import Outcome
from hostile_shares import ORDINARY
from PIL import Image, ImageDraw
from server_process import ServerProcess

from vlm_serve.options.declared import parse_size

CLIENT = Path(__file__).with_name("hostile_client.py")
THINK_SECONDS = (0.3, 1.0)
HEALTH_SECONDS = 0.1
MEMORY_SECONDS = 0.2
SETTLE_SECONDS = 30.0
PAGE = os.sysconf("SC_PAGE_SIZE")
LATE = 30.0
WARM_SECONDS = 8.0
"""The first requests fill caches, and the grammar compiler starts."""
POST = "POST /v1/chat/completions HTTP/1.1\r\nHost: [::1]\r\nContent-Type: application/json\r\n"
POST += f"Authorization: Bearer {ORDINARY}\r\n"
KINDS = ("text", "picture")
COLOURS = ("red", "green", "blue", "yellow")

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Asked:
    """An ordinary question.

    Attributes:
        kind: what it was about, `text` or `picture`.
        began: monotonic seconds.
        first_token: seconds from then on.
    """

    kind: str
    began: float
    first_token: float


@dataclass
class Phase:
    """What was measured while something went on; all times in seconds.

    Attributes:
        name: begins the ids of its ordinary requests, NAME-KIND-NUMBER.
        asked: what was answered.
    """

    name: str = "warm"
    asked: list[Asked] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    own_lag: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    most_memory: int = 0

    def first_tokens(self, *kinds: str) -> list[float]:
        """Of questions about those, or of all."""
        return [each.first_token for each in self.asked if each.kind in (kinds or KINDS)]


@dataclass
class Memory:
    """Resident bytes of a server and its children.

    Attributes:
        caches: how much of it the server keeps for later requests, within the bounds of each.
    """

    resident: int
    caches: int


@dataclass
class Result:
    """Of one run."""

    quiet: Phase
    hostile: Phase
    outcomes: list[Outcome]
    before: Memory
    after: Memory
    seconds: float


def question(rng: random.Random) -> tuple[str, bytes]:
    """What it is about and a streamed chat request: half are about a small picture."""
    content: Any = f"Tell me about number {rng.randrange(1000)}."
    kind = KINDS[rng.random() < 0.5]
    if kind == "picture":
        image = Image.new("RGB", (96, 96), "white")
        box = (rng.randrange(32), rng.randrange(32), 64, 64)
        ImageDraw.Draw(image).ellipse(box, fill=rng.choice(COLOURS))
        data = io.BytesIO()
        image.save(data, "png")
        url = "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()
        content = [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": "What color is the shape?"},
        ]
    messages = [{"role": "user", "content": content}]
    body = {"messages": messages, "max_tokens": 12, "temperature": 0, "stream": True}
    return kind, json.dumps(body).encode()


class Wire:
    """A connection that is kept, and made again when the server has closed it."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._writer: asyncio.StreamWriter | None = None

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(self._host, self._port)
        return self._reader, self._writer

    def close(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()
            self._writer = None


async def ask(wire: Wire, kind: str, body: bytes, phase: Phase) -> None:
    """One ordinary question; records the time to its first token."""
    start = time.monotonic()
    try:
        async with asyncio.timeout(LATE):
            reader, writer = await wire.open()
            number = next(_numbers)
            head = f"X-Request-Id: {phase.name}-{kind}-{number}\r\nContent-Length: {len(body)}"
            writer.write(f"{POST}{head}\r\n\r\n".encode() + body)
            said = await reader.readuntil(b"\r\n\r\n")
            if not said.startswith(b"HTTP/1.1 200"):
                raise OSError(said.split(b"\r\n")[0].decode())
            await reader.readuntil(b"data: {")
            phase.asked.append(Asked(kind, start, time.monotonic() - start))
            await reader.readuntil(b"data: [DONE]\n\n")
            await reader.readuntil(b"0\r\n\r\n")
    except (OSError, asyncio.IncompleteReadError) as error:
        phase.wrong.append(f"an ordinary question failed: {type(error).__name__} {error}")
        wire.close()


async def probe(wire: Wire, phase: Phase) -> None:
    """One look at /health."""
    start = time.monotonic()
    try:
        async with asyncio.timeout(LATE):
            reader, writer = await wire.open()
            writer.write(b"GET /health HTTP/1.1\r\nHost: [::1]\r\n\r\n")
            said = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", said)
            await reader.readexactly(int(length.group(1)) if length else 0)
        if not said.startswith(b"HTTP/1.1 200"):
            phase.wrong.append(f"/health: {said.split(chr(13).encode())[0].decode()}")
    except (OSError, asyncio.IncompleteReadError) as error:
        phase.wrong.append(f"/health: {type(error).__name__} {error}")
        wire.close()
    phase.health.append(time.monotonic() - start)


def tree_bytes(process: int) -> int:
    """Resident memory of a process and its descendants; pages that they share count once."""
    total = 0
    try:
        listed = re.search(r"^Pss: +(\d+)", Path(f"/proc/{process}/smaps_rollup").read_text(), re.M)
        total = int(listed.group(1)) * 1024 if listed else 0
        for file in Path(f"/proc/{process}/task").glob("*/children"):
            total += sum(tree_bytes(int(child)) for child in file.read_text().split())
    except OSError:
        pass  # it has ended
    return total


def counted_bytes(process: int) -> int:
    """No less than `tree_bytes`: pages that processes share count for each of them. Taken from
    counters: for the exact number the kernel walks through all pages, and who wants to change the
    process's memory map meanwhile waits, and behind that whoever touches a new page."""
    total = 0
    try:
        total = PAGE * int(Path(f"/proc/{process}/statm").read_text().split()[1])
        for file in Path(f"/proc/{process}/task").glob("*/children"):
            total += sum(counted_bytes(int(child)) for child in file.read_text().split())
    except OSError:
        pass  # it has ended
    return total


class Watch:
    """Ordinary clients, health probes and memory; what they meet goes into the current phase."""

    def __init__(self, server: ServerProcess, clients: int) -> None:
        host, port = server.url.removeprefix("http://").split(":")
        self.host, self.port = host, int(port)
        self.process = server.process.pid
        self.phase = Phase()
        self._clients = clients

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        works = [self._ordinary(number) for number in range(self._clients)]
        tasks = [asyncio.ensure_future(work) for work in (*works, self._health(), self._memory())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            done = await asyncio.gather(*tasks, return_exceptions=True)
            for each in done:
                if isinstance(each, Exception):
                    raise each

    async def _ordinary(self, number: int) -> None:
        rng = random.Random(number)
        wire = Wire(self.host, self.port)
        try:
            while True:
                await asyncio.sleep(rng.uniform(*THINK_SECONDS))
                await ask(wire, *question(rng), self.phase)
        finally:
            wire.close()

    async def _health(self) -> None:
        """On a connection that is kept and on a new one by turns."""
        kept = Wire(self.host, self.port)
        try:
            while True:
                for wire in (kept, Wire(self.host, self.port)):
                    start = time.monotonic()
                    await asyncio.sleep(HEALTH_SECONDS)
                    self.phase.own_lag.append(time.monotonic() - start - HEALTH_SECONDS)
                    await probe(wire, self.phase)
                wire.close()
        finally:
            kept.close()

    async def _memory(self) -> None:
        while True:
            now = await asyncio.to_thread(counted_bytes, self.process)
            self.phase.most_memory = max(self.phase.most_memory, now)
            await asyncio.sleep(MEMORY_SECONDS)


async def attack(
    watch: Watch,
    first: int,
    count: int,
    connections: int,
    *,
    groups: Sequence[str],
    idle: bool,
    verbose: bool,
) -> list[Outcome]:
    """Has another process run the cases; its outcomes."""
    numbers = [str(number) for number in (watch.port, first, count, connections)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(CLIENT), watch.host, *numbers, *(["--idle"] if idle else [])),
        *(["--groups", *groups] if groups else []),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    outcomes = []
    try:
        async for line in process.stdout:
            outcome = Outcome(**json.loads(line))
            outcomes.append(outcome)
            if verbose and (outcome.wrong or len(outcomes) % 100 == 0):
                print(f"{len(outcomes):>5} of {count}  {describe(outcome)}", flush=True)
        assert await process.wait() == 0, "the hostile clients failed themselves"
    finally:
        if process.returncode is None:
            process.kill()
    return outcomes


def describe(outcome: Outcome) -> str:
    text = f"seed {outcome.seed} ({outcome.kind}, {outcome.conduct}, {outcome.seconds:.1f} s)"
    return f"{text}: {outcome.wrong or outcome.status}"


def memory(server: ServerProcess) -> Memory:
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    held = re.findall(r"^vlm_serve_held_bytes\{.*\} (\S+)$", text, re.M)
    return Memory(tree_bytes(server.process.pid), sum(int(float(each)) for each in held))


async def settled(server: ServerProcess, before: Memory) -> Memory:
    """The memory once it is not more than allowed, or after a while."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while not came_back(before, now := memory(server)) and time.monotonic() < deadline:
        await asyncio.sleep(1)
    return now


def memory_bound(server: ServerProcess) -> int:
    """Most that requests may add to the server's memory, as its start-up table says."""
    found = re.search(r"requests +at most ([\d.]+ \w+) on top", server.table)
    return parse_size(found.group(1)) if found else 0


def came_back(before: Memory, after: Memory) -> bool:
    """Whether what has not gone back to the system, caches apart, is at most 25 % or 128 MiB."""
    grown = after.resident - after.caches - (before.resident - before.caches)
    return grown <= max(before.resident // 4, 128 << 20)


async def measure(
    server: ServerProcess,
    *,
    first: int,
    count: int,
    connections: int = 8,
    clients: int = 16,
    quiet_seconds: float = 20.0,
    groups: Sequence[str] = (),
    idle: bool = False,
    verbose: bool = False,
) -> Result:
    """The ordinary clients alone, then beside the hostile ones.

    Args:
        groups: of `hostile_shares`, by one key; none: every kind of case.
        idle: hostile clients get what nobody else wants of the processors, as if they had machines
            of their own. At niceness 15, which they have otherwise, the server waits for them.
    """
    start = time.monotonic()
    watch = Watch(server, clients)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(watch.running())
        await asyncio.sleep(WARM_SECONDS)
        quiet = watch.phase = Phase("quiet")
        await asyncio.sleep(quiet_seconds)
        before = await asyncio.to_thread(memory, server)
        hostile = watch.phase = Phase("hostile")
        outcomes = await attack(
            watch, first, count, connections, groups=groups, idle=idle, verbose=verbose
        )
    after = await settled(server, before)
    return Result(quiet, hostile, outcomes, before, after, time.monotonic() - start)


def percentile(values: list[float], share: float) -> float:
    """Milliseconds, of values in seconds."""
    ordered = sorted(values)
    return 1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
