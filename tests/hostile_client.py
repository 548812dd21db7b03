"""Runs hostile cases against a server, as clients that do what HTTP libraries would not."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import random
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from hostile_case import Case, head_of
from hostile_cases import make_case

ANSWER_SECONDS = 60.0
PATIENCE_SECONDS = 1.0
"""Longest that a client is deaf, silent or slow."""
MAX_ANSWER_BYTES = 256 << 20
MOST_TURNS = 6
"""Of a chain, beside its first."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a case.

    Attributes:
        status: of the answer; 0 if the client did not wait for one or the connection was closed.
        wrong: what must not have happened; empty if all was well.
        began: monotonic seconds, the same clock for all processes of a machine.
    """

    seed: int
    kind: str
    conduct: str
    status: int
    seconds: float
    wrong: str
    began: float


class _Answer:
    def __init__(self, head: bytes) -> None:
        words = head.split(b"\r\n", 1)[0].split(b" ")
        self.is_http = words[0] in (b"HTTP/1.1", b"HTTP/1.0") and len(words) > 1
        self.status = int(words[1]) if self.is_http and words[1].isdigit() else 0


async def run_case(host: str, port: int, case: Case) -> Outcome:
    """Runs one case; raises nothing that the server can be the cause of."""
    start = time.monotonic()
    try:
        async with asyncio.timeout(ANSWER_SECONDS * (1 + MOST_TURNS * (case.conduct == "chain"))):
            status, wrong = await _run(host, port, case)
    except TimeoutError:
        status, wrong = 0, f"no answer within {ANSWER_SECONDS:g} s"
    except ConnectionRefusedError:
        status, wrong = 0, "the server does not listen"
    except OSError as error:  # it may close on whoever misbehaves
        gone = case.conduct == "whole" and case.valid and len(case.body) < 100_000
        status, wrong = 0, f"closed without an answer ({error})" if gone else ""
    seconds = time.monotonic() - start
    return Outcome(case.seed, case.kind, case.conduct, status, seconds, wrong, start)


async def _run(host: str, port: int, case: Case) -> tuple[int, str]:
    if case.conduct == "chain":
        return await _chain(host, port, case)
    status, wrong, _ = await _once(host, port, case)
    return status, wrong


async def _chain(host: str, port: int, case: Case) -> tuple[int, str]:
    """Continues a stored answer again and again, with one more word each time."""
    rng, body = random.Random(case.seed + 1), json.loads(case.body)
    (key,) = re.findall(rb"Bearer (\S+)", case.head) or [b""]
    status, wrong, text = await _once(host, port, replace(case, conduct="whole"))
    for _ in range(rng.randint(1, MOST_TURNS)):
        named = re.search(rb'"id": ?"(resp_[0-9a-f]+)"', text)
        if wrong or status != 200 or named is None:
            break
        turn = body | {"input": "and?", "previous_response_id": named[1].decode()}
        data = json.dumps(turn).encode()
        head = head_of(rng, "POST", "/v1/responses", len(data), key.decode())
        status, wrong, text = await _once(
            host, port, replace(case, conduct="whole", head=head, body=data)
        )
    return status, wrong


async def _once(host: str, port: int, case: Case) -> tuple[int, str, bytes]:
    """The status, what is wrong, and the answer's body if it was read."""
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 16)
    rng = random.Random(case.seed + 1)
    try:
        if case.conduct == "silent":
            await asyncio.sleep(PATIENCE_SECONDS)
            return 0, "", b""
        await _send(writer, case, rng)
        if case.conduct in ("leave", "half"):
            await asyncio.sleep(rng.random() * PATIENCE_SECONDS / 2)
            return 0, "", b""
        if case.conduct == "deaf":
            await asyncio.sleep(rng.random() * PATIENCE_SECONDS)
            return 0, "", b""
        if case.conduct == "watch":
            return *await _watch(reader, rng), b""
        return await _read(reader, case)
    finally:
        writer.transport.abort()


async def _send(writer: asyncio.StreamWriter, case: Case, rng: random.Random) -> None:
    """What the case sends. The server may answer and close before it has all of it."""
    data = case.head + case.body
    if case.conduct == "half":
        data = data[: rng.randrange(1, len(data) + 1)]
    elif case.conduct == "pipelined":
        data *= min(rng.randint(2, 20), 1 + 2_000_000 // len(data))
    with contextlib.suppress(ConnectionError):
        if case.conduct == "trickle":
            for _ in range(10):
                piece, data = data[: len(data) // 10 + 1], data[len(data) // 10 + 1 :]
                writer.write(piece)
                await asyncio.sleep(rng.random() * PATIENCE_SECONDS / 5)
        writer.write(data)
        await writer.drain()


async def _watch(reader: asyncio.StreamReader, rng: random.Random) -> tuple[int, str]:
    """Reads a while. So many may watch, and then 503."""
    data = b""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(2 * PATIENCE_SECONDS * rng.random()):
            while piece := await reader.read(1 << 16):
                data += piece
    status = _Answer(data).status
    wrong = status >= 500 and status != 503 or b'"internal_error"' in data
    return status, f"status {status}: {data[-300:].decode(errors='replace')}" if wrong else ""


async def _read(reader: asyncio.StreamReader, case: Case) -> tuple[int, str, bytes]:
    """The status, and what is wrong with the answer."""
    if not case.valid:  # it may be the start of something that the server waits for
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_SECONDS):
                status = _Answer(await reader.read(1 << 16)).status
                return status, f"status {status}" if status >= 500 else "", b""
        return 0, "", b""
    text = bytearray()
    while len(text) < MAX_ANSWER_BYTES and (data := await reader.read(1 << 16)):
        text += data
    head, _, body = bytes(text).partition(b"\r\n\r\n")
    answer = _Answer(head)
    if not answer.is_http:
        return 0, "closed without an answer", b""
    wrong = ""
    if answer.status >= 500 and not (answer.status == 503 and case.shared):
        wrong = f"status {answer.status}: {body[:300].decode(errors='replace')}"
    elif b'"internal_error"' in body:
        wrong = f"internal error in a stream: {body[-300:].decode(errors='replace')}"
    elif b"Traceback (most" in body:
        wrong = "a traceback in the answer"
    return answer.status, wrong, body


async def attack(
    host: str, port: int, seeds: list[int], connections: int, groups: Sequence[str]
) -> None:
    """Runs the cases, so many at a time, and prints each outcome as a line of JSON."""
    rest = iter(seeds)

    async def client() -> None:
        for seed in rest:
            case = await asyncio.to_thread(make_case, seed, groups)
            print(json.dumps(asdict(await run_case(host, port, case))), flush=True)

    await asyncio.gather(*(client() for _ in range(connections)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    parser.add_argument("first", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("connections", type=int)
    parser.add_argument("--groups", nargs="+", default=(), help="of hostile_shares, and no others")
    parser.add_argument("--idle", action="store_true", help="take what nobody else wants")
    options = parser.parse_args()
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of writing to who has closed
    if options.idle:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(15)
    seeds = list(range(options.first, options.first + options.count))
    asyncio.run(attack(options.host, options.port, seeds, options.connections, options.groups))


if __name__ == "__main__":
    main()
