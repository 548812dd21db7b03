"""Compare reading from a shared store with computing, by prompt length, medium and model size.

The rate in bytes per second is set beside that of a plain copy.

    python benchmarks/shared_store.py [--model demo small ...] [--lengths 64 256 ...] [--rounds 5]
        [--servers 4] [--pairs 200]

Starts a store on loopback. Every round times one request of a second engine that reads what the
first has written, and the same request computed cold by a third without a store, in turns. --pairs
does not time anything: it counts answers of random conversations at a second engine whose first
logits have the bits of a cold run, and exits with 1 if one differs or a medium is encoded twice.
"""

from __future__ import annotations

import argparse
import base64
import io
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import common  # noqa: F401  # First: it adds examples/ and tests/ to the path.
import numpy as np
import torch
from checkpoint_spec import BENCHMARK_SPEC, CheckpointSpec
from common.machine import describe
from make_checkpoint import make_checkpoint
from parity import greedy, tapped
from parity_cases import assistant, random_ids, user, video
from PIL import Image
from redis_server import StoreServer, running

from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Output, Pipeline

MODELS = {"demo": None, "small": BENCHMARK_SPEC}
MIB = 1 << 20
RAW_BYTES = 8 * MIB
Prompt = list[int] | list[dict[str, Any]]


@contextmanager
def engines(
    model: str | Path, store: StoreServer, count: int, **options: Any
) -> Iterator[list[Pipeline]]:
    """`count` engines on the store, and one without caches."""
    settings: dict[str, Any] = {"cache_memory": "512MiB", "max_model_len": 16384, **options}
    with ExitStack() as stack:
        made = [
            Pipeline(
                str(model),
                EngineConfig(shared_store=store.url, shared_store_timeout=60.0, **settings),
            )
            for _ in range(count)
        ]
        made.append(Pipeline(str(model), EngineConfig(enable_prefix_caching=False, **settings)))
        for pipe in made:
            stack.enter_context(pipe)
        yield made


def settle(pipe: Pipeline) -> None:
    tiers = pipe.engine._tiers._tiers
    assert tiers is not None and tiers.sharer is not None
    while not tiers.sharer.idle:
        time.sleep(0.005)


def forget(pipe: Pipeline) -> None:
    """The device's cache and embeddings; the store keeps what it has."""

    def run() -> None:
        pipe.engine._cache.flush()
        pipe.engine._tiers._tiers.fetcher.forget()  # type: ignore[union-attr]

    pipe.engine.call(run)


def answer(pipe: Pipeline, prompt: Prompt, count: int = 1) -> Output:
    if isinstance(prompt[0], int):
        return pipe.generate(prompt, greedy(count))  # type: ignore[arg-type]
    return pipe.chat(prompt, greedy(count))  # type: ignore[arg-type]


def timed(pipe: Pipeline, prompt: Prompt) -> tuple[float, Output]:
    began = time.perf_counter()
    output = answer(pipe, prompt)
    return time.perf_counter() - began, output


def noise(rng: random.Random, height: int, width: int) -> dict[str, Any]:
    """A picture as clients send it: what is known of arrays is not shared."""
    pixels = np.random.default_rng(rng.getrandbits(30)).integers(0, 256, (height, width, 3))
    file = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(file, "png")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def cases(lengths: list[int], rng: random.Random) -> Iterator[tuple[str, Callable[[], Prompt]]]:
    """What is asked, made anew for every round."""
    for length in lengths:
        yield f"{length} tokens", lambda length=length: random_ids(length, rng.getrandbits(30))
    for side in (128, 512):
        yield (
            f"picture {side} x {side}",
            lambda side=side: [user(noise(rng, side, side), "What is this?")],
        )


