"""Weights change on all ranks at one step boundary, or on none."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from families import SPECS
from peft_folders import random_adapter
from rank_processes import on_ranks_of, rank_processes
from sweeps import quick
from waiting import wait_for
from weight_updates import LONG, OPTIONS, TEXT, ask, begin, both, tensors_of, with_tensors

from vlm_serve.engine.engine import Engine
from vlm_serve.engine.features.new_weights import NewWeights
from vlm_serve.engine.steps.ranks.executor import ShardedExecutor
from vlm_serve.engine.steps.ranks.process import RankProcesses
from vlm_serve.errors import EngineClosedError, EngineError, InvalidRequestError
from vlm_serve.options.config import EngineConfig

CONFIG = EngineConfig(**OPTIONS, tensor_parallel_size=2, threads=1)
CHANGING = replace(CONFIG, allow_weight_updates=True)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("dense", {}),
    "moe": ("text, moe", {}),
    "next": ("next", {}),
    "vision": ("vl, tied, one feature, one kv head", {}),
    "codes": ("text", {"quantization": "int8"}),
    "ops over gloo": ("dense", {"compiled_kernels": False, "deterministic": True}),
}


@pytest.fixture(scope="module")
def processes() -> Iterator[RankProcesses]:
    with rank_processes(2) as started:
        yield started


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return both(SPECS["text, tied"], tmp_path_factory.mktemp("text"))


@pytest.mark.parametrize("kind", quick(KINDS, ["dense"]))
def test_hits_are_those_of_cold_ranks(processes: RankProcesses, tmp_path: Path, kind: str) -> None:
    name, options = KINDS[kind]
    old, new = both(SPECS[name], tmp_path)
    adapter = random_adapter(old, tmp_path / "adapter", 3, only=["layers.0.", "lm_head"])
    options |= {"lora_modules": (f"adapter={adapter}",)}

    def answers(engine: Engine) -> list[Any]:
        own = engine.adapters.identity_of("adapter")
        prompt = engine.preprocessor.prepare([{"role": "user", "content": TEXT}], adapter=own)
        return [ask(engine), ask(engine, prompt=prompt)]

    with on_ranks_of(processes, old, replace(CHANGING, **options)) as pipe:
        engine = pipe.engine
        first = answers(engine)
        identity = engine.update_weights(new)
        misses, hits = answers(engine), answers(engine)
        engine.update_weights(old)
        back = answers(engine)
    with on_ranks_of(processes, new, replace(CONFIG, **options)) as pipe:
        assert pipe.engine.preprocessor.weights == identity
        cold = answers(pipe.engine)
    for each in zip(first, misses, hits, back, cold, strict=True):
        before, miss, hit, again, expected = each
        assert miss.report.boundary == 0 < hit.report.boundary
        assert miss.bits == hit.bits == expected.bits != before.bits
        assert again.report.boundary > 0 and again.bits == before.bits


def test_tensors_reach_all_ranks(
    processes: RankProcesses, text: list[Path], tmp_path: Path
) -> None:
    """A later update keeps an earlier one."""
    path, found = text[0], []
    with on_ranks_of(processes, text[0], CHANGING) as pipe:
        for end in ("embed_tokens.weight", "1.linear_attn.in_proj_a.weight"):
            part = tensors_of(text[1], end)
            path = with_tensors(path, tmp_path / end, part)
            found.append((path, pipe.engine.update_weights(part.items()), ask(pipe.engine).bits))
    for path, identity, bits in found:
        with on_ranks_of(processes, path, CONFIG) as pipe:
            assert pipe.engine.preprocessor.weights == identity
            assert ask(pipe.engine).bits == bits


def test_a_rank_that_refuses_keeps_all_from_changing(
    processes: RankProcesses,
    text: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other rank is sent to a folder that it cannot use, or to one with other weights."""
    part = {name: -each for name, each in tensors_of(text[1], "embed_tokens.weight").items()}
    elsewhere = with_tensors(text[1], tmp_path / "elsewhere", part)
    broken = with_tensors(
        text[1], tmp_path / "broken", {name: each[:-1].clone() for name, each in part.items()}
    )
    tell = NewWeights._ask

    with on_ranks_of(processes, text[0], CHANGING) as pipe:
        engine = pipe.engine
        first, identity = ask(engine), engine.preprocessor.weights
        for folder, problem in (
            (broken, r"rank 1: .*embed_tokens\.weight"),
            (elsewhere, "have changed while they were read"),
        ):

            def sent(own: NewWeights, call: Any, name: str, *given: Any, to: Path = folder) -> Any:
                return tell(own, call, name, *((to, *given[1:]) if given else ()))

            with monkeypatch.context() as patch:
                patch.setattr(NewWeights, "_ask", sent)
                with pytest.raises(InvalidRequestError, match=problem):
                    engine.update_weights(text[1])
            again = ask(engine)
            assert again.bits == first.bits and again.report.boundary > 0
            assert engine.preprocessor.weights == identity
            engine.flush()
            assert ask(engine).bits == first.bits, "computed anew, on both ranks"
        changed = engine.update_weights(text[1])
        new = ask(engine)
    with on_ranks_of(processes, text[1], CONFIG) as pipe:
        assert pipe.engine.preprocessor.weights == changed
        assert ask(pipe.engine).bits == new.bits != first.bits


