"""Compare routers on a trace of questions about media: reuse, and evenness of the work.

    python benchmarks/routing.py [--replicas 4] [--requests 2000] [--seed 0] [--hot]
    python benchmarks/routing.py --real [--rate 8] [--scale 1] [--only ours]

Replicas are simulated around the real prefix cache; caches are finite. Four independent routers
know what they have sent themselves, what came of it, and digests that are five seconds old. Beside
ours: random, round robin, Ray Serve's prefix router, which sees texts only, and one router that
knows everything at once; and one replica that is as large as all of them. `--real`: replicas are
servers of the demo model with pictures and clips, and times are what a client waits; `--scale` is
the share of the simulation's users and media, and of the caches. `--timings`: what choosing costs
with up to 256 replicas, and what the affinity keys of a large body cost.
"""

from __future__ import annotations

import argparse
import base64
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import fields

from common import routing_replicas
from common.machine import describe
from common.routing_policies import AllKnowing, Chooser, Ours, Random, RoundRobin
from common.routing_ray import RayPrefix
from common.routing_simulation import Clock, Outcome, Replica, simulate
from common.routing_trace import Question, Trace

from vlm_serve.preprocess.identity.affinity import AffinityDigest, affinity_keys_of_body
from vlm_serve.routing.holdings import MAX_ALL_ENTRIES, MAX_DIGEST_ENTRIES
from vlm_serve.routing.router import Policy, Router
from vlm_serve.routing.view import ReplicaView

RATE = 10.0
"""Requests a second for each simulated replica."""
SPEED = 18_000.0
"""Tokens a second of each replica."""
CACHE_SHARE = 0.6
"""Of all media's tokens: what the caches of all replicas hold together."""
ROWS = 256
SIZES = (4, 16, 64, 256)
REAL_RATE, REAL_CACHE_MIB = 8.0, 5.0
"""With real replicas: requests a second for each, memory of a cache at full scale."""

Make = Callable[[Callable[[], float]], Chooser]


def run(trace: Sequence[Question], count: int, tokens: int, make: Make, large: int = 1) -> Outcome:
    """A trace through fresh replicas, each `large` times as large and fast as usual."""
    clock = Clock()
    replicas = [Replica(large * tokens, large * ROWS, large * SPEED) for _ in range(count)]
    chooser = make(clock)
    if isinstance(chooser, AllKnowing):
        chooser.caches = [replica.cache for replica in replicas]
    outcome = simulate(trace, replicas, chooser, clock)
    if isinstance(chooser, Ours):
        chooser.check()
    return outcome


def policies(count: int, seed: int, policy: Policy) -> dict[str, Make]:
    return {
        "random": lambda clock: Random(count, seed),
        "round robin": lambda clock: RoundRobin(count, seed),
        "Ray Serve, by prefix": lambda clock: RayPrefix(count, seed),
        "the same, 10 apart": lambda clock: RayPrefix(count, seed, 10),
        "ours": lambda clock: Ours(count, seed, clock, policy),
    }


