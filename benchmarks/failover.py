"""Check streams through `vlm-serve deploy` while replicas are killed, stopped or replaced.

    python benchmarks/failover.py [--rounds 3] [--streams 16] [--part kill --part stop ...]
    python benchmarks/failover.py --rounds 1 --tokens 3400 --part restart

Random requests for all four APIs (several choices, tools, JSON, log-probabilities, drafts) are
answered undisturbed first. Then they run again, all at the same time and more than there are seats,
while in their middle

kill     one of three replicas is killed,
stop     one is stopped, so that it says nothing,
restart  all are replaced one after the other, each with two seconds to end: with 3 400 tokens that
         is less than a stream takes.

Every answer must have the bytes of the undisturbed one, without what is drawn or dated for each
request, and requests that come within the next five seconds must be answered too.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import signal
import sys
import time

import common  # noqa: F401  # First: it adds examples/ and tests/ to the path.
import httpx
from attempts import PATHS, Asked, random_request
from common.machine import describe
from process_tree import replica_pids
from server_process import server_process

SECONDS = 600.0
NEW_REQUESTS_SECONDS = 5.0
OPTIONS = "--threads 1 --max-num-seqs 4 --cache-memory 64MiB --no-page"
PATIENCE = "--shutdown-timeout 1 --silence-timeout"
_DATED = re.compile(
    r'"(id|item_id|call_id|response_id|created|created_at|completed_at|cached_tokens|input_tokens'
    r'|cache_(?:read_input|creation_input|write)_tokens|ephemeral_5m_input_tokens|(?:accepted|rejected)_prediction_tokens|tool_use_id)":("[^"]*"|\d+)'
)


def requests(count: int, seed: int, tokens: int) -> list[Asked]:
    """Streams whose answers are the same every time."""
    rng = random.Random(seed)
    made: list[Asked] = []
    while len(made) < count:
        asked = random_request(rng)
        if asked.path != PATHS[len(made) % len(PATHS)]:
            continue
        body = asked.body | {"stream": True, "model": "demo"}
        body.pop("cache_report", None)
        body.pop("stop", None)
        if "seed" not in body:
            body["temperature"] = 0
        limit = "max_output_tokens" if "max_output_tokens" in body else "max_tokens"
        body[limit] = tokens
        if asked.path in PATHS[:2] and not {"tools", "response_format"} & set(body):
            body["ignore_eos"] = "structured_outputs" not in body
        made.append(Asked(asked.path, body))
    return made


class Streams:
    """All requests at the same time.

    Attributes:
        lines: that have come so far, of all of them.
    """

    def __init__(self, client: httpx.AsyncClient, asked: list[Asked]) -> None:
        self._client = client
        self._asked = asked
        self.lines = 0

    async def run(self) -> list[str]:
        """The answers, without what is drawn or dated."""
        return await asyncio.gather(*map(self._one, self._asked))

    async def _one(self, asked: Asked) -> str:
        lines: list[str] = []
        async with self._client.stream("POST", asked.path, json=asked.body) as answer:
            if answer.status_code != 200:
                return f"{answer.status_code} {(await answer.aread()).decode()}"
            async for line in answer.aiter_lines():
                lines.append(line)
                self.lines += 1
        return _DATED.sub(r'"\1":0', "\n".join(lines))


async def names(client: httpx.AsyncClient) -> set[str]:
    stats = (await client.get("/v1/cache/stats")).json()
    return {each["replica"] for each in stats.get("data", ())}


async def settled(client: httpx.AsyncClient, count: int) -> None:
    """Waits until so many replicas answer."""
    deadline = time.monotonic() + SECONDS
    while len(now := await names(client)) != count:
        assert time.monotonic() < deadline, f"there are {now}"
        await asyncio.sleep(0.25)


async def new_requests(client: httpx.AsyncClient) -> list[int]:
    """Statuses of short requests, one after the other, for a few seconds."""
    statuses: list[int] = []
    end = time.monotonic() + NEW_REQUESTS_SECONDS
    while time.monotonic() < end:
        body = {"prompt": f"Number {len(statuses)}", "max_tokens": 2}
        statuses.append((await client.post("/v1/completions", json=body)).status_code)
        await asyncio.sleep(0.1)
    return statuses


async def disturbed(
    client: httpx.AsyncClient,
    pid: int,
    asked: list[Asked],
    lines: int,
    part: str,
    rng: random.Random,
) -> tuple[list[str], list[int]]:
    """The answers, and the statuses of new requests after the disturbance."""
    streams = Streams(client, asked)
    running = asyncio.ensure_future(streams.run())
    before, middle = await names(client), rng.uniform(0.1, 0.7) * lines
    while streams.lines < middle:
        await asyncio.sleep(0.01)
    victim = rng.choice(replica_pids(pid))
    if part == "restart":
        os.kill(pid, signal.SIGUSR1)
    else:
        os.kill(victim, signal.SIGKILL if part == "kill" else signal.SIGSTOP)
    statuses = await new_requests(client)
    answers = await running
    if part == "restart":
        while before & (now := await names(client)) or len(now) < len(before):
            again = Streams(client, asked)
            answers += await again.run()
    elif part == "stop":
        os.kill(victim, signal.SIGKILL)  # a dead process; Serve may have done it already
    return answers, statuses


async def compare(url: str, pid: int, options: argparse.Namespace, part: str) -> bool:
    rng = random.Random(f"{options.seed} {part}")
    limits = httpx.Limits(max_connections=None)
    equal = True
    async with httpx.AsyncClient(
        base_url=url, timeout=SECONDS, trust_env=False, limits=limits
    ) as client:
        for number in range(options.rounds):
            await settled(client, options.replicas)
            asked = requests(options.streams, 1000 * options.seed + number, options.tokens)
            streams = Streams(client, asked)
            wanted = await streams.run()
            refused = [each for each in wanted if re.match(r"\d{3} ", each)]
            assert not refused, refused
            answers, statuses = await disturbed(client, pid, asked, streams.lines, part, rng)
            pairs = zip(answers, wanted * (len(answers) // len(wanted)), strict=True)
            same = [answer == whole for answer, whole in pairs]
            equal &= all(same) and set(statuses) == {200}
            print(
                f"{part:<8} round {number}: {sum(same)} of {len(same)} streams whole and equal, "
                f"{statuses.count(200)} of {len(statuses)} new requests answered",
                flush=True,
            )
            for index in (i for i, each in enumerate(same) if not each):
                show(asked[index % len(asked)], wanted[index % len(wanted)], answers[index])
        metrics = (await client.get("/metrics")).text
        print(*re.findall(r"^vlm_serve:failovers_total.*", metrics, re.MULTILINE))
        print(*re.findall(r"^\S+:replay_disagreements_total.*", metrics, re.MULTILINE))
    return equal


def show(asked: Asked, wanted: str, answer: str) -> None:
    """Where an answer left the undisturbed one."""
    places = enumerate(zip(wanted, answer, strict=False))
    place = next((i for i, (a, b) in places if a != b), min(len(wanted), len(answer)))
    part = slice(max(0, place - 80), place + 160)
    print(f"{asked}\n  wanted {wanted[part]!r}\n  got    {answer[part]!r}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--speculative", default="suffix")
    parser.add_argument("--part", choices=("kill", "stop", "restart"), action="append")
    options = parser.parse_args()
    print(describe(len(os.sched_getaffinity(0))))
    equal = True
    for part in options.part or ("kill", "stop", "restart"):
        silence = "3" if part == "stop" else "30"
        words = [*OPTIONS.split(), *PATIENCE.split(), silence, "--speculative", options.speculative]
        with server_process(
            "demo", *words, "--replicas", str(options.replicas), command="deploy"
        ) as gateway:
            equal &= asyncio.run(compare(gateway.url, gateway.process.pid, options, part))
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
