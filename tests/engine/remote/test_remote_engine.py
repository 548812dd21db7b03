"""An engine in a process of its own beside one in this process: the same answers and reports."""

from __future__ import annotations

import dataclasses
import io
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from make_checkpoint import make_checkpoint
from PIL import Image
from waiting import WAIT_SECONDS, wait_for

from vlm_serve.engine.engine import Engine
from vlm_serve.engine.remote.engine import RemoteEngine
from vlm_serve.engine.remote.messages import GrammarName
from vlm_serve.engine.remote.parts import _key
from vlm_serve.engine.requests.outputs import Delta
from vlm_serve.errors import EngineClosedError, InvalidRequestError, ModelNotFoundError
from vlm_serve.options.config import EngineConfig
from vlm_serve.preprocess.identity.keys import AdapterIdentity
from vlm_serve.preprocess.identity.prompt import Prompt
from vlm_serve.sampling_params import SamplingParams
from vlm_serve.structured_outputs import StructuredOutputs

pytestmark = pytest.mark.processes
CONFIG = EngineConfig(
    device="cpu",
    dtype="float32",
    block_size=16,
    cache_memory="32MiB",
    max_model_len=2048,
    threads=1,
    speculative="off",  # how long drafts are depends on time, and so does how tokens come together
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("remote"))


@pytest.fixture(scope="module")
def here(folder: Path) -> Iterator[Engine]:
    engine = Engine.from_checkpoint(str(folder), CONFIG)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def _apart(folder: Path) -> Iterator[RemoteEngine]:
    engine = RemoteEngine(str(folder), CONFIG)
    yield engine
    engine.close()
    assert engine._process.returncode == 0


@pytest.fixture
def apart(_apart: RemoteEngine) -> Iterator[RemoteEngine]:
    """Afterwards nothing is held for a request but the last step's; no invariant is violated."""
    _apart.flush()
    yield _apart
    Answer(_apart, chat(_apart), greedy(2)).told()
    wait_for(lambda: not _apart._open and len(_apart._lent) <= 1)
    assert _apart.check()


class Answer:
    """What a request was told."""

    def __init__(self, engine: Any, prompt: Prompt, params: SamplingParams, **options: Any) -> None:
        self.deltas: list[Delta] = []
        self.steps = 0
        self._left = params.n
        self._ended = threading.Event()
        given = {"on_step": self._on_step, **options}
        self.id = engine.submit(prompt, params, self._on_delta, **given)

    def _on_delta(self, delta: Delta) -> None:
        self.deltas.append(delta)
        if delta.finish_reason is not None:
            self._left -= 1
        if not self._left:
            self._ended.set()

    def _on_step(self) -> None:
        self.steps += 1

    def told(self) -> list[Delta]:
        assert self._ended.wait(WAIT_SECONDS)
        return self.deltas

    def tokens(self) -> list[int]:
        return [token for delta in self.told() for token in delta.token_ids]


def chat(engine: Any, *content: Any, **options: Any) -> Prompt:
    prompt: Prompt = engine.preprocessor.prepare(
        [{"role": "user", "content": [{"type": "text", "text": "Tell me."}, *content]}], **options
    )
    return prompt


def picture(side: int, level: int = 90) -> dict[str, Any]:
    buffer = io.BytesIO()
    noise = np.random.default_rng(level).integers(0, 255, (side, side, 3), np.uint8)
    Image.fromarray(noise).save(buffer, "PNG")
    return {"type": "image", "image": buffer.getvalue()}


def greedy(tokens: int = 8, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **options)


def without_times(delta: Delta) -> Delta:
    """The delta, as far as it does not depend on how long things take."""
    report = delta.cache_report
    assert report is not None
    return dataclasses.replace(delta, cache_report=dataclasses.replace(report, joined_ms=0.0))


@pytest.mark.parametrize(
    "options",
    [{}, {"n": 2, "logprobs": 3}, {"prompt_logprobs": 2}, {"stop": ["e"], "logprobs": 0}],
)
def test_deltas_are_the_same(here: Engine, apart: RemoteEngine, options: dict[str, Any]) -> None:
    here.flush()
    for again in range(2):
        told = [
            [
                without_times(delta)
                for delta in Answer(engine, chat(engine), greedy(**options)).told()
            ]
            for engine in (here, apart)
        ]
        assert told[0] == told[1]
        usage = told[1][0].usage
        # With log-probabilities of the prompt a hit ends before the deepest boundary there is.
        written = not again or "prompt_logprobs" in options
        assert (bool(usage.cached_tokens), bool(usage.written_tokens)) == (again, written)


