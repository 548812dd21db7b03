"""Two engines on one real store: what one has computed the other reads, and no answer changes."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_spec import CheckpointSpec
from engines_on_a_store import opened, settle
from make_checkpoint import make_checkpoint
from parity import greedy, tapped
from parity_cases import CONVERSATIONS, assistant, photograph, random_ids, user
from rank_processes import on_ranks_of, rank_processes
from redis_server import StoreServer

from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Output, Pipeline

LENGTH = 210
CACHED = 208
"""The deepest block boundary before the last token."""
CHILD = Path(__file__).parents[3] / "shared_store_child.py"
open_pipeline = partial(opened, cache_memory="8MiB")
SPECS = {
    "dense": CheckpointSpec(),
    "moe": CheckpointSpec(num_experts=8),
    "no state": CheckpointSpec(full_attention_interval=1),
}


@pytest.fixture(scope="module", params=SPECS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("shared"), SPECS[request.param])


def ask(pipe: Pipeline, seed: int = 1) -> Output:
    output = pipe.generate(random_ids(LENGTH, seed=seed), greedy(12))
    pipe.engine.check()
    return output


def counts(pipe: Pipeline) -> dict[str, int]:
    """The tiers' counters, those of the store among them."""
    stats = pipe.engine.stats()["tiers"]
    return {**stats["counts"], **{name: n for name, n in stats.items() if name != "counts"}}


def test_what_one_has_computed_the_other_reads(checkpoint: Path, store: StoreServer) -> None:
    with open_pipeline(checkpoint, store) as first, open_pipeline(checkpoint, store) as second:
        cold = ask(first)
        assert cold.usage.cached_tokens == 0 and cold.cache_report.reason == "cold"
        settle(first)
        hit = ask(second)
        assert hit.token_ids == cold.token_ids
        assert hit.cache_report.tiers == {"shared": CACHED}
        assert hit.cache_report.reason == "full"
        assert counts(second)["shared_read_bytes"] > 0
        assert ask(second).cache_report.tiers == {"device": CACHED}
        settle(second)
        assert counts(second)["shared_written"] == 0, "it is there already"


def same_bits(pipe: Pipeline, cold: Pipeline, prompt: list[dict[str, Any]]) -> tuple[Output, str]:
    """Asks both; the answer of the first and, if they differ anywhere, where."""
    with tapped(pipe.engine) as ours, tapped(cold.engine) as theirs:
        answer, expected = pipe.chat(prompt, greedy(6)), cold.chat(prompt, greedy(6))
        bits = torch.equal(ours.take()[0], theirs.take()[0])
    pipe.engine.check()
    same = bits and answer.token_ids == expected.token_ids
    return answer, "" if same else f"{answer.token_ids} {expected.token_ids}"


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_next_turns_about_media_go_on_at_another_server_with_the_bits_of_a_cold_run(
    kind: str, store: StoreServer, tmp_path: Path
) -> None:
    path = make_checkpoint(tmp_path / "model", SPECS[kind])
    options = {"cache_memory": "32MiB"}
    with (
        open_pipeline(path, store, **options) as first,
        open_pipeline(path, store, **options) as second,
        open_pipeline(path, None, enable_prefix_caching=False, **options) as cold,
    ):
        for name in ("image after text", "everything"):
            chat = [*CONVERSATIONS[name]]
            for turn, pipe in enumerate((first, second, first, second)):
                answer, difference = same_bits(pipe, cold, chat)
                assert not difference, (name, turn, difference)
                if turn:
                    report = answer.cache_report
                    assert report.media_encoded == 0, (name, turn, report)
                    # Later ones find too little more than the device has.
                    assert turn > 1 or report.tiers.get("shared", 0) > 0, (name, report)
                settle(pipe)
                chat += [assistant(answer.text), user(f"And then, for the {turn}. time?")]
        assert counts(second).get("failed", 0) == counts(first).get("bad", 0) == 0


def test_two_ranks_share_among_themselves(dense: Path, store: StoreServer) -> None:
    settings = {"dtype": "float32", "block_size": 16, "cache_memory": "8MiB"}
    config = EngineConfig(
        **settings,  # type: ignore[arg-type]
        tensor_parallel_size=2,
        shared_store=store.url,
        shared_store_timeout=30.0,
    )
    with rank_processes(2) as processes:
        with on_ranks_of(processes, dense, config) as pipe:
            expected = ask(pipe)
            settle(pipe)
        with on_ranks_of(processes, dense, config) as pipe:
            hit = ask(pipe)
            assert hit.token_ids == expected.token_ids
            assert hit.cache_report.tiers == {"shared": CACHED}
    with open_pipeline(dense, store, cache_memory="8MiB") as alone:
        assert ask(alone).usage.cached_tokens == 0, "one rank adds up in another order"
        assert counts(alone)["shared_hits"] == 0


def test_other_models_types_and_blocks_find_nothing(dense: Path, store: StoreServer) -> None:
    with open_pipeline(dense, store) as first:
        ask(first)
        settle(first)
    for options in ({"dtype": "bfloat16"}, {"block_size": 32}, {"state_dtype": "bfloat16"}):
        with open_pipeline(dense, store, **options) as other:
            assert ask(other).usage.cached_tokens == 0
            assert counts(other)["shared_hits"] == counts(other)["shared_bad"] == 0
            settle(other)