def compare(name: str, model: str | Path, store: StoreServer, given: argparse.Namespace) -> None:
    rng = random.Random(5)
    with engines(model, store, 2) as (first, second, cold):
        for pipe in (first, second, cold):
            answer(pipe, random_ids(64, 1))
        for case, make in cases(given.lengths, rng):
            reading, computing, share = [], [], 0.0
            moved = second.engine.stats()["tiers"]["shared_read_bytes"]
            for _ in range(given.rounds):
                prompt = make()
                answer(first, prompt)
                settle(first)
                forget(second)
                if rng.random() < 0.5:
                    reading.append(timed(second, prompt))
                    computing.append(timed(cold, prompt))
                else:
                    computing.append(timed(cold, prompt))
                    reading.append(timed(second, prompt))
                hit = reading[-1][1]
                assert hit.token_ids == computing[-1][1].token_ids
                share += hit.cache_report.tiers.get("shared", 0) / hit.usage.prompt_tokens
            moved = second.engine.stats()["tiers"]["shared_read_bytes"] - moved
            read = statistics.median(seconds for seconds, _ in reading)
            computed = statistics.median(seconds for seconds, _ in computing)
            ratios = sorted(b / a for (a, _), (b, _) in zip(reading, computing, strict=True))
            cells = (
                f"{name} | {case} | {share / given.rounds:.0%} | {moved / given.rounds / MIB:.2f}"
            )
            times = f"{1000 * read:.1f} | {1000 * computed:.1f} | {statistics.median(ratios):.2f}"
            print(f"| {cells} | {times} |", flush=True)


def speeds(model: str | Path, store: StoreServer) -> None:
    """Bytes per second of a long prompt's reading, of raw GETs and of a copy in memory."""
    prompt = random_ids(4096, 77)
    with engines(model, store, 2, shared_store_write_bandwidth="64GiB") as (first, second, _):
        answer(first, prompt)
        settle(first)
        writing = first.engine.stats()["tiers"]["shared_written_bytes"]
        tiers = second.engine._tiers._tiers
        assert tiers is not None
        kept: dict[str, float] = {}

        async def whole() -> None:
            began, stack = time.perf_counter(), tiers.stack
            places = await stack.locate([*question.records(), *question.states()])
            places |= await stack.locate(question.kv())
            kept["look-up"] = time.perf_counter() - began
            began = time.perf_counter()
            found = await stack.get(list(places))
            kept["reading"] = time.perf_counter() - began
            kept["bytes"] = sum(len(entry.payload) for entry in found.values())
            kept["ids"] = len([*question.records(), *question.states(), *question.kv()])

        keys = second.engine.preprocessor.prepare_tokens(prompt).keys
        cache = second.engine._cache
        match = cache.match(keys, limit=len(prompt) - 1)
        question = cache.tier_query(keys, match, limit=len(prompt) - 1, origin=tiers.stack.origin)
        assert question is not None
        best: dict[str, float] = {}
        for _ in range(5):
            tiers.stack.submit(whole()).result()
            best = dict(kept) if not best or kept["reading"] < best["reading"] else best
    size = best["bytes"]
    print(
        f"look-up of {best['ids']:.0f} ids: {1000 * best['look-up']:.1f} ms; "
        f"written {writing / MIB:.1f} MiB"
    )
    print(f"reading {size / MIB:.1f} MiB: {size / best['reading'] / 1e6:.0f} MB/s")
    store.client.set("raw", bytes(RAW_BYTES))
    raw = _best(lambda: store.client.get("raw"))
    print(f"GET of {RAW_BYTES // MIB} MiB, blocking client: {RAW_BYTES / raw / 1e6:.0f} MB/s")
    data = bytearray(RAW_BYTES)
    print(
        f"copy of {RAW_BYTES // MIB} MiB: {RAW_BYTES / _best(lambda: bytes(data)) / 1e6:.0f} MB/s"
    )


def _best(call: Callable[[], object]) -> float:
    times = []
    for _ in range(10):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)


