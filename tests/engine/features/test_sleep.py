"""An engine that sleeps gives memory back, and answers as before when it wakes."""

from __future__ import annotations

import gc
import mmap
import shutil
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conversation import picture, say
from families import SPECS
from PIL import Image
from waiting import wait_for
from weight_updates import LONG, TEXT, ask, begin, both, changing, digest_of, started, tensors_of

from vlm_serve.engine.engine import Engine
from vlm_serve.engine.steps.local_executor import LocalExecutor
from vlm_serve.errors import ConfigError, InvalidRequestError, OverloadedError
from vlm_serve.models.cache_layout import CacheTensors
from vlm_serve.system.collector import freeze_startup_objects
from vlm_serve.system.host_memory import resident_bytes

ALL = ("weights", "kv_cache")
TIERS: dict[str, dict[str, Any]] = {"none": {}, "host": {"host_cache_memory": "16MiB"}, "disk": {}}


def caches(engine: Engine) -> CacheTensors:
    executor = engine.parts.executor
    assert isinstance(executor, LocalExecutor)
    return executor._caches


def is_empty(engine: Engine) -> bool:
    """Return True if nothing is cached, and no pool has more than parts of pages at its ends."""
    usage = engine.stats()["usage"]
    left = (int(pool.count_nonzero()) for pool in caches(engine).tensors.values())
    touched = usage["touched_blocks"] or usage["touched_rows"]
    return not (usage["nodes"] or touched) and max(left) < 2 * mmap.PAGESIZE


@pytest.mark.parametrize("parts", [("kv_cache",), ALL], ids=["one", "two"])
@pytest.mark.parametrize("tier", TIERS)
def test_hits_behind_a_sleep_are_those_of_before(
    text: list[Path], tmp_path: Path, tier: str, parts: tuple[str, ...]
) -> None:
    disk = {"disk_cache_path": str(tmp_path / "disk")} if tier == "disk" else {}
    engine = changing(text[0], **TIERS[tier], **disk)
    first, weights = ask(engine), engine.preprocessor.weights
    assert not is_empty(engine)
    assert engine.sleep(parts) == set(parts) and engine.rests == {"asleep"}
    assert is_empty(engine) and engine.check()
    with pytest.raises(OverloadedError, match="the engine is asleep: wake it up first"):
        ask(engine)
    assert engine.sleep() == set(parts) | {"kv_cache"}, "a second order changes nothing"
    assert engine.wake_up() == set() and not engine.rests
    again = ask(engine)
    assert again.bits == first.bits and engine.preprocessor.weights == weights
    assert again.report.tiers.get(tier, 0) == again.report.boundary
    assert bool(again.report.boundary) == (tier != "none")
    assert engine.wake_up() == set() and engine.check()
    assert ask(engine).report.boundary > 0
    engine.close()


@pytest.mark.parametrize("parts", [("kv_cache",), ALL], ids=["one", "two"])
def test_requests_in_flight_go_on_when_it_wakes(
    engine: Engine, text: list[Path], parts: tuple[str, ...]
) -> None:
    answers = [begin(engine, f"{number} {TEXT}", tokens=LONG) for number in range(2)]
    wait_for(lambda: all(len(answer.tokens) > 2 for answer in answers))
    engine.sleep(parts)
    assert engine.num_running == 0 and engine.num_waiting == 2 and is_empty(engine)
    engine.resume()  # of a pause that is none
    steps = engine.num_steps
    engine.call(lambda: None)
    assert engine.num_steps == steps
    engine.wake_up()
    cold = started(text[0])
    for number, answer in enumerate(answers):
        assert answer.done.wait(120)
        assert answer.bits == ask(cold, f"{number} {TEXT}", tokens=LONG).bits
        assert not answer.report.weight_changes
    cold.close()


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_requests_in_flight_may_end(engine: Engine, mode: str) -> None:
    answer = begin(engine, tokens=100)
    wait_for(lambda: len(answer.tokens) > 2)
    engine.sleep(mode=mode)
    assert answer.done.is_set()
    assert answer.deltas[-1].finish_reason == ("abort" if mode == "abort" else "length")


