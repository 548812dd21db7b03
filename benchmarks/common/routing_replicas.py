"""The trace of `routing.py` with pictures and clips, through real servers of the demo model."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import av
import httpx
import numpy as np
from PIL import Image
from server_process import server_process

from common.routing_policies import Chooser
from common.routing_simulation import DIGEST_AGE, DIGEST_SECONDS, WINDOW_SECONDS, Outcome
from common.routing_trace import VIDEO_SHARE, Question, Trace
from vlm_serve.preprocess.identity.affinity import AffinityDigest
from vlm_serve.routing.view import RequestUsage

OPTIONS = ("--threads", "1", "--max-num-seqs", "8", "--no-page", "--speculative", "off")
WORDS_PER_WORD = 5
"""Words of the simulation, a token each, that one word here stands for: it is as many tokens."""
SIDES, CLIP_SIDE, FRAMES = (192, 544), 192, (8, 20)
FRAMES_PER_SECOND = 2
ANSWER_TOKENS = 16
SECONDS = 300.0


class RealTrace(Trace):
    """Requests that the demo model's server answers."""

    model = "demo"

    def _new_medium(self, number: int) -> tuple[int, int, str, bytes]:
        rng, digest = self._rng, number.to_bytes(32, "little")
        if rng.random() < VIDEO_SHARE:
            frames = rng.randrange(*FRAMES, 2)
            return (CLIP_SIDE // 32) ** 2, frames // 2, clip(number, frames), digest
        sides = rng.randrange(*SIDES, 32), rng.randrange(*SIDES, 32)
        return sides[0] * sides[1] // 32**2, 1, picture(number, *sides), digest

    def _words(self, count: int) -> tuple[str, list[int]]:
        return super()._words(max(1, count // WORDS_PER_WORD))


def picture(number: int, height: int, width: int) -> str:
    """A data URL of smooth colours."""
    buffer = io.BytesIO()
    Image.fromarray(_pixels(number, height, width)).save(buffer, "JPEG")
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def clip(number: int, frames: int) -> str:
    """A data URL of a still picture that slowly moves."""
    buffer, still = io.BytesIO(), _pixels(number, CLIP_SIDE, CLIP_SIDE)
    with av.open(buffer, "w", format="mp4") as container:
        stream: Any = container.add_stream("mpeg4", rate=FRAMES_PER_SECOND)
        stream.width = stream.height = CLIP_SIDE
        stream.pix_fmt = "yuv420p"
        for frame in range(frames):
            moved = np.ascontiguousarray(np.roll(still, 8 * frame, axis=1))
            container.mux(stream.encode(av.VideoFrame.from_ndarray(moved, format="rgb24")))
        container.mux(stream.encode())
    return "data:video/mp4;base64," + base64.b64encode(buffer.getvalue()).decode()


def _pixels(number: int, height: int, width: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    coarse = np.random.default_rng(number).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))


@contextmanager
def servers(count: int, cache_mib: float, threads: int) -> Iterator[list[str]]:
    """URLs of servers, each with so much cache memory."""
    words = ("demo", *OPTIONS, "--cache-memory", f"{cache_mib}MiB", "--threads", str(threads))
    with ExitStack() as stack:
        yield [stack.enter_context(server_process(*words)).url for _ in range(count)]


def run(urls: Sequence[str], trace: Sequence[Question], chooser: Chooser) -> Outcome:
    """A trace through servers, whose caches are empty at its begin."""
    return asyncio.run(_Run(urls, chooser).run(trace))


class _Run:
    def __init__(self, urls: Sequence[str], chooser: Chooser) -> None:
        limits = httpx.Limits(max_connections=None)
        self._clients = [
            httpx.AsyncClient(base_url=url, timeout=SECONDS, trust_env=False, limits=limits)
            for url in urls
        ]
        self._chooser = chooser
        self._queues = [0] * len(urls)
        self._windows: list[dict[int, float]] = [{} for _ in urls]
        self._outcome = Outcome()
        self._begin = 0.0

    @property
    def _now(self) -> float:
        return time.monotonic() - self._begin

    async def run(self, trace: Sequence[Question]) -> Outcome:
        for client in self._clients:
            (await client.post("/v1/cache/flush", json={})).raise_for_status()
        self._begin = time.monotonic()
        reporting = asyncio.ensure_future(self._report())
        asked = []
        for question in trace:
            await asyncio.sleep(max(0.0, question.time - self._now))
            asked.append(asyncio.ensure_future(self._ask(question)))
        last = int(self._now // WINDOW_SECONDS)
        await asyncio.gather(*asked)
        reporting.cancel()
        for client in self._clients:
            await client.aclose()
        for window in range(last):
            work = [each.get(window, 0.0) for each in self._windows]
            self._outcome.busiest.append(max(work) * len(work) / max(1.0, sum(work)))
        return self._outcome

    async def _ask(self, question: Question) -> None:
        number = self._chooser.choose(question, self._queues)
        self._queues[number] += 1
        body = {
            "messages": list(question.messages),
            "max_tokens": ANSWER_TOKENS,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        begin, first, usage = time.monotonic(), 0.0, None
        client = self._clients[number]
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                first = first or time.monotonic() - begin
                usage = event.get("usage") or usage
        assert usage is not None, "the answer broke off"
        self._queues[number] -= 1
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        spent = RequestUsage(usage["prompt_tokens"], cached, usage["completion_tokens"])
        self._chooser.ended(question, number, spent)
        self._outcome.first_tokens.append(first)
        self._outcome.prompt_tokens += usage["prompt_tokens"]
        self._outcome.hit_tokens += cached
        window, windows = int(self._now // WINDOW_SECONDS), self._windows[number]
        windows[window] = windows.get(window, 0.0) + spent.computed

    async def _report(self) -> None:
        """Tells the chooser what servers have said some seconds before."""
        reports: deque[tuple[float, int, AffinityDigest, float]] = deque()
        while True:
            for number, client in enumerate(self._clients):
                said = (await client.get("/v1/cache/affinity")).json()
                load = (await client.get("/load")).json()["open_prompt_tokens"]
                entries = ((bytes.fromhex(each["key"]), each["tokens"]) for each in said["entries"])
                digest = AffinityDigest(said["version"], tuple(entries))
                reports.append((self._now, number, digest, float(load)))
            while reports and reports[0][0] <= self._now - DIGEST_AGE:
                self._chooser.told(*reports.popleft()[1:])
            await asyncio.sleep(DIGEST_SECONDS)