def hot_medium(model: str | Path, store: StoreServer, count: int) -> None:
    """Many servers are asked about one new picture at once."""
    prompt: Prompt = [user(noise(random.Random(9), 256, 256), "What is this?")]
    store.client.flushall()
    with engines(model, store, count) as pipes:
        barrier = threading.Barrier(count)

        def ask(pipe: Pipeline) -> None:
            barrier.wait()
            answer(pipe, prompt)
            settle(pipe)

        threads = [threading.Thread(target=ask, args=(pipe,)) for pipe in pipes[:-1]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        tiers = [pipe.engine.stats()["tiers"] for pipe in pipes[:-1]]
    written = sum(each["shared_written"] for each in tiers)
    most = max(each["shared_written"] + each["shared_skipped"] for each in tiers)
    print(f"{count} servers, one new picture: {written} entries written, of {most} wanted by each")


def exact(given: argparse.Namespace, store: StoreServer) -> int:
    """Random conversations whose turns alternate between two servers; how many differ."""
    different = 0
    for kind, experts in (("dense", 0), ("moe", 8)):
        with tempfile.TemporaryDirectory() as folder:
            path = make_checkpoint(folder, CheckpointSpec(num_experts=experts))
            for dtype in ("float32", "bfloat16"):
                options: dict[str, Any] = {
                    "dtype": dtype,
                    "block_size": 16,
                    "cache_memory": "64MiB",
                }
                options["tensor_parallel_size"] = given.tensor_parallel_size
                with engines(path, store, 2, **options) as pipes:
                    bad, again, hits = conversations(pipes, given.pairs)
                different += bad + again
                print(f"| {kind}, {dtype} | {hits - bad} of {hits} | {again} |", flush=True)
    return different


def conversations(pipes: list[Pipeline], count: int) -> tuple[int, int, int]:
    """Hits that differ, spans encoded that the other server had encoded before, and hits."""
    first, second, cold = pipes
    rng, hits, bad, again = random.Random(21), 0, 0, 0
    words = ("red", "stars", "below", "a", "circle", "7")

    def text() -> str:
        return " ".join(rng.choice(words) for _ in range(rng.randint(3, 40)))

    def media() -> list[Any]:
        kind = rng.random()
        if kind < 0.4:
            return [noise(rng, rng.choice((40, 64, 96)), 64), text()]
        if kind < 0.6:
            frames = np.random.default_rng(rng.getrandbits(30)).integers(0, 256, (4, 64, 64, 3))
            return [{"type": "video", "video": frames.astype(np.uint8)}, text()]
        if kind < 0.65:
            return [video(rng.choice(("carphone_pristine.mp4", "bikes.mp4"))), text()]
        return [text()]

    while hits < count:
        chat: list[dict[str, Any]] = []
        seen = set[str]()
        for turn in range(rng.randint(2, 4)):
            chat.append(user(*media()))
            pipe = (first, second)[turn % 2]
            with tapped(pipe.engine) as ours:
                given = pipe.chat(chat, greedy(8))
                rows = ours.take()[0]
            settle(pipe)
            spans = given.cache_report.media
            again += sum(each.source == "encoded" and each.hash in seen for each in spans)
            seen.update(each.hash for each in spans)
            if given.cache_report.tiers.get("shared", 0):
                with tapped(cold.engine) as theirs:
                    expected = cold.chat(chat, greedy(8))
                    hits += 1
                    bad += not torch.equal(rows, theirs.take()[0])
                    bad += given.token_ids != expected.token_ids
            chat.append(assistant(given.text))
        forget(first)
        forget(second)
    return bad, again, hits


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--lengths", nargs="+", type=int, default=[128, 512, 2048, 8192])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=0)
    parser.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N")
    given = parser.parse_args()
    print(describe(torch.get_num_threads()))
    with tempfile.TemporaryDirectory() as folder, running(Path(folder)) as store:
        if given.pairs:
            print("| model | equal in bits and tokens | encoded again |")
            print("|---|---|---|")
            return 1 if exact(given, store) else 0
        print("| model | prompt | read | MiB | reading, ms | computing, ms | ratio |")
        print("|---|---|---|---|---|---|---|")
        for name in given.model:
            spec = MODELS[name]
            with tempfile.TemporaryDirectory() as place:
                path = name if spec is None else make_checkpoint(place, spec)
                compare(name, path, store, given)
                speeds(path, store)
        hot_medium("demo", store, given.servers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
