"""Lower cache tiers under a real engine: what was evicted comes up again and changes no answer."""

from __future__ import annotations

import asyncio
import re
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_spec import CheckpointSpec
from families import SPECS as FAMILIES
from make_checkpoint import make_checkpoint
from parity import greedy, tapped
from parity_cases import CONVERSATIONS, random_ids
from serving import wait_for
from together import together

from vlm_serve.cache.tiers.disk import FILE_NAME
from vlm_serve.cache.tiers.host import HostStore
from vlm_serve.engine.engine import Engine
from vlm_serve.engine.start.build import build
from vlm_serve.errors import ConfigError
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Output, Pipeline

LENGTH = 210
CACHED = 208
"""The deepest block boundary before the last token."""


SPECS = {
    "dense": CheckpointSpec(),
    "moe": CheckpointSpec(num_experts=8),
    "no state": CheckpointSpec(full_attention_interval=1),
    "short convolutions": FAMILIES["lfm2 vl"],
}


@pytest.fixture(scope="module", params=SPECS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiers"), SPECS[request.param])


def open_pipeline(checkpoint: Path, **options: object) -> Pipeline:
    """An engine with room for little more than one prompt; freed memory is poisoned."""
    settings: dict[str, object] = {
        "dtype": "float32",
        "block_size": 16,
        "cache_memory": "1MiB",
        "max_num_seqs": 3,
        "prefix_cache_state_budget": 3,
    }
    config = EngineConfig(**(settings | options))  # type: ignore[arg-type]
    return Pipeline.from_engine(Engine(build(str(checkpoint), config, poison=True)))


def evict(pipe: Pipeline) -> None:
    """Evicts all that the device holds."""
    pipe.engine.call(pipe.engine._cache.flush)


def crowd_out(pipe: Pipeline) -> None:
    """Other prompts until nothing is left of what was there."""
    blocks = pipe.engine.memory.num_blocks
    before = pipe.engine.stats()["cache"]["evictions"].get("kv", 0)
    seed = 1000
    while pipe.engine.stats()["cache"]["evictions"].get("kv", 0) < before + 2 * blocks:
        pipe.generate(random_ids(LENGTH, seed=seed), greedy(1))
        seed += 1


def ask(pipe: Pipeline, seed: int = 1) -> Output:
    output = pipe.generate(random_ids(LENGTH, seed=seed), greedy(12))
    pipe.engine.check()
    return output


def test_what_was_evicted_comes_back_from_host_memory(checkpoint: Path) -> None:
    with open_pipeline(checkpoint, host_cache_memory="64MiB") as pipe:
        cold = ask(pipe)
        assert cold.usage.cached_tokens == 0
        crowd_out(pipe)
        hit = ask(pipe)
        assert hit.token_ids == cold.token_ids
        assert hit.usage.cached_tokens == CACHED
        assert hit.cache_report.reason == "full"
        assert hit.cache_report.tiers == {"host": CACHED}
        again = ask(pipe)
        assert again.token_ids == cold.token_ids
        assert again.cache_report.tiers == {"device": CACHED}


def test_what_came_back_has_the_bits_of_a_cold_run(checkpoint: Path) -> None:
    """Keys, values and states: the logits behind them show each bit."""
    options = {"host_cache_memory": "64MiB", "deterministic": True}
    with open_pipeline(checkpoint, **options) as pipe, tapped(pipe.engine) as tap:
        ask(pipe)
        (cold,) = tap.take()
        evict(pipe)
        assert ask(pipe).cache_report.tiers == {"host": CACHED}
        (hit,) = tap.take()
        assert torch.equal(hit, cold)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_quantised_keys_and_values_come_back_with_their_scales(
    checkpoint: Path, kv_dtype: str
) -> None:
    options = {"host_cache_memory": "64MiB", "kv_cache_dtype": kv_dtype, "max_model_len": 512}
    with open_pipeline(checkpoint, **options) as pipe:
        ask(pipe)
        device = ask(pipe)
        evict(pipe)
        hit = ask(pipe)
        assert hit.token_ids == device.token_ids
        assert hit.cache_report.tiers == {"host": CACHED}


def test_without_tiers_it_does_not(checkpoint: Path) -> None:
    """The other tests evict indeed."""
    with open_pipeline(checkpoint) as pipe:
        ask(pipe)
        crowd_out(pipe)
        assert ask(pipe).usage.cached_tokens == 0


@pytest.mark.parametrize("name", ["image after text", "one video", "everything"])
def test_media_come_back_too(checkpoint: Path, name: str) -> None:
    if name != "image after text" and not (checkpoint / "video_preprocessor_config.json").exists():
        pytest.skip("the model takes no videos")
    options = {"host_cache_memory": "64MiB", "cache_memory": "8MiB", "max_model_len": 4096}
    with open_pipeline(checkpoint, **options) as pipe:
        cold = pipe.chat(CONVERSATIONS[name], greedy(8))
        evict(pipe)
        hit = pipe.chat(CONVERSATIONS[name], greedy(8))
        assert hit.token_ids == cold.token_ids
        assert hit.cache_report.reason == "full"
        assert hit.cache_report.tiers.get("host", 0) > 0
        pipe.engine.check()


def test_a_warm_restart_hits_from_the_first_request(checkpoint: Path, tmp_path: Path) -> None:
    """What was evicted and what the device still held, host memory in between or not."""
    for host in ("0", "64MiB"):
        folder = str(tmp_path / host)
        with open_pipeline(checkpoint, disk_cache_path=folder, host_cache_memory=host) as pipe:
            cold = [ask(pipe, seed) for seed in range(4)]
        with open_pipeline(checkpoint, disk_cache_path=folder, host_cache_memory=host) as pipe:
            for seed, expected in enumerate(cold):
                hit = ask(pipe, seed)
                assert hit.token_ids == expected.token_ids
                assert hit.cache_report.tiers == {"disk": CACHED}
            assert pipe.engine.stats()["tiers"]["disk_errors"] == 0


def test_flipped_bits_are_a_counted_miss(checkpoint: Path, tmp_path: Path) -> None:
    with open_pipeline(checkpoint, disk_cache_path=str(tmp_path)) as pipe:
        cold = ask(pipe)
    with sqlite3.connect(tmp_path / FILE_NAME) as connection:
        rows = connection.execute("SELECT number, payload FROM entries WHERE kind = 1").fetchall()
        assert len(rows) >= CACHED // 16
        for number, payload in rows:
            changed = bytearray(payload)
            changed[len(changed) // 2] ^= 1
            connection.execute(
                "UPDATE entries SET payload = ? WHERE number = ?", (bytes(changed), number)
            )
    connection.close()
    with open_pipeline(checkpoint, disk_cache_path=str(tmp_path)) as pipe:
        miss = ask(pipe)
        assert miss.token_ids == cold.token_ids
        assert miss.usage.cached_tokens == 0
        assert miss.cache_report.reason == "tier_error"
        assert pipe.engine.stats()["tiers"]["counts"]["bad"] == CACHED // 16
        assert ask(pipe).usage.cached_tokens == CACHED


def test_another_dtype_or_block_size_finds_nothing(checkpoint: Path, tmp_path: Path) -> None:
    with open_pipeline(checkpoint, disk_cache_path=str(tmp_path)) as pipe:
        ask(pipe)
    for options in ({"dtype": "bfloat16"}, {"block_size": 32}, {"state_dtype": "bfloat16"}):
        with open_pipeline(checkpoint, disk_cache_path=str(tmp_path), **options) as pipe:
            assert ask(pipe).usage.cached_tokens == 0
            pipe.engine.flush()
            expected = ask(pipe).token_ids
        with open_pipeline(checkpoint, disk_cache_path=str(tmp_path), **options) as pipe:
            assert ask(pipe).token_ids == expected


def test_a_flush_reaches_every_tier(checkpoint: Path, tmp_path: Path) -> None:
    options = {"disk_cache_path": str(tmp_path), "host_cache_memory": "100KiB"}
    with open_pipeline(checkpoint, **options) as pipe:
        ask(pipe)
        evict(pipe)
        pipe.engine.flush()
        assert ask(pipe).usage.cached_tokens == 0
        stats = pipe.engine.stats()["tiers"]
        assert stats["host_bytes"] == stats["disk_bytes"] == 0


def test_requests_that_wait_for_a_tier_hold_up_nobody(checkpoint: Path) -> None:
    """All at once: hits from the host tier, from the device, and cold ones."""
    with open_pipeline(checkpoint, host_cache_memory="64MiB", cache_memory="4MiB") as pipe:
        prompts = [random_ids(LENGTH, seed=seed) for seed in range(6)]
        cold = [pipe.generate(prompt, greedy(12)).token_ids for prompt in prompts]
        evict(pipe)
        for _ in range(3):
            outputs = pipe.generate_many([*prompts, *prompts], greedy(12))
            assert [output.token_ids for output in outputs] == cold * 2
            pipe.engine.check()


CALLS = ("contains", "get", "put", "touch")
"""Of a store."""


class Watched:
    """Notes who calls the host tier; it raises `error`, or answers the calls that are `held` when
    the gate is open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held: tuple[str, ...] = CALLS
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.calls: Counter[str] = Counter()
        self.threads: set[str] = set()
        for name in CALLS:
            monkeypatch.setattr(HostStore, name, self._wrapped(name, getattr(HostStore, name)))

    def _wrapped(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        async def wrapper(*args: Any) -> Any:
            self.calls[name] += 1
            self.threads.add(threading.current_thread().name)
            if self.error is not None:
                raise self.error
            answer = await call(*args)
            while name in self.held and not self.gate.is_set():
                await asyncio.sleep(0.005)
            return answer

        return wrapper


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def test_no_store_is_called_on_the_engines_thread(checkpoint: Path, watched: Watched) -> None:
    with open_pipeline(checkpoint, host_cache_memory="64MiB") as pipe:
        ask(pipe)
        crowd_out(pipe)
        assert ask(pipe).cache_report.tiers == {"host": CACHED}
        pipe.engine.probe(pipe.engine.preprocessor.prepare_tokens(random_ids(LENGTH, seed=1000)))
        evict(pipe)
        evict(pipe)
        pipe.engine.flush()
    assert all(watched.calls[name] for name in CALLS)
    assert watched.threads == {"vlm-serve-tiers"}


def test_a_slow_tier_holds_up_neither_the_engine_nor_others(
    checkpoint: Path, watched: Watched
) -> None:
    with open_pipeline(checkpoint, host_cache_memory="64MiB") as pipe:
        cold = ask(pipe)
        prompt = pipe.engine.preprocessor.prepare_tokens(random_ids(LENGTH, seed=2))
        watched.gate.clear()
        with ThreadPoolExecutor() as pool:
            waiting: list[Future[Any]] = [pool.submit(pipe.engine.probe, prompt)]
            waiting.append(pool.submit(pipe.generate, random_ids(LENGTH, seed=2), greedy(2)))
            try:
                assert ask(pipe).token_ids == cold.token_ids, "what the device has asks nobody"
                assert not any(each.done() for each in waiting)
            finally:
                watched.gate.set()
            for each in waiting:
                each.result()


def test_a_tier_that_fails_changes_no_answer(
    checkpoint: Path, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It raises, or takes longer than it may; then it is left alone."""
    for error in (OSError("injected"), None):
        with (
            monkeypatch.context() as patch,
            open_pipeline(checkpoint, host_cache_memory="64MiB") as pipe,
        ):
            watched.error = None
            watched.gate.set()
            cold = ask(pipe)
            evict(pipe)
            assert pipe.engine._tiers._tiers.stack.drain(60)  # type: ignore[union-attr]
            watched.error = error
            if error is None:
                patch.setattr(HostStore, "time_limit", 0.05)
                watched.gate.clear()
            watched.calls.clear()
            for seed in (1, 2, 1):
                answer = ask(pipe, seed)
                assert seed == 2 or answer.token_ids == cold.token_ids
                evict(pipe)
            assert sum(watched.calls.values()) == 1
            assert pipe.engine.stats()["tiers"]["counts"]["failed_host"] == 1


def test_requests_that_want_the_same_entries_share_one_read(
    checkpoint: Path, watched: Watched
) -> None:
    with open_pipeline(checkpoint, host_cache_memory="64MiB", cache_memory="4MiB") as pipe:
        prompt = random_ids(LENGTH, seed=1)
        cold = pipe.generate(prompt, greedy(4))
        evict(pipe)
        watched.held = ("get",)
        watched.gate.clear()
        watched.calls.clear()
        with ThreadPoolExecutor() as pool, together(pipe.engine, 3):
            answers = pool.submit(pipe.generate_many, [prompt, prompt, prompt], greedy(4))
            wait_for(lambda: bool(watched.calls["get"]))
            time.sleep(0.5)  # the read is not over while the others look for the same
            watched.gate.set()
            outputs = answers.result()
        assert [output.token_ids for output in outputs] == [cold.token_ids] * 3
        assert [output.cache_report.tiers for output in outputs] == [{"host": CACHED}] * 3
        assert watched.calls["get"] == 1


def test_what_is_on_its_way_during_a_flush_is_not_taken_in(
    checkpoint: Path, watched: Watched
) -> None:
    with open_pipeline(checkpoint, host_cache_memory="64MiB") as pipe:
        cold = ask(pipe)
        evict(pipe)
        stack = pipe.engine._tiers._tiers.stack  # type: ignore[union-attr]
        assert stack.drain(60)
        watched.held = ("get",)
        watched.gate.clear()
        watched.calls.clear()
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(ask, pipe)
            wait_for(lambda: bool(watched.calls["get"]))
            before = stack.epoch
            flushing = pool.submit(pipe.engine.flush)
            wait_for(lambda: stack.epoch > before)
            watched.gate.set()
            flushing.result()
            output = answer.result()
        assert output.token_ids == cold.token_ids and output.usage.cached_tokens == 0
        assert output.cache_report.reason == "cold"


def test_expert_rows_come_back_with_their_blocks(checkpoint: Path) -> None:
    with open_pipeline(checkpoint, host_cache_memory="64MiB") as pipe:
        if pipe.engine.spec.routing is None:
            pytest.skip("a dense model has no expert rows")
        params = greedy(4)
        params = type(params)(temperature=0.0, max_tokens=4, return_routed_experts=True)
        prompt = random_ids(LENGTH, seed=1)
        cold = pipe.generate(prompt, params)
        evict(pipe)
        hit = pipe.generate(prompt, params)
        assert hit.usage.cached_tokens == CACHED
        assert hit.cache_report.experts_missing == 0
        assert cold.routed_experts is not None and hit.routed_experts is not None
        assert (cold.routed_experts == hit.routed_experts).all()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"disk_cache_path": "{}/file/cache"}, "disk_cache_path cannot be used: [Errno 20] Not a"),
        ({"disk_cache_path": "{}/file"}, "disk_cache_path cannot be used: {}/file is not a folder"),
        (
            {"disk_cache_path": "/dev/null"},
            "disk_cache_path cannot be used: /dev/null is not a folder",
        ),
        ({"disk_cache_path": "{}/" + 300 * "x"}, "disk_cache_path cannot be used: [Errno 36] File"),
        ({"disk_cache_path": "{}/\x00"}, "embedded null "),
        (
            {"disk_cache_path": "~nobody-of-that-name/x"},
            "disk_cache_path cannot be used: Could not",
        ),
        ({"host_cache_memory": "900TiB"}, "host_cache_memory is 900 TiB, but this process "),
    ],
)
def test_tiers_that_can_never_be_are_refused_at_the_start(
    checkpoint: Path, tmp_path: Path, options: dict[str, str], said: str
) -> None:
    (tmp_path / "file").write_text("")
    options = {name: value.format(tmp_path) for name, value in options.items()}
    with pytest.raises(ConfigError, match=re.escape(said.format(tmp_path))) as raised:
        open_pipeline(checkpoint, **options)
    assert raised.value.param in options