def compare(count: int, requests: int, seed: int, hot: float, policy: Policy, only: str) -> None:
    """Prints a table."""
    scale = max(1, count // 4)
    trace_of = Trace(seed, RATE * count, hot, scale)
    trace = list(trace_of.requests(requests))
    tokens = int(CACHE_SHARE * trace_of.media_tokens / count)
    kind = f"one medium in {hot:.0%} of all conversations" if hot else "Zipf"
    print(f"\n{count} replicas, {requests} requests, {kind}, caches of {tokens} tokens")
    single = run(trace, 1, tokens, lambda clock: RoundRobin(1, seed), count)
    rows = {f"one, {count} times as large": single}
    makes = policies(count, seed, policy)
    makes["one that knows everything"] = lambda clock: AllKnowing(count, seed, clock)
    for name, make in makes.items():
        if only in name:
            rows[name] = run(trace, count, tokens, make)
    show(rows)


def compare_real(
    count: int, requests: int, seed: int, rate: float, scale: float, policy: Policy, only: str
) -> None:
    """Prints a table of real replicas."""
    cache = REAL_CACHE_MIB * scale
    trace_of = routing_replicas.RealTrace(seed, rate * count, scale=scale)
    trace = list(trace_of.requests(requests))
    distinct = len({each.medium for each in trace})
    print(
        f"\n{describe(len(os.sched_getaffinity(0)))}\n{count} servers of the demo model, "
        f"{requests} requests about {distinct} media, {rate * count:g} a second, caches of "
        f"{cache} MiB"
    )
    with routing_replicas.servers(1, count * cache, 2) as urls:
        single = routing_replicas.run(urls, trace, RoundRobin(1, seed))
    rows = {f"one, {count} times as large": single}
    with routing_replicas.servers(count, cache, 1) as urls:
        for name, make in policies(count, seed, policy).items():
            if only in name:
                rows[name] = routing_replicas.run(urls, trace, make(time.monotonic))
    show(rows)


def show(rows: dict[str, Outcome]) -> None:
    """Prints a table; the first row is one large replica."""
    print(
        f"{'':<26}{'hit tokens':>11}{'of one':>8}{'busiest: worst':>16}{'mean':>6}"
        f"{'TTFT p50':>10}{'p99 ms':>8}"
    )
    single = next(iter(rows.values()))
    for name, outcome in rows.items():
        busy = f"{outcome.utilisation:>6.0%} busy" if outcome.utilisation else ""
        print(
            f"{name:<26}{outcome.hit_tokens / outcome.prompt_tokens:>11.1%}"
            f"{outcome.hit_tokens / single.hit_tokens:>8.1%}{max(outcome.busiest):>16.2f}"
            f"{statistics.mean(outcome.busiest):>6.2f}{1e3 * outcome.first_token(0.5):>10.0f}"
            f"{1e3 * outcome.first_token(0.99):>8.0f}{busy}",
            flush=True,
        )


def time_choosing(count: int, seed: int) -> None:
    """Choosing among that many replicas with full digests, and with keys that many of them hold.
    Times are the processor's: others may use the machine."""
    rng = random.Random(seed)
    trace = list(Trace(seed, 1.0).requests(200))
    keys = list(dict.fromkeys(key for each in trace for key in each.affinity))
    router = Router()
    views = [ReplicaView(f"replica-{number}", rng.random() * 1e4) for number in range(count)]
    digests = []
    for view in views:
        entries = [(key, rng.randrange(4000)) for key in rng.sample(keys, min(len(keys), 400))]
        most = min(MAX_DIGEST_ENTRIES, MAX_ALL_ENTRIES // count)
        entries += [(rng.randbytes(16), 100) for _ in range(most - len(entries))]
        digest = AffinityDigest(1, tuple(entries))
        begin = time.thread_time()
        router.digest(view.id, digest)
        digests.append(time.thread_time() - begin)
    long = affinity_keys_of_body("completions", {"prompt": "x" * 10**7}, salt="", model="m")
    chosen = []
    for each in trace * 5:
        for affinity in (each.affinity, long):
            begin = time.thread_time()
            best = router.choose(affinity, 0, views)[0]
            chosen.append(time.thread_time() - begin)
            router.sent(best, affinity, 0)
    assert not router.failures
    chosen.sort()
    print(
        f"{count:>4} replicas: choosing {1e6 * statistics.median(chosen):6.0f} us, "
        f"p99 {1e6 * chosen[int(0.99 * len(chosen))]:6.0f} us; "
        f"a digest {1e3 * statistics.median(digests):5.2f} ms"
    )


def time_keys() -> None:
    """The affinity keys of a body of 10 MB, and of a short chat."""
    data = base64.b64encode(random.Random(0).randbytes(7_500_000)).decode()
    large = {
        "10 MB, one upload": [
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
            {"type": "text", "text": "What is this?"},
        ],
        "10 MB, one text": [{"type": "text", "text": data}],
        "a short chat": [{"type": "text", "text": "What is this?"}],
    }
    for name, content in large.items():
        body = {"messages": [{"role": "user", "content": content}]}
        seconds = []
        for _ in range(20):
            begin = time.thread_time()
            affinity_keys_of_body("chat", body, salt="", model="m")
            seconds.append(time.thread_time() - begin)
        print(f"affinity keys of {name:<20}{1e3 * statistics.median(seconds):8.3f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--real", action="store_true", help="real servers of the demo model")
    parser.add_argument("--rate", type=float, default=REAL_RATE, help="a second for each real one")
    parser.add_argument("--scale", type=float, default=1.0, help="of the trace for real ones")
    parser.add_argument("--hot", action="store_true", help="one medium in half of all requests")
    parser.add_argument("--only", default="", help="policies whose name has this in it")
    parser.add_argument("--timings", action="store_true", help="only what choosing and keys cost")
    weights = [each.name for each in fields(Policy)]
    for name in weights:
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(getattr(Policy(), name)))
    options = parser.parse_args()
    given = {name: getattr(options, name) for name in weights}
    policy = Policy(**{name: value for name, value in given.items() if value is not None})
    if options.real:
        shape = options.requests, options.seed, options.rate, options.scale
        compare_real(options.replicas, *shape, policy, options.only)
    elif not options.timings:
        hot = 0.5 if options.hot else 0.0
        compare(options.replicas, options.requests, options.seed, hot, policy, options.only)
    else:
        for count in SIZES:
            time_choosing(count, options.seed)
        time_keys()


if __name__ == "__main__":
    sys.exit(main())