def test_a_picture_is_seen_and_found_again(here: Engine, apart: RemoteEngine) -> None:
    here.flush()
    for cached in (False, True):
        tokens, reports = [], []
        for engine in (here, apart):
            answer = Answer(engine, chat(engine, picture(400)), greedy())
            tokens.append(answer.tokens())
            reports.append(without_times(answer.deltas[-1]).cache_report)
        assert tokens[0] == tokens[1] and reports[0] == reports[1]
        assert reports[0] is not None and reports[0].media_decoded == (not cached)


def test_pixels_are_asked_for_where_they_are_needed_after_all(apart: RemoteEngine) -> None:
    first = Answer(apart, chat(apart, picture(400)), greedy()).tokens()
    apart._peer.ask("flush")  # what was computed is gone, and the upload is known
    prompt = chat(apart, picture(400))
    assert not prompt.media[0].ready
    answer = Answer(apart, prompt, greedy())
    assert answer.tokens() == first
    assert answer.deltas[-1].cache_report is not None
    assert answer.deltas[-1].cache_report.media_decoded == 1


def test_a_wrong_record_is_put_right(apart: RemoteEngine) -> None:
    wanted, other = (chat(apart, picture(400, level)) for level in (1, 2))
    first = Answer(apart, wanted, greedy()).tokens()
    apart._peer.ask("flush")
    index = apart.preprocessor.raw_index
    assert wanted.media[0].record != other.media[0].record  # type: ignore[attr-defined]
    for key in [*index._entries]:
        if index.get(key) == wanted.media[0].record:  # type: ignore[attr-defined]
            index.put(key, other.media[0].record)  # type: ignore[attr-defined]
    assert Answer(apart, chat(apart, picture(400, 1)), greedy()).tokens() == first


def test_a_request_that_is_aborted_while_its_picture_is_decoded_ends(apart: RemoteEngine) -> None:
    Answer(apart, chat(apart, picture(1500)), greedy(1)).told()
    apart._peer.ask("flush")
    answer = Answer(apart, chat(apart, picture(1500)), greedy())
    apart.abort(answer.id)
    assert answer.told()[-1].finish_reason == "abort"


def test_the_next_turn_is_asked_for(here: Engine, apart: RemoteEngine) -> None:
    found = []
    for engine in (here, apart):
        answer = Answer(engine, chat(engine), greedy(40))
        answer.told()
        said = {"role": "assistant", "content": "".join(each.text for each in answer.deltas)}
        prompt = engine.preprocessor.prepare(
            [
                {"role": "user", "content": "Tell me."},
                said,
                {"role": "user", "content": "And then?"},
            ]
        )
        found.append(Answer(engine, prompt, greedy(1)).told()[-1].usage.cached_tokens)
    assert found[0] == found[1]


def test_a_grammar_is_compiled_and_kept_over_there(apart: RemoteEngine) -> None:
    form = StructuredOutputs(choice=("maybe", "never"))
    params = SamplingParams(max_tokens=20, structured_outputs=form)
    assert apart.grammars.find(form) is None
    answer = Answer(apart, chat(apart), params, grammar=apart.grammars.compile(form))
    assert "".join(delta.text for delta in answer.told()) in ("maybe", "never")
    assert apart.grammars.find(form) is not None and apart.grammars.find(form, b"x") is not None
    other = Answer(apart, chat(apart), params)  # it begins behind a thought, if there is one
    owner = chat(apart).keys.owners.prompt
    assert apart.grammars.find(form, b"", owner) is not None
    other.told()
    with pytest.raises(InvalidRequestError):
        apart.grammars.compile(StructuredOutputs(regex="("))


def test_a_grammar_that_was_dropped_is_compiled_again(apart: RemoteEngine) -> None:
    names: Any = apart.grammars
    form = StructuredOutputs(regex="[ab]{3}")
    name = names.find(form)
    assert name is None
    names._known[_key(GrammarName(form, b"", b""))] = None
    params = SamplingParams(max_tokens=20, structured_outputs=form)
    answer = Answer(apart, chat(apart), params, grammar=names.find(form))
    assert len("".join(delta.text for delta in answer.told())) == 3
    other = StructuredOutputs(regex="[cd]{3}")
    names._known[_key(GrammarName(other, b"", b""))] = None
    late = Answer(apart, chat(apart), params, grammar=names.find(other))
    apart.abort(late.id)
    assert late.told()[-1].finish_reason in ("abort", "stop")


def test_what_is_wrong_is_refused_at_once(apart: RemoteEngine) -> None:
    with pytest.raises(InvalidRequestError, match="2048"):
        Answer(apart, chat(apart), SamplingParams(max_tokens=5000))
    with pytest.raises(InvalidRequestError, match="ttl_seconds"):
        apart.pins.add(chat(apart), -1.0)
    unloaded = AdapterIdentity("ab" * 32)
    prompt = dataclasses.replace(chat(apart), adapter=unloaded)
    error = Answer(apart, prompt, greedy()).told()[-1].error
    assert isinstance(error, ModelNotFoundError), "what only the engine can tell comes as an end"


