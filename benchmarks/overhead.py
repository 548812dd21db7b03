"""Measure what engine and server cost per generated token, beside the model's forward.

    python benchmarks/overhead.py [MODEL] [--batch 8] [--tokens 256] [--rounds 5] [--answer 4000]

A real server runs in this process, its clients in another, so that the CPU time of this process is
that of server, engine and model. The model runs on one thread, the engine's; its CPU time is taken
around each forward. What is left is overhead: planning, batching, sampling, detokenizing,
bookkeeping (the engine's thread), and HTTP, JSON and streaming (all other threads). CPU time does
not grow when others use the machine.

The last rows are without a server: what the engine costs around the 40th token of an answer and
around the one that `--answer` says, which should be the same. There a stand-in takes the model's
place: a forward over a long context leaves nothing else in the processor's caches, which would make
everything after it look slower.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from typing import Any

import common  # noqa: F401  # First: it adds examples/ and tests/ to the path.
import httpx
import torch
from serving import running

from vlm_serve import EngineConfig, SamplingParams
from vlm_serve.engine.engine import Engine
from vlm_serve.engine.requests.outputs import Delta
from vlm_serve.engine.steps.local_executor import LocalExecutor
from vlm_serve.models import Model
from vlm_serve.models.batch import ForwardOutput

GOAL_MS = 0.3
EARLY, WINDOW = 40, 32
WORDS = ("Tell me a story about the number", "What do you know about the number")


class ThreadClock:
    """CPU seconds of the thread that calls a function, summed over its calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.seconds = 0.0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        begin = time.thread_time()
        try:
            return self._function(*arguments, **options)
        finally:
            self.seconds += time.thread_time() - begin


def stream(url: str, number: int, tokens: int) -> int:
    """One streamed chat; returns the tokens it was charged for."""
    body = {
        "messages": [{"role": "user", "content": f"{WORDS[number % 2]} {number}."}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    usage: dict[str, int] = {}
    with (
        httpx.Client(base_url=url, timeout=600, trust_env=False) as client,
        client.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        for line in response.iter_lines():
            if line.startswith("data: {"):
                usage = json.loads(line.removeprefix("data: ")).get("usage") or usage
    return usage["completion_tokens"]


def streams(url: str, first: int, batch: int, tokens: int) -> int:
    """That many at once; runs in the clients' process."""
    with ThreadPoolExecutor(batch) as threads:
        jobs = [threads.submit(stream, url, first + index, tokens) for index in range(batch)]
        return sum(job.result() for job in jobs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--answer", type=int, default=4000)
    options = parser.parse_args()
    config = EngineConfig(
        threads=1, cache_memory="256MiB", max_num_seqs=options.batch, speculative="off"
    )
    engine = Engine.from_checkpoint(options.model, config)
    model = model_of(engine)
    model.forward = forward = ThreadClock(model.forward)  # type: ignore[method-assign]
    rows: list[tuple[float, float, float]] = []
    with (
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as clients,
        running(engine) as server,
    ):
        for number in range(options.rounds + 1):
            rows.append(measure(clients, server.url, engine, forward, number, options))
    rows = rows[1:]  # the first one warms up
    model_ms, engine_ms, server_ms = (
        1000 * statistics.median(column) for column in zip(*rows, strict=True)
    )
    print(f"{options.model}, {options.batch} streams at once, CPU ms per generated token")
    print(f"  the model's forward      {model_ms:8.3f}")
    print(f"  engine beside it         {engine_ms:8.3f}")
    print(f"  server                   {server_ms:8.3f}")
    print(f"  engine and server        {engine_ms + server_ms:8.3f}   goal: under {GOAL_MS}")
    if options.answer:
        early, late = (1000 * seconds for seconds in along_an_answer(options))
        print(
            f"  engine, {EARLY}th token      {early:8.3f}\n"
            f"  engine, {options.answer}th token    {late:8.3f}   {late / early:.2f} times"
        )


def model_of(engine: Engine) -> Model:
    executor = engine._loop._executor
    assert isinstance(executor, LocalExecutor)
    return executor._model


def along_an_answer(options: argparse.Namespace) -> tuple[float, float]:
    """CPU seconds a token of the engine, early and late in answers given at once."""
    config = EngineConfig(
        threads=1, cache_memory="1GiB", max_num_seqs=options.batch, speculative="off"
    )
    engine = Engine.from_checkpoint(options.model, config)
    logits = torch.zeros(options.batch, engine.spec.vocab_size)
    model = model_of(engine)
    model.forward = (
        lambda batch, caches: ForwardOutput(  # type: ignore[method-assign]
            logits[: len(batch.logit_rows)]
        )
    )
    marks: list[float] = []
    ended = threading.Semaphore(0)

    def note(delta: Delta) -> None:
        marks.append(time.thread_time())
        if delta.finish_reason is not None:
            ended.release()

    params = SamplingParams(max_tokens=options.answer + WINDOW, temperature=0.0, ignore_eos=True)
    for number in range(options.batch):
        engine.submit(engine.preprocessor.prepare_tokens([10 + number] * 20), params, note)
    for _ in range(options.batch):
        ended.acquire()
    engine.close()

    def around(token: int) -> float:
        first, last = ((token + side * WINDOW) * options.batch - 1 for side in (-1, 1))
        steps = [marks[at + options.batch] - marks[at] for at in range(first, last, options.batch)]
        return statistics.median(steps) / options.batch

    return around(EARLY), around(options.answer)


def measure(
    clients: ProcessPoolExecutor,
    url: str,
    engine: Engine,
    forward: ThreadClock,
    number: int,
    options: argparse.Namespace,
) -> tuple[float, float, float]:
    """CPU seconds a token of the forward, of the engine beside it, and of all other threads."""
    before = time.process_time(), engine.call(time.thread_time), forward.seconds
    job = clients.submit(streams, url, number * options.batch, options.batch, options.tokens)
    tokens = job.result()
    assert tokens == options.batch * options.tokens, "a stream ended early"
    after = time.process_time(), engine.call(time.thread_time), forward.seconds
    process, own, model = (late - early for late, early in zip(after, before, strict=True))
    return model / tokens, (own - model) / tokens, (process - own) / tokens


if __name__ == "__main__":
    main()
