"""The head of the queue is matched again when the cache has changed, and not before."""

from __future__ import annotations

import itertools
import random
from unittest.mock import patch

from simulation import Letters
from symbolic import VOCABULARY, SymbolicExecutor, make_prompt

from vlm_serve.cache.config import CacheConfig
from vlm_serve.cache.embeddings import EmbeddingCache
from vlm_serve.cache.prefix_cache import PrefixCache
from vlm_serve.engine.media import MediaPlanner
from vlm_serve.engine.planning import SchedulerConfig
from vlm_serve.engine.request import Language, Request
from vlm_serve.engine.scheduler import Scheduler
from vlm_serve.engine.sequence import Job
from vlm_serve.sampling_params import SamplingParams

BLOCK = 8


def test_the_waiting_head_is_matched_once_per_change_of_the_cache() -> None:
    cache = PrefixCache(
        CacheConfig(num_blocks=10, block_size=BLOCK, num_live_rows=2, num_snapshot_rows=0)
    )
    config = SchedulerConfig(
        max_num_seqs=2,
        max_num_batched_tokens=100,
        block_size=BLOCK,
        chunk_size=BLOCK,
        state_interval=BLOCK,
        decode_state_interval=0,
    )
    scheduler = Scheduler(cache, MediaPlanner(EmbeddingCache(0), 4), config)
    executor = SymbolicExecutor(10, 2, BLOCK, random.Random(0))
    numbers = itertools.count()
    language = Language(Letters(), frozenset(), VOCABULARY, 80)
    # The second fits only when the first has ended, whose answer fills a block every 8 steps.
    for length, first, answer in ((20, 5, 30), (70, 6, 1)):
        request = Request(
            f"r{length}",
            make_prompt([(first,) * length], block_size=BLOCK),
            SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True),
            lambda delta: None,
            arrival=length,
        )
        job = Job(request, numbers, language)
        executor.register(job.sequences[0].info)
        scheduler.add(job)
    matched: list[bool] = []
    with patch.object(cache, "match", wraps=cache.match) as match:
        version = None
        while scheduler.waiting:
            before, changed = match.call_count, cache.version != version
            plan = scheduler.plan()
            assert plan is not None
            if matched and scheduler.waiting:
                assert match.call_count - before == changed
            matched.append(match.call_count > before)
            version = cache.version
            scheduler.commit(plan, executor.run(plan))
    assert len(matched) == 31 and matched[-1], "it runs as soon as the first has ended"
    assert 3 <= sum(matched) <= 12
