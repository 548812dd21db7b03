"""Measure what a reader of /v1/cache/events costs the engine: decode speed with one and without.

    python benchmarks/events.py [MODEL] [--batch 8] [--tokens 3000] [--rounds 12] [--threads 1]
                                [--before CHECKOUT]

A real server in a process of its own decodes `--batch` answers of one request at once; its own
count of steps says how fast. Within each request a reader in a third process is switched on and
off: with, without, without, with, the next time the other way round. The round's figures are the
ratio of the two speeds, and that of the CPU time of the server's process for a token, which does
not grow when others use the machine (it counts the event loop's work too, whether or not the engine
has to wait for it). The answers add nodes to the cache all the time, and the reader is told.

First it prints what the mirror costs the engine's thread for every node that comes and goes, in CPU
time, with nobody who follows and with somebody. A decode step of eight adds half a node on average.

With `--before` the rounds are whole requests to this checkout's server and another one's instead,
both without readers: what being ready to tell costs when nobody listens.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import common  # noqa: F401  # First: it adds examples/ and tests/ to the path.
import httpx
from common.machine import commit, describe
from server_process import server_process

from vlm_serve.cache.events import CacheEvents
from vlm_serve.cache.records import Block, Branch, Node
from vlm_serve.engine.features.mirror import TreeMirror

ROOT = Path(__file__).resolve().parents[1]
WINDOW_SECONDS, SETTLE_SECONDS = 0.6, 0.15
PROMPT_TOKENS = 64
NODES = 20_000
READER = """
import select, socket, sys
address = (sys.argv[1], int(sys.argv[2]))
while sys.stdin.readline():
    stream, count = socket.create_connection(address), 0
    stream.sendall(b"GET /v1/cache/events HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n")
    first = stream.recv(1 << 16)
    print("on", flush=True)
    while sys.stdin not in (ready := select.select([stream, sys.stdin], [], [])[0]):
        count += stream.recv(1 << 16).count(b"event: changes")
    sys.stdin.readline()
    stream.close()
    print(count, flush=True)
"""
"""Reads all and makes nothing of it: what a page does with it is its browser's time."""