def test_what_decoding_has_made_is_shared_only_where_bits_are_promised(
    dense: Path, store: StoreServer
) -> None:
    for compiled, reaches in ((True, True), (False, False)):
        options: dict[str, object] = {
            "compiled_kernels": compiled,
            "prefix_cache_decode_state_interval": 16,
            "shared_store_write": "all",
        }
        with (
            open_pipeline(dense, store, **options) as first,
            open_pipeline(dense, store, **options) as second,
        ):
            prompt = random_ids(100, seed=3)
            turn = [*prompt, *first.generate(prompt, greedy(60)).token_ids, 5, 6, 7]
            settle(first)
            here, there = first.generate(turn, greedy(4)), second.generate(turn, greedy(4))
            assert here.usage.cached_tokens > len(prompt)
            assert (there.usage.cached_tokens > len(prompt)) == reaches
            assert 0 < there.cache_report.tiers["shared"] == there.usage.cached_tokens
            assert not reaches or here.token_ids == there.token_ids


def test_policies_write_what_they_say(dense: Path, store: StoreServer) -> None:
    words = " ".join(f"word{index}" for index in range(120))
    chat, written = [user(photograph("coffee.png"), words)], {}
    for policy in ("media", "stable", "all"):
        store.client.flushall()
        options = {"shared_store_write": policy, "prefix_cache_state_interval": 1}
        with open_pipeline(dense, store, **options) as pipe:
            pipe.chat(chat, greedy(2))
            settle(pipe)
            written[policy] = counts(pipe)["shared_written"]
    assert 0 < written["media"] < written["stable"] < written["all"]


def test_a_flush_has_nothing_read_for_tiers_that_are_not_there(
    dense: Path, store: StoreServer
) -> None:
    """The store gets entries when they are written; what the device evicts is read for no one."""
    with open_pipeline(dense, store) as pipe:
        engine = pipe.engine
        listeners = engine.call(lambda: engine._cache.events.node_evicted.subscribers)
        engine.flush()
        assert engine.call(lambda: engine._cache.events.node_evicted.subscribers) == listeners


def test_a_flush_is_one_for_the_store_too(dense: Path, store: StoreServer) -> None:
    with open_pipeline(dense, store) as first, open_pipeline(dense, store) as second:
        cold = ask(first)
        settle(first)
        second.engine.flush()
        assert ask(second).usage.cached_tokens == 0
        settle(second)
        first.engine.call(first.engine._cache.flush)
        again = ask(first)
        assert again.cache_report.tiers == {"shared": CACHED}
        assert again.token_ids == cold.token_ids


def test_a_store_that_goes_away_changes_no_answer_and_is_used_again(
    dense: Path, store: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed, frozen, emptied: the request computes what it does not get."""
    with open_pipeline(dense, store, shared_store_timeout=0.5) as pipe:
        breakers = pipe.engine._tiers._tiers.stack.caller  # type: ignore[union-attr]
        monkeypatch.setattr(breakers, "_rest_seconds", 0.1)
        cold = ask(pipe)
        settle(pipe)
        for goes, comes in ((store.freeze, store.thaw), (store.stop, store.start)):
            pipe.engine.call(pipe.engine._cache.flush)
            goes()
            failures = counts(pipe).get("failed_shared", 0)
            answer = ask(pipe)
            assert answer.token_ids == cold.token_ids and answer.usage.cached_tokens == 0
            assert counts(pipe)["failed_shared"] > failures
            settle(pipe)
            comes()
            deadline = time.monotonic() + 60
            while answer.cache_report.tiers != {"shared": CACHED}:
                assert time.monotonic() < deadline, answer.cache_report
                time.sleep(0.2)
                pipe.engine.call(pipe.engine._cache.flush)
                answer = ask(pipe)
                settle(pipe)
                assert answer.token_ids == cold.token_ids
        store.client.flushall()
        pipe.engine.call(pipe.engine._cache.flush)
        assert ask(pipe).usage.cached_tokens == 0


def test_a_damaged_entry_is_a_counted_miss_of_a_request(dense: Path, store: StoreServer) -> None:
    with open_pipeline(dense, store) as first, open_pipeline(dense, store) as second:
        cold = ask(first)
        settle(first)
        for name in store.names():
            value = store.client.get(name)
            if isinstance(value, bytes) and len(value) > 1000:  # chunks
                store.client.set(name, value[:500] + bytes([value[500] ^ 1]) + value[501:])
        miss = ask(second)
        assert miss.token_ids == cold.token_ids and miss.usage.cached_tokens == 0
        assert miss.cache_report.reason == "tier_error"
        assert counts(second)["bad"] > 0


@pytest.mark.processors
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_builds_for_two_processors_exchange_what_their_numerics_allow(
    dense: Path, store: StoreServer, dtype: str
) -> None:
    if platform.machine() != "x86_64":
        pytest.skip("its builds are of x86")
    told = []
    for arch in ("native", "x86-64-v3"):
        done = subprocess.run(
            [sys.executable, "-P", str(CHILD), str(dense), store.url, dtype],
            env={**os.environ, "VLM_SERVE_NATIVE_ARCH": arch, "PYTHONPATH": str(CHILD.parents[1])},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        told.append(json.loads(done.stdout.splitlines()[-1]))
    first, second = told
    assert first["shared"] == first["bad"] == second["bad"] == 0
    assert (second["shared"] == CACHED) == (first["numerics"] == second["numerics"])
    assert second["shared"] == 0 or first["tokens"] == second["tokens"]
    assert dtype != "float32" or second["shared"] == CACHED