def test_the_tree_is_mirrored(here: Engine, apart: RemoteEngine) -> None:
    here.flush()
    prompts = [chat(engine, picture(100)) for engine in (here, apart)]
    engines: tuple[Any, Any] = here, apart
    for engine, prompt in zip(engines, prompts, strict=True):
        Answer(engine, prompt, greedy(40)).told()
        assert engine.pins.add(prompt, 100.0) > 0
    wait_for(lambda: len(apart.mirror) == len(here.mirror))

    def shown(engine: Any) -> list[Any]:
        nodes = engine.page(engine.mirror.listing().entries, 0, 100).nodes
        return sorted(dataclasses.astuple(dataclasses.replace(node, block=0)) for node in nodes)

    wait_for(lambda: shown(here) == shown(apart))
    assert any(node[6] for node in shown(apart)), "pins are counted"
    entries = apart.mirror.listing().entries
    assert b"".join(entry.node.packed_tokens for entry in entries)
    assert apart.probe(prompts[1]).boundary == here.probe(prompts[0]).boundary > 0
    assert apart.pins.lift() == here.pins.lift() == 1
    assert apart.pins.listed() == ()


def test_followers_learn_of_pins_and_hits(apart: RemoteEngine) -> None:
    prompt = chat(apart)
    Answer(apart, prompt, greedy(40)).told()
    wait_for(lambda: len(apart.mirror) > 0)
    with apart.mirror.following():
        began = apart.mirror.sequence
        apart.pins.add(prompt, 100.0)

        def told() -> bool:
            apart.mirror.publish_use()
            update = apart.mirror.since(began)
            return update is not None and any(each.kind == "pinned" for each in update[1])

        wait_for(told)
    apart.pins.lift()


def test_counters_come_from_both_processes(here: Engine, apart: RemoteEngine) -> None:
    ours, theirs = here.stats(), apart.stats()
    assert ours.keys() == theirs.keys()
    assert ours["held_bytes"].keys() == theirs["held_bytes"].keys()
    assert theirs["known_text"]["part_misses"] > 0
    assert apart.affinity_digest().entries == ()


def test_a_check_is_interrupted(apart: RemoteEngine) -> None:
    Answer(apart, chat(apart), greedy(60)).told()
    assert apart.check(lambda: False)
    assert apart.check(lambda: True) in (True, False), "a small cache may be checked before"
    assert apart.check(), "the next one is not"


def test_work_is_seen_while_it_is_on_its_way_and_gone_behind_it(apart: RemoteEngine) -> None:
    os.kill(apart._process.pid, signal.SIGSTOP)
    try:
        answer = Answer(apart, chat(apart), greedy())
        assert apart.num_running + apart.num_waiting == 1
    finally:
        os.kill(apart._process.pid, signal.SIGCONT)
    answer.told()
    wait_for(lambda: apart.num_running + apart.num_waiting == 0)


def test_a_vector_comes_whole(folder: Path) -> None:
    config = dataclasses.replace(CONFIG, task="embed")
    vectors = []
    for start in (RemoteEngine, Engine.from_checkpoint):
        engine: Any = start(str(folder), config)
        told = Answer(engine, chat(engine), SamplingParams(max_tokens=1), pooled=True).told()
        vectors.append(told[-1].vector)
        engine.close()
    first, second = vectors
    assert first is not None and second is not None and np.array_equal(first, second)


def test_a_killed_process_ends_all_requests(folder: Path) -> None:
    engine = RemoteEngine(str(folder), CONFIG)
    prompt = chat(engine)
    answers = [Answer(engine, prompt, greedy(1500, n=2)) for _ in range(3)]
    wait_for(lambda: all(answer.deltas for answer in answers))
    os.kill(engine._process.pid, signal.SIGKILL)
    engine.wait()
    for answer in answers:
        ends = [delta for delta in answer.told() if delta.finish_reason is not None]
        assert [delta.index for delta in ends] == [0, 1]
        assert "SIGKILL" in str(ends[0].error) and ends[0].usage.prompt_tokens > 0
        assert answer.steps > 1
    assert not engine.alive and engine.num_running == engine.num_waiting == 0
    with pytest.raises(EngineClosedError):
        Answer(engine, prompt, greedy())
    with pytest.raises(EngineClosedError):
        engine.stats()
    engine.close()


def test_closing_ends_open_requests(folder: Path) -> None:
    engine = RemoteEngine(str(folder), CONFIG)
    answer = Answer(engine, chat(engine), greedy(1500))
    wait_for(lambda: bool(answer.deltas))
    engine.close()
    engine.close()
    error = answer.told()[-1].error
    assert isinstance(error, EngineClosedError) and error.code == "engine_stopped"
