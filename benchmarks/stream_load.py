"""Measure what a token costs over HTTP beside the same tokens from Python, with many streams.

    python benchmarks/stream_load.py [--streams 1 8 64] [--tokens 200] [--rounds 5] [--chat]
        [--logprobs 5] [--before FOLDER] [--engine-process]

A server and an engine in a child of its own, both of the demo model, do the same work in turns;
with `--before` so do those of another checkout, in an order that turns each round, and with
`--engine-process` a server whose engine has a process of its own. Only one of them ever has work.
What is compared is processor time a token, of all that a server is: over HTTP less from Python.
"Loop" is the part of the server's first thread, which has no work but HTTP. An engine's own process
is told apart, as a share of what a token takes from Python. Figures are medians of rounds, ratios
are medians of the rounds' ratios.

The check of an idle cache is off: it would run between rounds and count as tokens' time. Both
sides compute on one thread: threads of OpenMP wait by turning, and on a busy machine their turns
would be most of what is measured. The client runs in this process and parses no event. With one
stream, its times to the first event and between events are told, too. It needs Linux.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GOAL_US = 40.0
GOAL_APART = 1.1
"""Processor time of an engine's own process a token, as a multiple of that from Python."""
APART = "apart"
WAIT_SECONDS = 120.0
_CHILD = "--child"
_OF_A_PROCESS = 2
"""Last bits of the number of a clock that counts another process's processor time (Linux)."""


@dataclass(frozen=True)
class Load:
    """So many streams of so many tokens, each with a prompt of its own in every round."""

    streams: int
    tokens: int
    chat: bool
    logprobs: int | None

    @property
    def total(self) -> int:
        return self.streams * self.tokens

    def prompts(self, number: int) -> list[list[int]]:
        first = 1000 * number
        return [
            [7 + ((first + i) * 13 + j * (1 + (first + i) % 17)) % 300 for j in range(32)]
            for i in range(self.streams)
        ]

    def request(self, prompt: list[int]) -> bytes:
        """Return a request as it goes over the wire."""
        body: dict[str, Any] = {"max_tokens": self.tokens, "temperature": 0, "ignore_eos": True}
        body["stream"] = True
        if self.chat:
            body["messages"] = [{"role": "user", "content": f"Tell me of {prompt[:6]}."}]
            given = {"logprobs": True, "top_logprobs": self.logprobs}
        else:
            body["prompt"], given = prompt, {"logprobs": self.logprobs}
        text = json.dumps(body | (given if self.logprobs is not None else {})).encode()
        path = "/v1/chat/completions" if self.chat else "/v1/completions"
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
        return head.encode() + text


@dataclass(frozen=True)
class Measured:
    """Microseconds of processor a token (of all, of the loop's thread and of the engine's own
    process), tokens a second, and milliseconds that a client waited for its first event and between
    two of them."""

    used: float
    loop: float = 0.0
    engine: float = 0.0
    rate: float = 0.0
    first: float = 0.0
    gap: float = 0.0


class Server:
    """`vlm-serve serve demo` of a checkout; `apart`: with an engine in a process of its own."""

    def __init__(self, folder: Path, most: int, *, apart: bool) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        flags = ["--port", str(self._port), "--max-num-seqs", str(most), "--threads", "1"]
        flags += ["--speculative", "off", "--no-access-log", "--no-idle-check"]
        flags += ["--engine-process", "on"] if apart else []
        self._engine: int | None = None
        self._process = start(folder, ["-m", "vlm_serve", "serve", "demo", *flags])
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            with socket.socket() as client:
                if not client.connect_ex(("127.0.0.1", self._port)):
                    self._engine = engine_of(self._process.pid) if apart else None
                    return
            time.sleep(0.2)
        raise SystemExit(f"the server of {folder} did not start")

    def run(self, load: Load, number: int) -> Measured:
        began, before = time.perf_counter(), self._seconds()
        times = asyncio.run(self._ask(load, number))
        seconds = time.perf_counter() - began
        used, loop, engine = (
            after - each for after, each in zip(self._seconds(), before, strict=True)
        )
        gaps = [later - early for each in times for early, later in pairwise(each)]
        return Measured(
            1e6 * used / load.total,
            1e6 * loop / load.total,
            1e6 * engine / load.total,
            load.total / seconds,
            1e3 * statistics.median(each[0] for each in times),
            1e3 * statistics.median(gaps),
        )

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()

    async def _ask(self, load: Load, number: int) -> list[list[float]]:
        return await asyncio.gather(
            *(self._stream(load.request(prompt)) for prompt in load.prompts(number))
        )

    async def _stream(self, request: bytes) -> list[float]:
        """Return when a stream's parts came, in seconds since it was asked for."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(request)
        began, times, last = time.perf_counter(), [], b""
        while data := await reader.read(1 << 16):
            last = (last + data)[-64:]
            if b"data: " in data:
                times.append(time.perf_counter() - began)
        writer.close()
        assert b"[DONE]" in last, last
        return times

    def _seconds(self) -> tuple[float, float, float]:
        """Return the processor time of both processes, of the first thread, and of the engine's
        own process."""
        number = self._process.pid
        thread = Path(f"/proc/{number}/task/{number}/schedstat").read_text().split()[0]
        engine = 0.0 if self._engine is None else seconds_of(self._engine)
        return seconds_of(number) + engine, int(thread) / 1e9, engine


def seconds_of(pid: int) -> float:
    """Return the processor time of a process."""
    return time.clock_gettime(~pid << 3 | _OF_A_PROCESS)


def engine_of(pid: int) -> int:
    """Return the engine's process of a server."""
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        for each in listing.read_text().split():
            if b"engine.remote.worker" in Path(f"/proc/{each}/cmdline").read_bytes():
                return int(each)
    raise SystemExit("the server's engine has no process of its own")


