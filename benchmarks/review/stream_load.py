"""Streams of completions at once over HTTP, beside the same work from Python.

    python benchmarks/review/stream_load.py [STREAMS] [TOKENS]

Tokens a second, and processor time a token of the process that serves.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import checkout  # noqa: F401
import httpx
from server_process import server_process

from vlm_serve import EngineConfig, Pipeline, SamplingParams


@dataclass(frozen=True)
class Load:
    """How much is asked at once."""

    streams: int
    tokens: int

    def prompts(self, offset: int) -> list[list[int]]:
        """Return prompts of 32 tokens that share no beginning with those of another offset."""
        return [
            [7 + ((number + offset) * 13 + place) % 300 for place in range(32)]
            for number in range(self.streams)
        ]


def processor_seconds(pid: int) -> float:
    """Return what a process and its children have computed."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return own + sum(processor_seconds(int(child)) for child in children)


async def ask(url: str, load: Load, offset: int) -> int:
    """Have all prompts answered at once; return the events of all streams."""
    limits = httpx.Limits(max_connections=load.streams)
    async with httpx.AsyncClient(limits=limits, timeout=300, trust_env=False) as client:

        async def one(prompt: list[int]) -> int:
            body = {
                "prompt": prompt,
                "max_tokens": load.tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            }
            async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
                answer.raise_for_status()
                return sum([piece.count(b"data: ") async for piece in answer.aiter_bytes()])

        return sum(await asyncio.gather(*map(one, load.prompts(offset))))


def over_http(load: Load) -> tuple[float, float, int]:
    """Return seconds, processor seconds and events."""
    flags = ("--max-num-seqs", str(load.streams), "--speculative", "off", "--no-access-log")
    with server_process("demo", *flags) as server:
        asyncio.run(ask(server.url, load, 0))
        begin, used = time.perf_counter(), processor_seconds(server.process.pid)
        events = asyncio.run(ask(server.url, load, 100))
        seconds = time.perf_counter() - begin
        return seconds, processor_seconds(server.process.pid) - used, events


def from_python(load: Load) -> tuple[float, float]:
    """Return seconds and processor seconds."""
    config = EngineConfig(cache_memory="256MiB", max_num_seqs=load.streams, speculative="off")
    params = SamplingParams(max_tokens=load.tokens, temperature=0, ignore_eos=True)
    with Pipeline("demo", config) as pipe:
        pipe.generate_many(load.prompts(0), params)
        begin, used = time.perf_counter(), time.process_time()
        pipe.generate_many(load.prompts(100), params)
        return time.perf_counter() - begin, time.process_time() - used


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("streams", type=int, nargs="?", default=64)
    parser.add_argument("tokens", type=int, nargs="?", default=200)
    given = parser.parse_args(arguments)
    load = Load(given.streams, given.tokens)
    total = load.streams * load.tokens
    seconds, used, events = over_http(load)
    alone, used_alone = from_python(load)
    print(f"{load.streams} streams of {load.tokens} tokens")
    for name, wall, cpu in (("HTTP", seconds, used), ("Python", alone, used_alone)):
        print(f"{name:8}{total / wall:8.0f} tokens/s, {1e6 * cpu / total:.0f} us a token")
    print(f"{events} events; over HTTP {alone / seconds:.2f} of Python's pace")


if __name__ == "__main__":
    main()