def test_a_pause_in_place_keeps_nothing_of_who_is_about_to_sleep(engine: Engine) -> None:
    """The order to sleep waits for answers when the pause comes."""
    answer = begin(engine, tokens=LONG)
    wait_for(lambda: len(answer.tokens) > 2)
    thread = threading.Thread(target=engine.sleep, kwargs={"mode": "wait"})
    thread.start()
    wait_for(lambda: engine.rests == {"asleep"})
    engine.pause("in_place")
    thread.join(120)
    assert not thread.is_alive() and engine.num_running == 0 and is_empty(engine)
    assert engine.wake_up() == set() and engine.rests == {"paused"}
    engine.resume()
    assert answer.done.wait(120) and answer.deltas[-1].finish_reason == "length"


def test_a_paused_engine_stays_paused_when_it_wakes(engine: Engine) -> None:
    engine.pause("in_place")
    engine.sleep()
    assert engine.rests == {"paused", "asleep"}
    engine.wake_up()
    assert engine.rests == {"paused"}
    answer = begin(engine)
    wait_for(lambda: engine.num_waiting == 1)
    engine.resume()
    assert answer.done.wait(120)


def test_new_weights_between_the_parts(engine: Engine, text: list[Path]) -> None:
    """Weights wake, change, and then the cache wakes, as trainers do it."""
    ask(engine)
    engine.sleep(ALL)
    assert engine.wake_up(["weights"]) == {"kv_cache"} and engine.rests
    engine.update_weights(text[1])
    assert engine.wake_up(["kv_cache"]) == set()
    cold = started(text[1])
    assert ask(engine).bits == ask(cold).bits
    engine.sleep(["weights"])
    engine.update_weights(text[0])
    assert not engine.rests, "an update brings weights"
    assert digest_of(engine) != digest_of(cold)
    cold.close()


def test_weights_that_could_not_be_read_again_stay(
    engine: Engine, text: list[Path], tmp_path: Path
) -> None:
    engine.update_weights(tensors_of(text[1], "embed_tokens.weight").items())
    first = ask(engine)
    with pytest.raises(InvalidRequestError, match="came from memory"):
        engine.sleep(ALL)
    assert not engine.rests and ask(engine).bits == first.bits
    assert engine.sleep() == {"kv_cache"} and not engine.wake_up()
    moved = Path(shutil.copytree(text[0], tmp_path / "moved"))
    engine.update_weights(moved)
    engine.sleep(ALL)
    moved.rename(tmp_path / "gone")
    with pytest.raises(InvalidRequestError, match="safetensors|files|read"):
        engine.wake_up()
    assert engine.rests == {"asleep"}
    (tmp_path / "gone").rename(moved)
    assert not engine.wake_up()
    shutil.rmtree(moved)
    with pytest.raises(InvalidRequestError, match="safetensors|files|read"):
        engine.sleep(ALL)
    assert not engine.rests and ask(engine).tokens


def test_bad_orders(engine: Engine, text: list[Path]) -> None:
    for change in (engine.sleep, engine.wake_up):
        for parts in ([], ["cuda_graph"], ["weights", "nonsense"]):
            with pytest.raises(InvalidRequestError, match="tags must be some of weights, kv_cache"):
                change(parts)
    for mode in ("in_place", "keep"):
        with pytest.raises(InvalidRequestError, match="mode"):
            engine.sleep(mode=mode)
    assert not engine.rests
    fixed = started(text[0])
    for order in (fixed.sleep, fixed.wake_up):
        with pytest.raises(InvalidRequestError, match="start with allow_weight_updates"):
            order()
    fixed.close()


