"""What a GPU's memory decides, computed from the configs of published models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vlm_serve.batch import runner
from vlm_serve.cli import main
from vlm_serve.commands.plan import make
from vlm_serve.engine.engine import Engine
from vlm_serve.engine.start.machine_sizes import MachineSizes, Size, with_step_target
from vlm_serve.errors import ConfigError
from vlm_serve.options.config import EngineConfig
from vlm_serve.server.config import ServerConfig

DATA = Path(__file__).parents[2] / "data"
GIB = 1 << 30
SMALL = str(DATA / "qwen3.5-4b.json")


def sizes(model: str, memory: int, **options: Any) -> tuple[int, int, int]:
    """Sequences, tokens of a step, and bytes of the whole plan."""
    plan = make(str(DATA / model), EngineConfig(device="cuda", **options), memory)
    assert plan.steps is not None
    whole = plan.weights.in_memory + plan.memory.pool_bytes + plan.steps.total
    return plan.config.max_num_seqs, plan.config.max_num_batched_tokens, whole


@pytest.mark.parametrize(
    ("model", "memory", "expected"),
    [
        ("qwen3.5-4b.json", 80, (256, 8192)),
        pytest.param("qwen3.5-4b.json", 24, (64, 2048), marks=pytest.mark.sweep),
        pytest.param("qwen3.5-27b.json", 80, (64, 8192), marks=pytest.mark.sweep),
        pytest.param("qwen3.5-35b-a3b.json", 80, (64, 2048), marks=pytest.mark.sweep),
        pytest.param("qwen3.5-27b.json", 141, (256, 8192), marks=pytest.mark.sweep),
    ],
)
def test_sequences_and_tokens_follow_from_memory(
    model: str, memory: int, expected: tuple[int, int]
) -> None:
    *found, whole = sizes(model, memory * GIB)
    assert tuple(found) == expected
    assert whole <= memory * GIB


@pytest.mark.sweep
def test_numbers_that_are_given_stay() -> None:
    found = sizes("qwen3.5-4b.json", 80 * GIB, max_num_seqs=8, max_num_batched_tokens=2048)
    assert found[:2] == (8, 2048)
    # One that is no choice is shown between its neighbours.
    plan = make(SMALL, EngineConfig(device="cuda", max_num_seqs=100), 80 * GIB)
    assert plan.machine is not None
    assert [each.sequences for each in plan.machine.sizes] == [64, 100, 128]


@pytest.mark.sweep
def test_the_plan_shows_the_next_choices(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", SMALL, "--device", "cuda", "--device-memory", "80GiB", "--max-num-seqs"]
    assert main([*arguments, "64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if "live states" in line] == ["32:", "64:", "128:"]
    assert main([*arguments, "64", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["sequences"] for each in found["sizes"]] == [32, 64, 128]


def test_memory_of_a_gpu_is_none_of_a_cpu() -> None:
    with pytest.raises(ConfigError, match="device_memory is that of a GPU"):
        make(SMALL, EngineConfig(device="cpu"), 80 * GIB)


def test_a_cpu_keeps_its_sizes() -> None:
    plan = make("demo", EngineConfig(device="cpu"))
    assert (plan.config.max_num_seqs, plan.config.max_num_batched_tokens) == (8, 2048)
    assert plan.machine is None
    assert with_step_target(EngineConfig(), ()).step_time_target == 25.0


@pytest.mark.parametrize(
    ("milliseconds", "target"), [(3.0, 25.0), (12.3, 49.0), (90.0, 200.0)], ids=str
)
def test_the_target_of_a_step_follows_from_measured_ones(
    milliseconds: float, target: float
) -> None:
    times = ((1, 0.001), (64, milliseconds / 1000))
    assert with_step_target(EngineConfig(), times).step_time_target == target
    given = EngineConfig(step_time_target=7.0)
    assert with_step_target(given, times).step_time_target == 7.0


def test_measured_steps_are_in_the_table() -> None:
    found = tuple(Size(count, GIB, GIB, 30 * GIB, 10**6) for count in (32, 64, 128))
    config = replace(EngineConfig(), max_num_seqs=64, step_time_target=40.0)
    rows = MachineSizes(found, ((32, 0.004), (64, 0.008))).rows(config)
    assert [name.strip() for name, _ in rows] == ["or", "sequences", "or", "step"]
    assert rows[1][1].endswith("8.0 ms a step, 8000 tokens a second")
    assert "tokens a second" not in rows[2][1]
    assert rows[3][1] == "at most 2048 tokens, 40 ms beside prompts at best"


def test_jobs_of_a_file_are_as_many_as_the_engine_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not as its options say, which a GPU's memory changes."""
    made, seen = Engine.from_checkpoint, list[int]()

    def decided(model: str, config: EngineConfig) -> Engine:
        return made(model, replace(config, max_num_seqs=32))

    async def served(*arguments: Any) -> None:
        seen.append(arguments[-1])

    monkeypatch.setattr(Engine, "from_checkpoint", decided)
    monkeypatch.setattr(runner, "serve_jobs", served)
    job: Any = None
    runner.run_jobs("demo", EngineConfig(), ServerConfig(), [job], lambda *_: None, None)
    assert seen == [64]
