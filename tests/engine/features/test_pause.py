"""Generation is paused and goes on, with new weights in between or without."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conversation import say
from families import SPECS
from waiting import wait_for
from weight_updates import (
    LONG,
    TEXT,
    Answer,
    ask,
    begin,
    both,
    changing,
    digest_of,
    started,
    tensors_of,
    with_tensors,
)

from vlm_serve.engine.engine import Engine
from vlm_serve.engine.features.pause import Pause, PauseMode
from vlm_serve.engine.requests.outputs import Delta
from vlm_serve.errors import InvalidRequestError
from vlm_serve.sampling_params import SamplingParams

TOKENS, AT = 40, 9


@pytest.fixture
def cold(text: list[Path]) -> Iterator[dict[Path, Engine]]:
    made = {path: started(path) for path in text}
    yield made
    for each in made.values():
        each.close()


class Pausing(Answer):
    """An answer behind whose token of this number generation is paused."""

    def __init__(self, engine: Engine, mode: PauseMode, at: int) -> None:
        super().__init__()
        self._engine, self._mode, self._at = engine, mode, at

    def push(self, delta: Delta) -> None:
        super().push(delta)
        if len(self.tokens) == self._at and not self.done.is_set():
            pause = self._engine._features.get(Pause)
            assert pause is not None

            def begin() -> None:
                pause.begin(self._mode, "paused")

            self._engine._loop.post(begin)


def paused(engine: Engine, mode: PauseMode, at: int = AT, **fields: Any) -> Answer:
    """Return an answer that is paused behind its token `at`."""
    answer = Pausing(engine, mode, at)
    params = SamplingParams(
        max_tokens=TOKENS, temperature=0.0, ignore_eos=True, logprobs=3, **fields
    )
    engine.submit(engine.preprocessor.prepare([say(TEXT)]), params, answer.push)
    wait_for(lambda: bool(engine.rests))
    return answer


def finished(*answers: Answer) -> None:
    assert all(answer.done.wait(120) for answer in answers)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_pause_changes_no_bit(engine: Engine, cold: dict[Path, Engine], mode: PauseMode) -> None:
    expected = ask(next(iter(cold.values())), tokens=TOKENS)
    answer = paused(engine, mode)
    usage, steps = engine.stats()["usage"], engine.num_steps
    assert (usage["rows"]["live"] > 0) == (mode == "in_place")
    later = begin(engine, "something else")
    wait_for(lambda: engine.num_waiting == 1 + (mode == "retract"))
    engine.call(lambda: None)
    assert engine.num_running == (mode == "in_place")
    assert engine.num_steps == steps and not later.deltas
    assert len(answer.tokens) == AT
    engine.pause(mode)  # a second one changes nothing
    engine.resume()
    finished(answer, later)
    assert answer.bits == expected.bits and not answer.report.weight_changes
    engine.resume()
    assert not engine.rests and engine.check()
    assert ask(engine, tokens=TOKENS).bits == expected.bits


def test_retracted_requests_are_computed_again_by_new_weights(
    engine: Engine, text: list[Path], cold: dict[Path, Engine]
) -> None:
    answer = paused(engine, "retract")
    engine.update_weights(text[1])
    assert len(answer.tokens) == AT and engine.rests == {"paused"}
    engine.resume()
    finished(answer)
    (change,) = answer.report.weight_changes
    assert change.token == AT and change.weights == digest_of(cold[text[1]])
    onward = ask(cold[text[1]], tokens=TOKENS, forced=(answer.tokens[:AT],))
    assert answer.bits[AT:] == onward.bits[AT:]
    assert ask(engine).bits == ask(cold[text[1]]).bits


def test_in_place_kv_stays_and_is_never_published(
    engine: Engine, text: list[Path], cold: dict[Path, Engine]
) -> None:
    answer = paused(engine, "in_place")
    engine.update_weights(text[1])
    engine.resume()
    finished(answer)
    (change,) = answer.report.weight_changes
    assert (answer.report.weights, change.token) == (digest_of(cold[text[0]]), AT)
    assert answer.bits[:AT] == ask(cold[text[0]], tokens=TOKENS).bits[:AT]
    again = ask(cold[text[1]], tokens=TOKENS, forced=(answer.tokens[:AT],))
    assert answer.bits[AT] != again.bits[AT], "its KV was computed again"
    known = engine.preprocessor.prepare([say(TEXT)])
    longer = engine.preprocessor.prepare_tokens([*known.token_ids, *answer.tokens])
    for path in (text[1], text[0]):
        engine.update_weights(path)
        for prompt in (known, longer):
            found = ask(engine, prompt=prompt, prompt_logprobs=1)
            expected = ask(cold[path], prompt=prompt, prompt_logprobs=1)
            assert found.bits == expected.bits
            assert found.deltas[0].prompt_logprobs == expected.deltas[0].prompt_logprobs
            assert path == text[0] or prompt is longer or not found.report.boundary
    assert engine.check()


@pytest.mark.parametrize("at", [1, AT])
def test_in_place_answers_of_equal_kv_are_those_of_a_cold_engine(tmp_path: Path, at: int) -> None:
    """Only the head changes, so KV that is kept equals KV that is computed again."""
    old, new = both(SPECS["text, moe"], tmp_path)
    head = with_tensors(old, tmp_path / "head", tensors_of(new, "lm_head.weight"))
    engine, cold = changing(old), started(head)
    fields = {"return_routed_experts": True, "prompt_logprobs": 0}
    answer = paused(engine, "in_place", at=at, **fields)
    engine.update_weights(head)
    engine.resume()
    finished(answer)
    onward = ask(cold, tokens=TOKENS, forced=(answer.tokens[:at],), **fields)
    assert answer.bits[at:] == onward.bits[at:]
    experts = [each.deltas[-1].routed_experts for each in (answer, onward)]
    assert experts[0] is not None and (experts[0] == experts[1]).all()
    again = ask(engine, tokens=TOKENS, **fields)
    expected = ask(cold, tokens=TOKENS, **fields)
    assert (again.bits, again.report.boundary) == (expected.bits, 0)
    assert again.deltas[0].prompt_logprobs == expected.deltas[0].prompt_logprobs
    for each in (engine, cold):
        each.close()


def test_requests_in_flight_end_first(engine: Engine) -> None:
    running = [begin(engine, f"{number} {TEXT}", tokens=60) for number in range(3)]
    wait_for(lambda: all(len(answer.tokens) > 2 for answer in running))
    thread = threading.Thread(target=engine.pause, args=("wait",))
    thread.start()
    wait_for(lambda: bool(engine.rests))
    later = begin(engine)
    finished(*running)
    thread.join(120)
    assert not thread.is_alive() and not later.deltas
    assert [len(answer.tokens) for answer in running] == [60] * 3
    assert engine.num_running == 0 and engine.num_waiting == 1
    engine.resume()
    finished(later)


def test_going_on_before_they_have_ended_is_told(engine: Engine) -> None:
    answer = begin(engine, tokens=LONG)
    wait_for(lambda: len(answer.tokens) > 2)
    refused: list[str] = []

    def pause() -> None:
        try:
            engine.pause("wait")
        except InvalidRequestError as error:
            refused.append(error.message)

    thread = threading.Thread(target=pause)
    thread.start()
    wait_for(lambda: bool(engine.rests))
    engine.resume()
    thread.join(120)
    finished(answer)
    assert refused == ["generation was continued before the requests in flight had ended"]


def test_requests_in_flight_end_at_once(engine: Engine) -> None:
    answer = begin(engine, tokens=LONG)
    wait_for(lambda: len(answer.tokens) > 2)
    engine.pause()
    assert answer.done.wait(10) and answer.deltas[-1].finish_reason == "abort"
    assert engine.num_running == engine.num_waiting == 0
    engine.resume()
    assert ask(engine).tokens


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_clients_may_leave_meanwhile(engine: Engine, mode: PauseMode) -> None:
    answer = paused(engine, mode)
    (group,) = engine.call(lambda: engine._loop.groups)
    engine.abort(group.request.request_id)
    assert answer.done.wait(10) and answer.deltas[-1].finish_reason == "abort"
    assert engine.num_running == engine.num_waiting == 0 and engine.rests
    assert engine.check()
    engine.resume()
    assert ask(engine).tokens


def test_bad_pauses(engine: Engine, text: list[Path]) -> None:
    with pytest.raises(InvalidRequestError, match="mode must be one of abort, retract, in_place"):
        engine.pause("keep")
    assert not engine.rests
    fixed = started(text[0])
    for change in (fixed.pause, fixed.resume):
        with pytest.raises(InvalidRequestError, match="start with allow_weight_updates"):
            change()
    assert not fixed.rests
    fixed.close()


def test_pauses_and_updates_at_random_moments(text: list[Path], cold: dict[Path, Engine]) -> None:
    """Whatever was in flight, nothing in the cache is of other weights than its keys say."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chosen, answers, served = random.Random(seed), list[Answer](), text[0]
    engine = changing(text[0], cache_memory="2MiB", max_num_seqs=4, cache_audit=1.0)
    for number in range(12):
        content = f"{TEXT}{number % 3}"
        fields = {"prompt_logprobs": 0} if number % 2 else {"n": 2}
        answers.append(begin(engine, content, tokens=chosen.randrange(4, 60), **fields))
        time.sleep(chosen.random() / 20)
        engine.pause(chosen.choice(["retract", "in_place", "in_place"]))
        if chosen.random() < 0.8:
            served = text[chosen.randrange(2)]
            engine.update_weights(served)
        engine.resume()
    finished(*answers)
    for path in (served, *text):
        engine.update_weights(path)
        for number in range(3):
            found = ask(engine, f"{TEXT}{number}", tokens=20, prompt_logprobs=0)
            expected = ask(cold[path], f"{TEXT}{number}", tokens=20, prompt_logprobs=0)
            assert found.bits == expected.bits
            assert found.deltas[0].prompt_logprobs == expected.deltas[0].prompt_logprobs
    assert engine.check() and not engine._auditor.counts.mismatches
    engine.close()