def test_the_first_rank_may_refuse_as_well(
    processes: RankProcesses, text: list[Path], tmp_path: Path
) -> None:
    part = tensors_of(text[1], "embed_tokens.weight")
    broken = {name: tensor * float("nan") for name, tensor in part.items()}
    with on_ranks_of(processes, text[0], CHANGING) as pipe:
        first = ask(pipe.engine)
        with pytest.raises(InvalidRequestError, match="embed_tokens"):
            pipe.engine.update_weights(broken.items())
        with pytest.raises(InvalidRequestError, match="no safetensors"):
            pipe.engine.update_weights(tmp_path)
        again = ask(pipe.engine)
        assert again.bits == first.bits and again.report.boundary > 0


def test_answers_that_span_an_update_say_where(processes: RankProcesses, text: list[Path]) -> None:
    """Steps go on while the ranks read."""
    with on_ranks_of(processes, text[0], CHANGING) as pipe:
        before = begin(pipe.engine, tokens=LONG)
        wait_for(lambda: len(before.tokens) > 5)
        identity = pipe.engine.update_weights(text[1])
        assert before.done.wait(120)
    (change,) = before.report.weight_changes
    assert change.weights == identity.whole.hex() and 5 < change.token < LONG
    with on_ranks_of(processes, text[0], CONFIG) as pipe:
        assert ask(pipe.engine, tokens=LONG).bits[: change.token] == before.bits[: change.token]
    forced = (before.tokens[: change.token],)
    with on_ranks_of(processes, text[1], CONFIG) as pipe:
        onward = ask(pipe.engine, tokens=LONG, forced=forced)
        assert onward.bits[change.token :] == before.bits[change.token :]


def test_a_rank_that_ends_while_it_reads_ends_the_engine(
    text: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine.from_checkpoint(str(text[0]), CHANGING)
    tell, ranks = NewWeights._ask, cast(ShardedExecutor, engine.parts.executor)._processes

    def killing(weights: NewWeights, call: Any, name: str, *given: Any) -> Any:
        if name == "weights_read":
            for process in ranks:
                os.kill(process.pid, signal.SIGKILL)
        return tell(weights, call, name, *given)

    monkeypatch.setattr(NewWeights, "_ask", killing)
    with pytest.raises((EngineClosedError, EngineError)):
        engine.update_weights(text[1])
    wait_for(lambda: not engine.alive)
    with pytest.raises(EngineClosedError):
        begin(engine)
    engine.close()
