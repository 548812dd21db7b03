"""Media on a store that servers share: what one has seen no other one decodes or encodes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_spec import CheckpointSpec
from make_checkpoint import make_checkpoint
from parity import greedy, tapped
from parity_cases import photograph, user, video
from rank_processes import on_ranks_of, rank_processes
from redis_server import StoreServer, running

from vlm_serve.config import EngineConfig
from vlm_serve.engine.build import build
from vlm_serve.engine.engine import Engine
from vlm_serve.pipeline import Output, Pipeline

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


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("dense"), SPECS["dense"])


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreServer]:
    with running(tmp_path) as server:
        yield server


def settings(store: StoreServer | None, **options: object) -> EngineConfig:
    given: dict[str, object] = {
        "dtype": "float32",
        "block_size": 16,
        "cache_memory": "32MiB",
        "max_num_seqs": 3,
        "max_model_len": 4096,
        "shared_store": None if store is None else store.url,
        "shared_store_timeout": 30.0,  # a machine that runs all tests at once is slow
    }
    return EngineConfig(**(given | options))  # type: ignore[arg-type]


def opened(checkpoint: Path | str, store: StoreServer | None, **options: object) -> Pipeline:
    config = settings(store, **options)
    return Pipeline.from_engine(Engine(build(str(checkpoint), config, poison=True)))


def answer(pipe: Pipeline, chat: list[dict[str, Any]]) -> Answer:
    """With the logits that its tokens were chosen from."""
    with tapped(pipe.engine) as tap:
        output = pipe.chat(chat, greedy(6))
        (logits,) = tap.take()
    pipe.engine.check()
    return output, logits


def same(found: Answer, expected: Answer) -> bool:
    return found[0].token_ids == expected[0].token_ids and torch.equal(found[1], expected[1])


def settle(pipe: Pipeline) -> None:
    """Waits until what is wanted elsewhere is written."""
    tiers = pipe.engine._loop.tiers._tiers
    assert tiers is not None and tiers.sharer is not None
    deadline = time.monotonic() + 60
    while not tiers.sharer.idle:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def worked(pipe: Pipeline) -> tuple[int, int]:
    """Media decoded and spans encoded since the start."""
    stats = pipe.engine.stats()
    return stats["num_decoded_media"], stats["num_encoded_spans"]


def counts(pipe: Pipeline) -> dict[str, int]:
    """The tiers' counters, those of the store among them."""
    stats = pipe.engine.stats()["tiers"]
    return {**stats["counts"], **{name: n for name, n in stats.items() if name != "counts"}}


@pytest.mark.parametrize("host", [0, "64MiB"])
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
            "vlm_serve.cache.prefix_cache.PrefixCache.question", lambda *_, **__: None
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