class Alone:
    """The engine of a checkout, in a child that is asked through its standard input."""

    def __init__(self, folder: Path, most: int) -> None:
        self._process = start(folder, [str(Path(__file__).resolve()), _CHILD, str(most)])

    def run(self, load: Load, number: int) -> Measured:
        assert self._process.stdin is not None and self._process.stdout is not None
        wanted = [load.prompts(number), load.tokens, load.logprobs]
        self._process.stdin.write(json.dumps(wanted).encode() + b"\n")
        self._process.stdin.flush()
        used, seconds = json.loads(self._process.stdout.readline())
        return Measured(1e6 * used / load.total, rate=load.total / seconds)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def start(folder: Path, arguments: list[str]) -> subprocess.Popen[bytes]:
    """Start a Python that imports from a checkout."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def answer(most: int) -> None:
    """Generate what standard input asks for, until it ends."""
    from vlm_serve import EngineConfig, Pipeline, SamplingParams

    told = os.fdopen(os.dup(1), "w")
    config = EngineConfig(threads=1, max_num_seqs=most, speculative="off", cache_memory="256MiB")
    with Pipeline("demo", config) as pipeline:
        for line in sys.stdin:
            prompts, tokens, logprobs = json.loads(line)
            given = {"max_tokens": tokens, "temperature": 0, "logprobs": logprobs}
            params = SamplingParams(ignore_eos=True, **given)
            began, used = time.perf_counter(), time.process_time()
            pipeline.generate_many(prompts, params)
            taken = time.process_time() - used, time.perf_counter() - began
            print(json.dumps(taken), file=told, flush=True)


class Side:
    """A checkout: its server and its engine."""

    def __init__(self, folder: Path, most: int, *, apart: bool = False) -> None:
        self.over_http, self.alone = Server(folder, most, apart=apart), Alone(folder, most)
        self.rounds: list[tuple[Measured, Measured]] = []

    def run(self, load: Load, number: int) -> None:
        self.rounds.append((self.over_http.run(load, number), self.alone.run(load, number)))

    def extra(self) -> float:
        """Return microseconds of processor a token: over HTTP less from Python."""
        return statistics.median(http.used - alone.used for http, alone in self.rounds)

    def share(self) -> float:
        """Return what a token takes of the engine's own process, by what it takes from Python."""
        return statistics.median(http.engine / alone.used for http, alone in self.rounds)

    def close(self) -> None:
        self.over_http.close()
        self.alone.close()


def measure(sides: dict[str, Side], load: Load, rounds: int) -> bool:
    """Print what a load costs; return False if it costs more than it may."""
    for side in sides.values():
        side.rounds = []
    for number in range(rounds + 1):
        for side in list(sides.values())[:: -1 if number % 2 else 1]:
            side.run(load, number)
    for side in sides.values():
        side.rounds = side.rounds[1:]  # the first one warms up
    median = statistics.median
    print(f"{load.streams} streams of {load.tokens} tokens", flush=True)
    for name, side in sides.items():
        http, alone = zip(*side.rounds, strict=True)
        share = median(one.rate / other.rate for one, other in side.rounds)
        rate, loop = median(each.rate for each in http), median(each.loop for each in http)
        print(
            f"  {name:7} {side.extra():6.1f} us a token beside the",
            f"{median(each.used for each in alone):.0f} from Python; loop {loop:.1f} us;",
            f"{rate:.0f} tokens/s, {share:.2f} of those from Python",
        )
        if name == APART:
            print(f"          its engine's process {side.share():.2f} of that from Python")
        if load.streams == 1:
            waits = median(each.first for each in http), median(each.gap for each in http)
            print("          first event after {:.2f} ms, then each {:.3f} ms".format(*waits))
    if "before" in sides:
        ours, theirs = ([http for http, _ in sides[name].rounds] for name in ("now", "before"))
        for name in ("used", "loop", "first", "gap")[: 4 if load.streams == 1 else 2]:
            ratios = [
                getattr(a, name) / getattr(b, name) for a, b in zip(ours, theirs, strict=True)
            ]
            least, most = min(ratios), max(ratios)
            print(f"  {name:7} now / before {median(ratios):.2f} ({least:.2f} to {most:.2f})")
    alone = load.streams == 1
    good = alone or sides["now"].extra() <= GOAL_US
    return good and (alone or APART not in sides or sides[APART].share() <= GOAL_APART)


def main() -> None:
    """Run the benchmark; exit with 1 if a load of several streams costs more than the goal."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--logprobs", type=int)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--engine-process", action="store_true")
    options = parser.parse_args()
    most = max(options.streams)
    folders = {"now": ROOT} | ({"before": options.before.resolve()} if options.before else {})
    sides = {name: Side(folder, most) for name, folder in folders.items()}
    if options.engine_process:
        sides[APART] = Side(ROOT, most, apart=True)
    try:
        loads = [
            Load(streams, options.tokens, options.chat, options.logprobs)
            for streams in options.streams
        ]
        good = [measure(sides, load, options.rounds) for load in loads]
    finally:
        for side in sides.values():
            side.close()
    print(f"goal: at most {GOAL_US:.0f} us a token; an engine's process at most {GOAL_APART}")
    sys.exit(not all(good))


if __name__ == "__main__":
    if sys.argv[1:2] == [_CHILD]:
        answer(int(sys.argv[2]))
    else:
        main()