def test_it_sleeps_by_itself_and_a_request_wakes_it(text: list[Path]) -> None:
    engine = started(text[0], idle_sleep=0.2, host_cache_memory="16MiB")
    wait_for(lambda: engine.rests == {"idle"})
    first = ask(engine)
    wait_for(lambda: engine.rests == {"idle"})
    assert is_empty(engine) and engine.check()
    again = ask(engine)
    assert again.bits == first.bits and again.report.tiers["host"] == again.report.boundary > 0
    engine.pins.add(engine.preprocessor.prepare([say(TEXT)]), 3600)
    steps = engine.num_steps
    with pytest.raises(AssertionError, match="did not happen"):
        wait_for(lambda: engine.rests == {"idle"}, 1.0)
    assert engine.num_steps == steps and engine.pins.lift() == 1
    wait_for(lambda: engine.rests == {"idle"})
    engine.close()


def test_an_order_wakes_what_sleeps_by_itself(text: list[Path]) -> None:
    engine = changing(text[0], idle_sleep=0.5)
    for parts in ((), ALL):
        wait_for(lambda: engine.rests == {"idle"})
        if parts:
            engine.sleep(parts)
        assert engine.wake_up() == set() and not engine.rests
    wait_for(lambda: engine.rests == {"idle"})
    engine.update_weights(text[1])
    assert engine.rests == {"idle"}, "the memory of the cache is still given back"
    engine.close()


def test_a_step_is_expected_from_waking_on(engine: Engine, text: list[Path]) -> None:
    """However long it slept or read its weights, a server that wakes has not stalled."""
    changes = (engine.wake_up, partial(engine.update_weights, text[1]))
    for change in changes:
        engine.sleep(["weights"])
        asleep = time.monotonic()
        change()
        assert not engine.rests and engine.last_step_time > asleep
    engine.pause()
    engine.sleep()
    last = engine.last_step_time
    engine.wake_up()
    assert engine.last_step_time == last, "it is paused still"
    engine.resume()
    assert engine.last_step_time > last


def test_what_cannot_sleep_by_itself(text: list[Path]) -> None:
    with pytest.raises(ConfigError, match="idle_sleep is not possible with a GPU or several ranks"):
        started(text[0], idle_sleep=1.0, tensor_parallel_size=2)


def test_embeddings_are_found_in_tiers(tmp_path: Path) -> None:
    old, _ = both(SPECS["vl, tied, one feature, one kv head"], tmp_path)
    engine = changing(old, host_cache_memory="16MiB")
    image = picture(Image.effect_noise((96, 64), 80).convert("RGB"))

    def encoded(question: str) -> int:
        ask(engine, prompt=engine.preprocessor.prepare([say(question, image)]))
        return int(engine.stats()["num_encoded_spans"])

    assert encoded("What is it?") == 1
    engine.sleep()
    executor = engine.parts.executor
    assert isinstance(executor, LocalExecutor) and not executor._embeddings
    engine.wake_up()
    assert encoded("And what is this?") == 1
    assert engine.stats()["embeddings"] == {"encoded": 1, "host": 1}
    engine.close()


@pytest.mark.memory
def test_resident_memory_falls_and_comes_back(tmp_path: Path) -> None:
    spec = replace(SPECS["text"], hidden_size=1024, intermediate_size=4096, num_layers=4)
    path, _ = both(spec, tmp_path)
    engine = changing(path, cache_memory="192MiB")
    freeze_startup_objects()
    weights = engine.weights.projections + engine.weights.table + engine.weights.others
    first, sizes = ask(engine), list[tuple[int, ...]]()
    for _ in range(10):
        engine.flush()
        engine.call(lambda: [pool.fill_(1) for pool in caches(engine).tensors.values()])
        sizes.append(tuple(_resident(engine, parts) for parts in ((), ("kv_cache",), ALL)))
        assert engine.wake_up() == set()
        assert ask(engine).bits == first.bits
    pools = sum(pool.untyped_storage().nbytes() for pool in caches(engine).tensors.values())
    print(f"weights {weights}, pools {pools}, resident {sizes}")
    for awake, one, two in sizes:
        assert awake - one > 0.95 * pools and one - two > 0.95 * weights
    assert max(sizes[9]) < 1.02 * max(sizes[1])
    engine.close()
    gc.unfreeze()


def _resident(engine: Engine, parts: tuple[str, ...]) -> int:
    if parts:
        engine.sleep(parts)
    size = resident_bytes()
    assert size is not None
    return size
