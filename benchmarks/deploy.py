"""Measure what the gateway and Ray cost: `vlm-serve deploy` beside `vlm-serve serve`, in one run.

    python benchmarks/deploy.py [--streams 16] [--tokens 96] [--rounds 5] [--leavers 500]

One server of each kind, the deployment with a single replica and as many threads as the other, take
turns: streams at the same time (tokens/s), then single requests (time to the first token). Then
which process takes how much processor time. Then clients that come and leave at once, after which
nothing may be left running. Then a deployment with two replicas: seconds until it answers, and the
sum of PSS of all of its processes. `--part` runs only one of these.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common  # noqa: F401  # First: it adds examples/ and tests/ to the path.
import httpx
from common.machine import describe
from process_tree import processes_below
from server_process import ServerProcess, server_process

GOAL_RATIO, GOAL_ADDED_MS, GOAL_START_SECONDS, GOAL_GIB = 0.8, 10.0, 60.0, 3.0
OPTIONS = ("--max-num-seqs", "16", "--cache-memory", "256MiB", "--no-page")
FIRST_TOKENS = 15
SECONDS = 600.0


def body(number: int, tokens: int, **fields: Any) -> dict[str, Any]:
    text = f"Tell me a story about the number {number}."
    return {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        **fields,
    }


async def stream(client: httpx.AsyncClient, number: int, tokens: int) -> tuple[float, int]:
    """Seconds to the first token of a streamed chat, and how many tokens it had."""
    begin, first, count = time.perf_counter(), 0.0, 0
    asked = body(number, tokens, stream_options={"include_usage": True})
    async with client.stream("POST", "/v1/chat/completions", json=asked) as answer:
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                assert line in ("", ": waiting", "data: [DONE]"), line
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            if not first and event["choices"] and event["choices"][0]["delta"].get("content"):
                first = time.perf_counter() - begin
            if event.get("usage"):
                count = event["usage"]["completion_tokens"]
    return first, count


def client_of(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=url, timeout=SECONDS, trust_env=False, limits=limits)


async def throughput(url: str, streams: int, tokens: int, number: int) -> float:
    """Tokens a second of so many streams at the same time."""
    async with client_of(url) as client:
        begin = time.perf_counter()
        done = await asyncio.gather(
            *(stream(client, number * streams + each, tokens) for each in range(streams))
        )
        return sum(count for _, count in done) / (time.perf_counter() - begin)


async def first_token_ms(url: str, number: int) -> float:
    """Median of single requests' time to the first token."""
    async with client_of(url) as client:
        first = [await stream(client, 10_000 + number + i, 4) for i in range(FIRST_TOKENS)]
    return 1000 * statistics.median(seconds for seconds, _ in first)


async def leave(url: str, leavers: int) -> float:
    """Clients that go away once their answers have begun; seconds until nothing is left running."""
    async with client_of(url) as client:

        async def one(number: int) -> int:
            asked = body(number, 1500)
            async with client.stream("POST", "/v1/chat/completions", json=asked) as answer:
                return answer.status_code

        async def gone(number: int) -> None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(one(number), 1.0)

        await asyncio.gather(*map(gone, range(leavers)))
        begin = time.perf_counter()
        while True:
            load = (await client.get("/load")).json()
            left = load["num_requests_running"] + load["num_requests_waiting"] + load["server_load"]
            if not left:
                return time.perf_counter() - begin
            await asyncio.sleep(0.05)


@contextlib.contextmanager
def both(model: str) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    with (
        server_process(model, *OPTIONS) as one,
        server_process(model, *OPTIONS, "--replicas", "1", command="deploy") as front,
    ):
        yield one, front


