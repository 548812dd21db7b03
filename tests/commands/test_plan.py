"""The memory plan of public model shapes, from their configs alone."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_spec import CheckpointSpec
from make_checkpoint import make_checkpoint

from vlm_serve.cli import main
from vlm_serve.commands import plan as plan_command
from vlm_serve.engine.engine import Engine
from vlm_serve.engine.steps.memory import default_cache_memory
from vlm_serve.kernels import native_library
from vlm_serve.kernels.native_library import UNMEASURED
from vlm_serve.options.config import EngineConfig

DATA = Path(__file__).parent.parent / "data"
GPU = ["--device", "cuda"]
LARGE = [*GPU, "--cache-memory", "8485MiB", "--kv-dtype", "int8", "--state-dtype", "bfloat16"]
LARGE += ["--block-size", "64", "--tensor-parallel-size", "2"]


def _plan(capsys: pytest.CaptureFixture[str], config: str, *flags: str) -> dict[str, Any]:
    assert main(["plan", "--model", str(DATA / config), "--json", *flags]) == 0
    plan: dict[str, Any] = json.loads(capsys.readouterr().out)
    return plan


@pytest.mark.parametrize(("interval", "tokens"), [(2, 27_200), (64, 337_600), (128, 413_952)])
def test_tokens_of_the_27b_on_two_ranks(
    capsys: pytest.CaptureFixture[str], interval: int, tokens: int
) -> None:
    plan = _plan(capsys, "qwen3.5-27b.json", *LARGE, "--state-interval", str(interval))
    assert plan["block_bytes"] == 1_064_960
    assert plan["snapshot_bytes"] == pytest.approx(37.4 * 2**20, rel=0.002)
    assert plan["tokens"] == pytest.approx(tokens, rel=0.02)
    rows = {row["interval"]: row for row in plan["table"]}
    assert rows[interval]["tokens"] == plan["tokens"]
    assert rows[interval]["snapshots"] == plan["snapshots"]
    assert plan["granularity"] == 64


def test_a_snapshot_of_the_4b_to_the_byte(capsys: pytest.CaptureFixture[str]) -> None:
    plan = _plan(capsys, "qwen3.5-4b.json", "--cache-memory", "4GiB", "--max-num-seqs", "3", *GPU)
    assert plan["snapshot_bytes"] == 51_511_296
    assert plan["live_state_bytes"] == 3 * 51_511_296


def test_steps_on_a_gpu_are_in_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--cache-memory", "4GiB", "--max-num-batched-tokens", "512"]
    steps = _plan(capsys, "qwen3.5-4b.json", *GPU, *flags)["step_bytes"]
    # Logits of all tokens, in bfloat16 and then in float32.
    assert 512 * 248_320 * 6 / 2 < steps["forward"] < 1 << 30
    assert steps["vision"] > 0 < steps["graphs"]
    flags += ["--no-cuda-graphs"]
    without = _plan(capsys, "qwen3.5-4b.json", *GPU, *flags)["step_bytes"]
    assert without == {**steps, "graphs": 0}
    assert _plan(capsys, "qwen3.5-4b.json", "--device", "cpu", *flags[:2])["step_bytes"] is None


def test_the_plan_never_spends_more_than_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    plan = _plan(capsys, "qwen3.5-35b-a3b.json", "--cache-memory", "3GiB")
    blocks = plan["tokens"] // plan["granularity"]
    spent = blocks * plan["block_bytes"] + plan["snapshots"] * plan["snapshot_bytes"]
    assert 0.97 * 3 * 2**30 < spent <= 3 * 2**30
    for row in plan["table"]:
        blocks = row["tokens"] // plan["granularity"]
        assert blocks * plan["block_bytes"] + row["snapshots"] * plan["snapshot_bytes"] <= 3 << 30


def test_the_text_names_every_bucket(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", str(DATA / "qwen3.5-35b-a3b.json")]) == 0
    text = capsys.readouterr().out
    for fact in ("weights", "types", "compute", "numerics", "context"):
        assert f"\n{fact}  " in text
    for bucket in ("KV blocks", "snapshots", "live state rows", "vision embeddings", "expert rows"):
        assert bucket in text


def test_embeddings_count_the_features_of_the_vision_tower(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """What stands for a token: its embedding, and a row for each layer that gets features."""
    spec = CheckpointSpec(family="qwen3_vl", vision_depth=4, deepstack_features=3, dtype="bfloat16")
    path = str(make_checkpoint(tmp_path, spec))
    assert main(["plan", path, "--json", "--device", "cuda"]) == 0
    assert json.loads(capsys.readouterr().out)["embedding_bytes"] == (1 + 3) * 64 * 2
    assert main(["plan", path, "--device", "cuda"]) == 0
    (line,) = (
        line for line in capsys.readouterr().out.splitlines() if line.startswith("vision embedd")
    )
    assert line.split()[2:] == [str((256 << 20) // 512), "512", "256.0"]


def test_an_impossible_plan_says_what_to_change(capsys: pytest.CaptureFixture[str]) -> None:
    model = str(DATA / "qwen3.5-4b.json")
    assert main(["plan", "--model", model, "--cache-memory", "1MiB"]) == 2
    assert "raise cache_memory to at least" in capsys.readouterr().err
    assert main(["plan", model, "--dtype", "float32", "--compute-dtype", "bfloat16"]) == 2
    assert "compute_dtype must be" in capsys.readouterr().err
    assert main(["plan", "--model", model, "--tensor-parallel-size", "3"]) == 2
    assert "cannot be split over 3 ranks" in capsys.readouterr().err
    assert main(["plan", "--model", str(DATA / "missing.json")]) == 1
    assert "missing.json" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_weights_that_may_change_are_counted_twice(
    capsys: pytest.CaptureFixture[str], dtype: str
) -> None:
    """A table of embeddings may not stay in its file then: it has to be as it was read."""
    flags = ("--device", "cpu", "--dtype", dtype)
    assert main(["plan", "demo", *flags, "--allow-weight-updates", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    weights = plan["weights"]
    assert plan["update_bytes"] == weights["in_memory"] > weights["projections"] + weights["table"]
    assert not weights["table_in_file"]
    assert main(["plan", "demo", *flags, "--allow-weight-updates"]) == 0
    assert "\nother weights" in capsys.readouterr().out
    config = EngineConfig(device="cpu", dtype=dtype, allow_weight_updates=True)
    engine = Engine.from_checkpoint("demo", replace(config, cache_memory="16MiB"))
    try:
        assert engine.weights.in_memory == plan["update_bytes"]
        assert any(name == "updates" for name, _ in engine.rows())
    finally:
        engine.close()
    assert main(["plan", "demo", *flags, "--json"]) == 0
    fixed = json.loads(capsys.readouterr().out)
    assert not fixed["update_bytes"]


def test_the_default_cache_leaves_room_for_other_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlm_serve.engine.steps.memory.free_host_memory", lambda: 1 << 30)
    cpu = torch.device("cpu")
    assert default_cache_memory(cpu, 2) == (1 << 28) // 2
    assert default_cache_memory(cpu, 2, updates=1 << 28) == (1 << 27) // 2
    assert default_cache_memory(cpu, 2, updates=1 << 30) == 0


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_a_start_gives_what_the_plan_says(dtype: str) -> None:
    config = EngineConfig(
        device="cpu", dtype=dtype, cache_memory="16MiB", kv_cache_dtype="bfloat16"
    )
    plan = plan_command.make("demo", config)
    engine = Engine.from_checkpoint("demo", config)
    try:
        assert plan.memory == engine.memory
        assert plan.weights == engine.weights
        assert plan.max_model_len == engine.max_model_len
        assert plan.arithmetic.types == engine.arithmetic.types
        assert plan.arithmetic.reason == engine.arithmetic.reason
        # Until the first start has built the library, one digest may be unknown.
        if UNMEASURED not in plan.arithmetic.numerics:
            assert plan.arithmetic.numerics == engine.arithmetic.numerics
        assert engine.config.compute_dtype == engine.arithmetic.types.names()["compute"]
    finally:
        engine.close()


def test_weights_of_the_4b_in_its_own_type(capsys: pytest.CaptureFixture[str]) -> None:
    """8 GB, not 16: and on two ranks little more than half of it."""
    flags = ("--device", "cpu", "--dtype", "bfloat16")
    one = _plan(capsys, "qwen3.5-4b.json", *flags)["weights"]
    assert 8e9 < one["in_memory"] < 9.3e9
    assert one["table"] == 248_320 * 2560 * 2 and one["table_in_file"]
    two = _plan(capsys, "qwen3.5-4b.json", *flags, "--tensor-parallel-size", "2")["weights"]
    assert 0.5 < two["in_memory"] / one["in_memory"] < 0.6


def test_nothing_is_compiled_for_a_plan(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native_library, "load", None)
    plan = _plan(capsys, "qwen3.5-4b.json", "--device", "cpu")
    assert "cpu-compiled" in plan["numerics"] or "no compiled kernels" in plan["compute_reason"]
    assert not list(tmp_path.iterdir())
    for arch in ("x86-64-v3", "x86-64-v4"):
        monkeypatch.setenv("VLM_SERVE_NATIVE_ARCH", arch)
        plan = _plan(capsys, "qwen3.5-4b.json", "--device", "cpu")
        assert "pairs" not in plan["numerics"]
        assert plan["types"]["compute"] == "float32"
    monkeypatch.setenv("CXX", "no-such-compiler")
    plan = _plan(capsys, "qwen3.5-4b.json", "--device", "cpu")
    assert "no-such-compiler was not found" in plan["compute_reason"]
    assert plan["types"]["weights"] == "float32"


def test_drafts_cost_what_the_plan_says(capsys: pytest.CaptureFixture[str]) -> None:
    """Unit keys, changes, decays and convolution inputs of 24 layers, for 5 tokens of 8 sequences;
    without drafts for 16 tokens of the 4 that may replay."""
    drafts = ("--speculative", "suffix", "--speculative-tokens", "4")
    plain = _plan(capsys, "qwen3.5-4b.json", "--dtype", "bfloat16")
    plan = _plan(capsys, "qwen3.5-4b.json", *drafts, "--dtype", "bfloat16")
    width = 4 if plan["types"]["compute"] == "float32" else 2
    layer = 4 * (16 * 128 + 32 * 128 + 32) + width * (2 * 16 * 128 + 32 * 128)
    assert plan["draft_update_bytes"] == 8 * 5 * 24 * layer
    assert plain["draft_update_bytes"] == 4 * 16 * 24 * layer
    model = str(DATA / "qwen3.5-4b.json")
    assert main(["plan", "--model", model, "--speculative", "suffix"]) == 0
    text = capsys.readouterr().out
    assert "draft updates" in text and "draft texts" in text


def test_the_layer_that_drafts_is_in_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another attention layer in every block, a hidden state in every row, and what prompts pay."""
    raw = json.loads((DATA / "qwen3.5-4b.json").read_text())
    raw["text_config"]["mtp_num_hidden_layers"] = 1
    path = tmp_path / "with.json"
    path.write_text(json.dumps(raw))
    flags = ("--dtype", "bfloat16", "--block-size", "64")
    plain = _plan(capsys, "qwen3.5-4b.json", *flags)
    assert main(["plan", "--model", str(path), "--json", "--speculative", "mtp", *flags]) == 0
    plan = json.loads(capsys.readouterr().out)
    hidden = raw["text_config"]["hidden_size"]
    width = 4 if plan["types"]["compute"] == "float32" else 2
    assert plan["block_bytes"] * 8 == plain["block_bytes"] * 9
    assert plan["snapshot_bytes"] == plain["snapshot_bytes"] + hidden * width
    assert plan["weights"]["projections"] > plain["weights"]["projections"]
    assert main(["plan", "--model", str(path), "--speculative", "mtp", *flags]) == 0
    price = re.search(r"prompts cost (\d+\.\d)% more", capsys.readouterr().out)
    assert price is not None and 3 < float(price[1]) < 9
    assert main(["plan", "--model", str(DATA / "qwen3.5-4b.json"), "--speculative", "mtp"]) == 2


def test_formats_of_a_quantised_checkpoint(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    spec = CheckpointSpec(num_experts=4, dtype="bfloat16", quantization="mixed")
    path = str(make_checkpoint(tmp_path, spec))
    assert main(["plan", path, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert set(plan["weights"]["formats"]) >= {"int4 in groups of 32"}
    assert sum(plan["weights"]["formats"].values()) == plan["weights"]["projections"]
    assert plan["quantization"].startswith("compressed-tensors; made for quantised activations")
    assert main(["plan", path]) == 0
    text = capsys.readouterr().out
    assert "FP8 with a scale per channel" in text and "\nquantised  " in text
