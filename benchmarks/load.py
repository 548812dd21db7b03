"""Load one server process with streaming clients, some of which leave or send garbage.

    python benchmarks/load.py [MODEL] [--clients 64] [--seconds 180] [--seed 0]

Every question is asked alone first. Then all clients ask at once for that long: 20 % of the
requests are broken off after a few chunks, 10 % carry broken media. The run fails if an answer
differs from the one given alone, a request is lost, rubbish is not refused with a 4xx, a page is
not back at the end, memory grows by more than 5 % after the first third, or more than 1 % of the
steps spend 20 ms outside of the model's forward.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import random
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import common  # noqa: F401  # First: it adds examples/ and tests/ to the path.
import httpx
from PIL import Image, ImageDraw
from server_process import server_process

SERVE = ("--cache-memory", "64MiB", "--max-num-seqs", "16", "--threads", "1")
LEAVING, BROKEN = 0.2, 0.1
STEP_SECONDS = 0.02
GROWTH = 1.05
COLOURS = ("red", "green", "blue", "yellow")
TEXTS = ("What do you see?", "What color is the shape?", "Describe the picture.")
RUBBISH = ("data:image/png;base64,AAAA", "data:image/jpeg;base64,/9j/4AAQ", "file:///etc/passwd")


def picture(colour: str, size: int) -> str:
    """A data: URL of a disc."""
    image = Image.new("RGB", (size, size), "white")
    ImageDraw.Draw(image).ellipse((size // 4, size // 4, size // 2, size // 2), fill=colour)
    data = io.BytesIO()
    image.save(data, "png")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def body(url: str, text: str) -> dict[str, Any]:
    content = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": text},
    ]
    return {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 48,
        "temperature": 0,
        "stream": True,
    }


QUESTIONS = [
    body(picture(colour, size), text)
    for colour in COLOURS
    for size in (96, 160, 256)
    for text in TEXTS
]


async def ask(client: httpx.AsyncClient, question: dict[str, Any], chunks: int) -> tuple[int, str]:
    """Status and text of one streamed answer, of which at most that many chunks are read."""
    text = ""
    async with client.stream("POST", "/v1/chat/completions", json=question) as response:
        if response.status_code != 200:
            await response.aread()
            return response.status_code, ""
        ended = False
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line.removeprefix("data: "))["choices"]
                text += "".join(choice["delta"].get("content") or "" for choice in choices)
                chunks -= 1
            ended = ended or line == "data: [DONE]"
            if chunks == 0:
                return 200, text
    return (200 if ended else 0), text


class Load:
    """The clients, and what they met."""

    def __init__(self, client: httpx.AsyncClient, alone: list[str], seed: int) -> None:
        self._client, self._alone, self._seed = client, alone, seed
        self.counts: Counter[str] = Counter()

    async def run(self, clients: int, seconds: float) -> None:
        end = time.monotonic() + seconds
        await asyncio.gather(*(self._client_loop(number, end) for number in range(clients)))

    async def _client_loop(self, number: int, end: float) -> None:
        rng = random.Random(f"{self._seed} {number}")
        while time.monotonic() < end:
            self.counts[await self._one(rng)] += 1

    async def _one(self, rng: random.Random) -> str:
        index, fate = rng.randrange(len(QUESTIONS)), rng.random()
        if fate < BROKEN:
            status, _ = await ask(self._client, body(rng.choice(RUBBISH), TEXTS[0]), -1)
            return "refused" if 400 <= status < 500 else f"WRONG: rubbish answered {status}"
        if fate < BROKEN + LEAVING:
            status, text = await ask(self._client, QUESTIONS[index], rng.randint(1, 8))
            fine = status == 200 and self._alone[index].startswith(text)
            return "left early" if fine else f"WRONG: before leaving, {status}"
        status, text = await ask(self._client, QUESTIONS[index], -1)
        if status != 200:
            return f"WRONG: status {status}"
        return "answered" if text == self._alone[index] else "WRONG: another answer than alone"


def resident_bytes(process: int) -> int:
    status = Path(f"/proc/{process}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    return int(found.group(1)) * 1024


async def watch_memory(process: int, seconds: float) -> tuple[int, int]:
    """Memory after a third of the time, and the most after that."""
    await asyncio.sleep(seconds / 3)
    settled = most = resident_bytes(process)
    end = time.monotonic() + seconds * 2 / 3
    while time.monotonic() < end:
        await asyncio.sleep(1)
        most = max(most, resident_bytes(process))
    return settled, most


async def leftovers(client: httpx.AsyncClient) -> str:
    """What is not back once nobody asks any more; empty if all is."""
    for _ in range(100):
        stats = (await client.get("/v1/cache/stats")).json()
        if not stats["num_running"] and not stats["num_waiting"]:
            break
        await asyncio.sleep(0.1)
    (await client.post("/v1/cache/flush", json={})).raise_for_status()
    usage = (await client.get("/v1/cache/stats")).json()["usage"]
    rows = {state: count for state, count in usage["rows"].items() if count and state != "free"}
    if usage["free_blocks"] == usage["blocks"] and not rows:
        return ""
    return f"{usage['blocks'] - usage['free_blocks']} blocks and rows {rows}"


async def slow_steps(client: httpx.AsyncClient) -> tuple[int, int]:
    """Steps with much time outside of the forward, and all steps."""
    counts = (await client.get("/v1/cache/stats")).json()["step_times"]["host_seconds_counts"]
    slow = sum(count for bound, count in counts.items() if float(bound) > STEP_SECONDS)
    return slow, sum(counts.values())


async def drive(process: int, url: str, options: argparse.Namespace) -> bool:
    limits = httpx.Limits(max_connections=options.clients + 4)
    async with httpx.AsyncClient(
        base_url=url, timeout=120, trust_env=False, limits=limits
    ) as client:
        alone = [(await ask(client, question, -1))[1] for question in QUESTIONS]
        load = Load(client, alone, options.seed)
        slow_before, steps_before = await slow_steps(client)
        _, (settled, most) = await asyncio.gather(
            load.run(options.clients, options.seconds), watch_memory(process, options.seconds)
        )
        slow, steps = await slow_steps(client)
        slow, steps = slow - slow_before, steps - steps_before
        missing = await leftovers(client)
    for what, count in sorted(load.counts.items()):
        print(f"{what:<36}{count:>8}")
    print(f"steps{'':<31}{steps:>8}")
    late = f"over {1000 * STEP_SECONDS:g} ms outside of the forward"
    print(f"{late:<36}{slow:>8}   {100 * slow / steps:.2f} %")
    print(f"memory: {settled >> 20} MiB after a third of the time, at most {most >> 20} MiB later")
    print(f"not back at the end: {missing or 'nothing'}")
    wrong = any(what.startswith("WRONG") for what in load.counts)
    return not wrong and not missing and slow <= steps / 100 and most <= GROWTH * settled


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with server_process(options.model, *SERVE) as server:
        fine = asyncio.run(drive(server.process.pid, server.url, options))
    print("every promise kept" if fine else "a promise was broken")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
