"""Media on a store that servers share: what one has seen no other one decodes or encodes."""

from __future__ import annotations

import random
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_spec import CheckpointSpec
from engines_on_a_store import opened, settings, settle
from make_checkpoint import make_checkpoint
from parity import greedy, tapped
from parity_cases import photograph, user, video
from rank_processes import on_ranks_of, rank_processes
from redis_server import StoreServer
from sweeps import quick

from vlm_serve.cache.tiers.shared_format import DIGEST_BYTES, EPOCH_BYTES
from vlm_serve.pipeline.pipeline import Output, Pipeline
from vlm_serve.preprocess.media.raw_index import pack_record

SPECS = {"dense": CheckpointSpec(), "moe": CheckpointSpec(num_experts=8)}
PICTURE, CLIP = photograph("coffee.png"), video("carphone_pristine.mp4")
CHATS = {
    "picture": [user("Look:", PICTURE, "How many cups?")],
    "video": [user(CLIP, "What happens here?")],
    "both": [user(PICTURE, CLIP, "What do they share?")],
}
MOVED = [user("Something else comes first here.", PICTURE, CLIP, "What do they share?")]
"""The same media where none of their KV is of use."""
Answer = tuple[Output, torch.Tensor]


@pytest.fixture(scope="module", params=SPECS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("shared"), SPECS[request.param])


def answer(pipe: Pipeline, chat: list[dict[str, Any]]) -> Answer:
    """With the logits that its tokens were chosen from."""
    with tapped(pipe.engine) as tap:
        output = pipe.chat(chat, greedy(6))
        (logits,) = tap.take()
    pipe.engine.check()
    return output, logits


def same(found: Answer, expected: Answer) -> bool:
    return found[0].token_ids == expected[0].token_ids and torch.equal(found[1], expected[1])


def worked(pipe: Pipeline) -> tuple[int, int]:
    """Media decoded and spans encoded since the start."""
    stats = pipe.engine.stats()
    return stats["num_decoded_media"], stats["num_encoded_spans"]


def counts(pipe: Pipeline) -> dict[str, int]:
    """The tiers' counters, those of the store among them."""
    stats = pipe.engine.stats()["tiers"]
    return {**stats["counts"], **{name: n for name, n in stats.items() if name != "counts"}}


@pytest.mark.parametrize("host", quick([0, "64MiB"], ["64MiB"]))
@pytest.mark.parametrize("what", CHATS)
def test_what_one_has_seen_the_other_neither_decodes_nor_encodes(
    checkpoint: Path, store: StoreServer, what: str, host: object
) -> None:
    with opened(checkpoint, None) as alone:
        cold, moved = answer(alone, CHATS[what]), answer(alone, MOVED)
    with ExitStack() as stack:
        first, second, third = (
            stack.enter_context(opened(checkpoint, store, host_cache_memory=host)) for _ in range(3)
        )
        assert same(answer(first, CHATS[what]), cold)
        settle(first)
        hit = answer(second, CHATS[what])
        assert same(hit, cold)
        report = hit[0].cache_report
        assert worked(second) == (0, 0) == (report.media_decoded, report.media_encoded)
        last = report.media[-1]
        assert report.tiers["shared"] == report.boundary >= last.offset + last.length
        # Where KV is of no use, embeddings still are.
        answer(first, MOVED)
        settle(first)
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(
            "vlm_serve.cache.prefix_cache.PrefixCache.tier_query", lambda *_, **__: None
        )
        found = answer(third, MOVED)
        assert same(found, moved) and worked(third) == (0, 0)
        assert {media.source for media in found[0].cache_report.media} == {"shared"}
        for pipe in (first, second, third):
            assert counts(pipe).get("bad", 0) == counts(pipe)["shared_bad"] == 0
            assert counts(pipe).get("failed", 0) == counts(pipe).get("failed_shared", 0) == 0