def compare(options: argparse.Namespace) -> None:
    with both(options.model) as (one, front):
        for server in (one, front):
            asyncio.run(throughput(server.url, options.streams, 8, 99))
            asyncio.run(first_token_ms(server.url, 0))
        ratios, added = [], []
        for number in range(options.rounds):
            rates, firsts = [], []
            for server in (one, front):
                rates.append(
                    asyncio.run(throughput(server.url, options.streams, options.tokens, number))
                )
                firsts.append(asyncio.run(first_token_ms(server.url, 100 * number)))
            ratios.append(rates[1] / rates[0])
            added.append(firsts[1] - firsts[0])
            print(
                f"  round {number}: serve {rates[0]:.0f} tokens/s, first token {firsts[0]:.1f} ms; "
                f"deploy {rates[1]:.0f} tokens/s, {firsts[1]:.1f} ms",
                flush=True,
            )
        ratio, more = statistics.median(ratios), statistics.median(added)
        print(f"tokens/s of {options.streams} streams: {ratio:.2f} of serve's", end="")
        print(f" ({'reached' if ratio >= GOAL_RATIO else 'missed'}: {GOAL_RATIO})")
        print(f"first token: {more:+.1f} ms", end="")
        print(f" ({'reached' if more <= GOAL_ADDED_MS else 'missed'}: {GOAL_ADDED_MS:g} ms)")


def processor_time(options: argparse.Namespace) -> None:
    """Which process takes it: of `serve`, and of a deployment with one replica."""
    for command, more in (("serve", ()), ("deploy", ("--replicas", "1"))):
        with server_process(options.model, *OPTIONS, *more, command=command) as server:
            asyncio.run(throughput(server.url, options.streams, 8, 99))
            before = processor_seconds(server.process.pid)
            asyncio.run(throughput(server.url, options.streams, 3 * options.tokens, 1))
            after = processor_seconds(server.process.pid)
            print(f"{command}, {options.streams} x {3 * options.tokens} tokens")
            for name, seconds in after.items():
                if (spent := seconds - before.get(name, 0.0)) >= 0.02:
                    print(f"  {spent:6.2f} s  {name}")


def processor_seconds(pid: int) -> dict[str, float]:
    """Of a process and all below it."""
    seconds: dict[str, float] = {}
    for each, line in {pid: "the process itself", **processes_below(pid)}.items():
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            ticks = int(fields[11]) + int(fields[12])
            seconds[f"{each} {line[:60]}"] = ticks / os.sysconf("SC_CLK_TCK")
    return seconds


def count_leavers(options: argparse.Namespace) -> None:
    command = ("--replicas", "1")
    with server_process(options.model, *OPTIONS, *command, command="deploy") as front:
        seconds = asyncio.run(leave(front.url, options.leavers))
        print(f"{options.leavers} clients left: nothing runs {seconds:.1f} s later")


def start(options: argparse.Namespace) -> None:
    begin = time.perf_counter()
    with server_process(options.model, "--replicas", "2", command="deploy") as front:
        asyncio.run(throughput(front.url, 1, 4, 0))
        seconds = time.perf_counter() - begin
        asyncio.run(throughput(front.url, 16, 32, 1))
        parts = pss_of_tree(front.process.pid)
        gib = sum(parts.values()) / 2**30
    print(f"start of two replicas: {seconds:.0f} s to the first answer", end="")
    print(
        f" ({'reached' if seconds <= GOAL_START_SECONDS else 'missed'}: {GOAL_START_SECONDS:g} s)"
    )
    for name, size in sorted(parts.items(), key=lambda pair: -pair[1]):
        print(f"  {size / 2**20:6.0f} MiB  {name}")
    print(f"PSS of the tree: {gib:.2f} GiB", end="")
    print(f" ({'reached' if gib <= GOAL_GIB else 'missed'}: {GOAL_GIB:g} GiB)")


def pss_of_tree(pid: int) -> dict[str, int]:
    """Bytes of a process and all below it, by command."""
    sizes: dict[str, int] = {}
    left = [pid]
    while left:
        each = left.pop()
        with contextlib.suppress(OSError):
            for path in Path(f"/proc/{each}/task").glob("*/children"):
                left += map(int, path.read_text().split())
            rollup = Path(f"/proc/{each}/smaps_rollup").read_text().split("Pss:")[1]
            words = Path(f"/proc/{each}/cmdline").read_bytes().decode().split("\0")
            name = f"{each} " + " ".join(words)[:60]
            sizes[name] = int(rollup.split()[0]) * 1024
    return sizes


PARTS = {"compare": compare, "processor": processor_time, "leavers": count_leavers, "start": start}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--leavers", type=int, default=500)
    parser.add_argument("--part", choices=PARTS, action="append")
    options = parser.parse_args()
    print(describe(len(os.sched_getaffinity(0))))
    for part in options.part or PARTS:
        PARTS[part](options)


if __name__ == "__main__":
    main()
