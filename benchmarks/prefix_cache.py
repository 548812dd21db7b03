"""Measure the cost of the prefix cache's bookkeeping, without a model or tensors.

    python benchmarks/prefix_cache.py [--blocks 100000] [--tokens 131072] [--block-size 64]

Fills a cache with random prompts, then prints what matching, pinning, publishing and evicting cost
and how much memory the books take (prompts' keys included, tokens not).
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable

from vlm_serve.cache.config import CacheConfig
from vlm_serve.cache.prefix_cache import PrefixCache
from vlm_serve.preprocess.identity.keys import PromptKeys


def milliseconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def serve(cache: PrefixCache, keys: PromptKeys, snapshots: int = 8) -> float:
    """One request; returns the milliseconds of its commit."""
    lease = cache.open(cache.match(keys, limit=len(keys) - 1))
    assert cache.take_row(lease) and cache.grow(lease, len(keys))
    step = len(keys) // 8 // keys.block_size * keys.block_size
    for index in range(snapshots):
        cache.reserve_snapshot(lease, (index + 1) * step, "interval")
    cost = milliseconds(lambda: cache.commit(lease, keys, len(keys), exact_until=len(keys)))
    cache.close(lease)
    return cost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--block-size", type=int, default=64)
    options = parser.parse_args()
    rng = random.Random(0)

    def prompt() -> PromptKeys:
        ids = [rng.randrange(150_000) for _ in range(options.tokens + 1)]
        return PromptKeys(bytes(32), ids, block_size=options.block_size)

    def make() -> PrefixCache:
        rows = max(8, options.blocks // 64)
        return PrefixCache(CacheConfig(options.blocks, options.block_size, 8, rows))

    prompts = max(1, options.blocks * options.block_size // options.tokens)
    tracemalloc.start()
    cache = make()
    for _ in range(prompts):
        serve(cache, prompt())
    print(f"memory of the books   {tracemalloc.get_traced_memory()[0] / 1e6:8.1f} MB", end="")
    print(f"   ({cache.usage.nodes} nodes in {options.blocks} blocks)")
    tracemalloc.stop()

    cache = make()
    texts = [prompt() for _ in range(prompts)]
    commits = [serve(cache, keys) for keys in texts]
    kept = texts[-1]
    stateless = make()
    serve(stateless, kept, snapshots=0)
    limit = len(kept) - 1
    matches = [milliseconds(lambda: cache.match(kept, limit=limit)) for _ in range(20)]
    leases = [milliseconds(lambda: cache.close(cache.open(cache.match(kept, limit=limit))))]
    evicted = options.blocks // 2
    taker = cache.open(None)
    wanted = (cache.free_block_count + evicted) * options.block_size
    cost = milliseconds(lambda: cache.grow(taker, wanted))
    without = [milliseconds(lambda: stateless.match(kept, limit=limit)) for _ in range(20)]
    print(f"matching a prompt     {statistics.median(matches):8.3f} ms   ({len(kept)} tokens)")
    print(f"  with no snapshot    {statistics.median(without):8.3f} ms")
    print(f"match + pin + unpin   {leases[0]:8.3f} ms")
    print(f"publishing a prompt   {statistics.median(commits):8.3f} ms")
    print(f"evicting a block      {1e3 * cost / evicted:8.3f} us")
    print(f"checking everything   {milliseconds(cache.check):8.1f} ms")


if __name__ == "__main__":
    main()