def test_two_ranks_share_media_among_themselves(dense: Path, store: StoreServer) -> None:
    config = settings(store, tensor_parallel_size=2)
    with rank_processes(2) as processes:
        with on_ranks_of(processes, dense, config) as pipe:
            expected = pipe.chat(CHATS["both"], greedy(6))
            settle(pipe)
        with on_ranks_of(processes, dense, config) as pipe:
            hit = pipe.chat(CHATS["both"], greedy(6))
            assert hit.token_ids == expected.token_ids and worked(pipe) == (0, 0)
            assert hit.cache_report.tiers["shared"] == hit.cache_report.boundary
            moved = pipe.chat(MOVED, greedy(6))
            assert worked(pipe) == (0, 0)
        with on_ranks_of(processes, dense, settings(None, tensor_parallel_size=2)) as pipe:
            assert pipe.chat(MOVED, greedy(6)).token_ids == moved.token_ids
    with opened(dense, store) as alone:
        alone.chat(CHATS["both"], greedy(1))
        assert counts(alone)["shared_hits"] == 0 < worked(alone)[1]


def test_a_frozen_store_delays_a_request_about_media_once(dense: Path, store: StoreServer) -> None:
    """Uploads, KV and embeddings are asked for in turn; the limit is that of them all."""
    limit = 2.0
    with opened(dense, None) as alone:
        cold = answer(alone, CHATS["both"])
    with opened(dense, store, shared_store_timeout=limit) as pipe:
        store.freeze()
        try:
            output = pipe.engine.preprocessor.prepare(CHATS["both"])
            assert limit <= output.waited
            found = answer(pipe, CHATS["both"])
        finally:
            store.thaw()
        assert same(found, cold)
        asked = counts(pipe)
        # Both uploads were asked about at once; after that the store is left alone.
        assert 1 <= asked["failed_shared"] <= 2 and asked["opened_shared"] == 1
        assert asked["skipped_shared"] >= 1


def test_damaged_media_on_the_store_are_counted_misses_and_replaced(
    dense: Path, store: StoreServer
) -> None:
    with opened(dense, None) as alone:
        cold = answer(alone, CHATS["both"])
    with opened(dense, store) as first:
        answer(first, CHATS["both"])
        settle(first)
        names = store.names()
    rng = random.Random(3)
    for name in names:
        value = store.client.get(name)
        if isinstance(value, bytes) and len(value) != EPOCH_BYTES + DIGEST_BYTES and value:
            place = rng.randrange(len(value))
            changed = value[:place] + bytes([value[place] ^ 1]) + value[place + 1 :]
            store.client.set(name, changed, keepttl=True)
    with opened(dense, store) as second:
        assert same(answer(second, CHATS["both"]), cold)
        settle(second)
        assert counts(second)["shared_bad"] >= 2 and worked(second)[0] == 2
    with opened(dense, store) as third:
        assert same(answer(third, CHATS["both"]), cold)
        assert worked(third) == (0, 0) and counts(third)["shared_bad"] == 0


def test_a_record_that_lies_is_overwritten_for_everybody(dense: Path, store: StoreServer) -> None:
    """From who has the key: decoding does not confirm it."""
    chat = CHATS["picture"]
    with opened(dense, None) as alone:
        cold = answer(alone, chat)
    with opened(dense, store) as liar, pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "vlm_serve.engine.core.media_tiers.pack_record",
            lambda record: pack_record(replace(record, hashes=(b"?" * 32,))),
        )
        liar.engine.preprocessor.prepare(chat)
        settle(liar)
    for unconfirmed in (1, 0):
        with opened(dense, store) as pipe:
            assert same(answer(pipe, chat), cold)
            settle(pipe)
            stats = pipe.engine.stats()
            assert stats["uploads"].get("unconfirmed", 0) == unconfirmed
            assert stats["num_decoded_media"] == unconfirmed


def test_a_flush_is_one_for_media_too(dense: Path, store: StoreServer) -> None:
    with opened(dense, store) as first, opened(dense, store) as second:
        cold = answer(first, CHATS["both"])
        settle(first)
        first.engine.flush()
        assert same(answer(second, CHATS["both"]), cold)
        assert worked(second)[0] == 2 and worked(second)[1] > 0