class Reader:
    """A process that reads the events while it is switched on.

    Attributes:
        messages: of changes, so far.
    """

    def __init__(self, url: str) -> None:
        address = url.removeprefix("http://").split(":")
        self._process = subprocess.Popen(
            [sys.executable, "-c", READER, *address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in: IO[str] = self._process.stdin
        self._out: IO[str] = self._process.stdout
        self.messages = 0

    @contextmanager
    def reading(self) -> Iterator[None]:
        self._say()
        try:
            yield
        finally:
            self.messages += int(self._say())

    def _say(self) -> str:
        self._in.write("\n")
        self._in.flush()
        return self._out.readline()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@dataclass(frozen=True)
class Speed:
    """Of one or several windows."""

    tokens_per_second: float
    cpu_seconds_per_token: float

    @staticmethod
    def mean(speeds: Sequence[Speed]) -> Speed:
        return Speed(
            statistics.mean(speed.tokens_per_second for speed in speeds),
            statistics.mean(speed.cpu_seconds_per_token for speed in speeds),
        )


class Decoding:
    """A server that decodes on request, and its speed."""

    def __init__(self, url: str, process: int, batch: int, tokens: int) -> None:
        self.url = url
        self._tasks = Path(f"/proc/{process}/task")
        self._batch, self._tokens = batch, tokens
        self._client = httpx.Client(base_url=url, timeout=600, trust_env=False)

    @contextmanager
    def request(self, seed: int) -> Iterator[None]:
        """All answers decode in the block; afterwards they are awaited."""
        thread = threading.Thread(target=self._ask, args=(seed,))
        thread.start()
        while self._steps()[2] < self._batch:
            time.sleep(0.01)
        yield
        thread.join()

    def _ask(self, seed: int) -> None:
        body = {
            "prompt": [(seed * 7919 + place * 31) % 200 + 10 for place in range(PROMPT_TOKENS)],
            "n": self._batch,
            "max_tokens": self._tokens,
            "ignore_eos": True,
            "temperature": 1.0,
            "seed": seed,
        }
        with httpx.Client(base_url=self.url, timeout=600, trust_env=False) as client:
            answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text

    def _steps(self) -> tuple[float, int, int]:
        """(time, steps so far, sequences that run), as of one moment."""
        stats = self._client.get("/v1/cache/stats").json()
        return time.perf_counter(), stats["num_steps"], stats["num_running"]

    def _cpu_seconds(self) -> float:
        """Of all threads of the server."""
        times = [
            each.joinpath("schedstat").read_text().split()[0] for each in self._tasks.iterdir()
        ]
        return sum(map(int, times)) / 1e9

    def speed(self, seconds: float) -> Speed:
        """Of a window of so many seconds, in which all answers decode."""
        begin, first, _ = self._steps()
        used = self._cpu_seconds()
        time.sleep(seconds)
        end, last, running = self._steps()
        used = self._cpu_seconds() - used
        assert running == self._batch, "an answer has ended: ask for more --tokens"
        tokens = (last - first) * self._batch
        return Speed(tokens / (end - begin), used / tokens)


def mirror_seconds(follow: bool, mirrored: bool = True) -> float:
    """CPU seconds for a node that comes, is pinned and goes; each in a step of its own."""
    events = CacheEvents()
    mirror = TreeMirror(events) if mirrored else None
    root = Branch(b"root", 0, 0)
    nodes = [Node(index.to_bytes(32, "big"), root, 16, Block(index)) for index in range(NODES)]
    with mirror.following() if mirror is not None and follow else nullcontext():
        begin = time.thread_time()
        for node in nodes:
            events.node_added.publish(node)
            if events.node_used.subscribers:
                events.node_used.publish(node)
            if mirror is not None:
                mirror.publish()
            events.node_evicted.publish(node)
            if mirror is not None:
                mirror.publish()
        return (time.thread_time() - begin) / NODES


def print_mirror() -> None:
    bare, alone, followed = (
        min(mirror_seconds(follow, mirrored) for _ in range(5)) * 1e6
        for follow, mirrored in ((False, False), (False, True), (True, True))
    )
    print(
        f"a node that comes and goes: {alone - bare:.2f} us of the engine's thread, "
        f"{followed - bare:.2f} us while somebody follows",
        flush=True,
    )


def with_and_without(server: Decoding, reader: Reader, number: int) -> tuple[Speed, Speed]:
    """(with, without) of one request."""
    speeds: dict[bool, list[Speed]] = {True: [], False: []}
    order = (True, False, False, True) if number % 2 else (False, True, True, False)
    with server.request(number):
        for reads in order:
            with ExitStack() as stack:
                if reads:
                    stack.enter_context(reader.reading())
                time.sleep(SETTLE_SECONDS)
                speeds[reads].append(server.speed(WINDOW_SECONDS))
    return Speed.mean(speeds[True]), Speed.mean(speeds[False])


def ours_and_other(ours: Decoding, other: Decoding, number: int) -> tuple[Speed, Speed]:
    """(ours, other) of one request each."""
    speeds = {}
    for server in (ours, other) if number % 2 else (other, ours):
        with server.request(number):
            time.sleep(SETTLE_SECONDS)
            speeds[server] = server.speed(4 * WINDOW_SECONDS)
    return speeds[ours], speeds[other]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--before", type=Path)
    asked = parser.parse_args()
    options = [asked.model, "--device", "cpu", "--block-size", "16", "--cache-memory", "64MiB"]
    options += ["--max-num-seqs", str(asked.batch), "--threads", str(asked.threads)]
    options += ["--max-model-len", str(PROMPT_TOKENS + asked.tokens + 1)]
    print(f"{commit(ROOT)}; {describe(asked.threads)}", flush=True)
    print_mirror()
    ratios, costs = [], []
    with ExitStack() as stack:

        def started(folder: Path) -> Decoding:
            server = stack.enter_context(server_process(*options, folder=folder))
            return Decoding(server.url, server.process.pid, asked.batch, asked.tokens)

        ours = started(ROOT)
        other = started(asked.before) if asked.before is not None else None
        reader = Reader(ours.url)
        stack.callback(reader.close)
        for number in range(asked.rounds):
            if other is not None:
                one, two = ours_and_other(ours, other, number)
            else:
                one, two = with_and_without(ours, reader, number)
            ratio = one.tokens_per_second / two.tokens_per_second
            cost = one.cpu_seconds_per_token / two.cpu_seconds_per_token
            print(
                f"{one.tokens_per_second:9.1f} {two.tokens_per_second:9.1f} tokens/s {ratio:.4f}"
                f"  {one.cpu_seconds_per_token * 1e6:7.1f} {two.cpu_seconds_per_token * 1e6:7.1f}"
                f" us of CPU a token {cost:.4f}",
                flush=True,
            )
            if number:  # the first one warms up
                ratios.append(ratio)
                costs.append(cost)
        assert other is not None or reader.messages > 0, "the reader was told of no change"
    print("with / without a reader" if other is None else "ours / before")
    for name, values in (("speed", ratios), ("CPU time a token", costs)):
        low, median, high = statistics.quantiles(values, n=4)
        print(f"{name}: median {median:.4f}, quartiles {low:.4f} {high:.4f}")
    print(f"{len(ratios)} rounds, {reader.messages} messages of changes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
