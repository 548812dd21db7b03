"""Batch invariance: tokens and log-probabilities keep their bits, whatever runs beside them, behind
whatever hit, in steps of whatever size, through preemption and failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_spec import CheckpointSpec
from families import SPECS as FAMILIES
from invariance import WAYS, Result, compared
from make_checkpoint import make_checkpoint
from sweeps import quick
from triton_case import engines_on_triton

from vlm_serve.engine.numerics.arithmetic import Backend, decide
from vlm_serve.engine.numerics.invariance import exact_only, promise
from vlm_serve.errors import ConfigError
from vlm_serve.kernels.native_self_test import SelfTestDigests
from vlm_serve.kernels.paged_attention import triton as attention_triton
from vlm_serve.kernels.triton_support import interpreted
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Pipeline

CONFIG = EngineConfig(
    dtype="float32", block_size=16, cache_memory="64MiB", speculative="off", threads=1
)
WITHOUT = replace(CONFIG, compiled_kernels=False, deterministic=True)
SPECS = {
    "dense": CheckpointSpec(vision_depth=2),
    "moe": CheckpointSpec(num_experts=8, vision_depth=0),
    "vl": FAMILIES["vl"],
    "next": FAMILIES["next, three value heads, dense layers"],
    "attention alone": FAMILIES["qwen3"],
}
TINY = CheckpointSpec(
    num_layers=2,
    full_attention_interval=2,
    gdn_key_heads=1,
    gdn_value_heads=1,
    attention_heads=2,
    kv_heads=1,
    vision_depth=0,
)
HITS: dict[str, dict[str, Any]] = {"as it is": {}}


def checked(results: Iterator[Result]) -> Counter[str]:
    """Demand equal answers; return the events."""
    counts: Counter[str] = Counter()
    for result in results:
        assert result.equal == result.total > 0, result
        counts += result.counts
    return counts


def start(folder: Path, spec: CheckpointSpec) -> partial[Pipeline]:
    return partial(Pipeline, make_checkpoint(folder / "checkpoint", spec))


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("name", "dtype"),
    quick(zip(SPECS, cycle(["float32", "bfloat16"]), strict=False), 1, several=True),
)
def test_compiled_kernels_are_batch_invariant(tmp_path: Path, name: str, dtype: str) -> None:
    spec, config = SPECS[name], replace(CONFIG, dtype=dtype)
    seeing = bool(spec.vision_depth)
    counts = checked(compared(start(tmp_path, spec), config, 12, seed=2, pictures=seeing))
    for what in ("hits", "from a tier", "drafts", "preempted", "recomputed", "struck"):
        assert counts[what], f"no {what}: {counts}"


@pytest.mark.fuzz
@pytest.mark.usefixtures("compiler")
def test_two_hundred_requests_are_batch_invariant(tmp_path: Path) -> None:
    checked(compared(start(tmp_path, SPECS["dense"]), CONFIG, 200, pictures=True))


@pytest.mark.parametrize("name", quick(["moe", "dense", "next"], 1))
def test_torch_keeps_the_bits_that_it_promises(tmp_path: Path, name: str) -> None:
    """Those of prompts and of the first token behind them."""
    how: dict[str, Any] = {"seed": 3, "longest": 80, "answer": 6}
    counts: Counter[str] = Counter()
    for result in compared(start(tmp_path, SPECS[name]), WITHOUT, 6, ways=HITS, **how):
        assert result.first == result.total > 0, result
        counts += result.counts
    for what in ("hits", "preempted", "struck"):
        assert counts[what], f"no {what}: {counts}"


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton kernels for CPU tensors, and decode's splits of few keys."""
    monkeypatch.setattr(attention_triton, "FIXED_PART", 32)
    with engines_on_triton():
        yield


@pytest.mark.interpreter
@pytest.mark.usefixtures("triton")
@pytest.mark.skipif(not interpreted(), reason="needs Triton's interpreter")
def test_triton_is_batch_invariant(tmp_path: Path) -> None:
    """Prompts of more than one split among them."""
    how: dict[str, Any] = {"seed": 1, "longest": 40, "answer": 4}
    with np.errstate(all="ignore"):
        counts = checked(compared(start(tmp_path, TINY), WITHOUT, 3, ways=HITS, **how))
    for what in ("hits", "preempted", "struck"):
        assert counts[what], f"no {what}: {counts}"


CPU, GPU = torch.device("cpu"), torch.device("cuda")
DIGESTS = SelfTestDigests("aaaa", None, False, False)


def test_what_is_promised_where() -> None:
    def reach(device: torch.device, compiled: bool, wanted: bool) -> str:
        return promise(device, compiled=compiled, wanted=wanted).reach

    assert [reach(CPU, True, wanted) for wanted in (False, True)] == ["answers"] * 2
    assert [reach(CPU, False, wanted) for wanted in (False, True)] == ["none", "prompts"]
    assert [reach(GPU, False, wanted) for wanted in (False, True)] == ["none", "answers"]
    on = EngineConfig(deterministic=True)
    assert exact_only(on, compiled=False) and not exact_only(on, compiled=True)
    assert not exact_only(EngineConfig(), compiled=False)


def test_the_table_and_the_numerics_name_it() -> None:
    on = EngineConfig(deterministic=True)
    chosen = decide(on, torch.float32, Backend(GPU))
    assert dict(chosen.rows())["batch-invariant"].startswith("answers: fixed tiles in every step")
    assert chosen.numerics.endswith(", batch-invariant")
    plain = decide(EngineConfig(), torch.float32, Backend(GPU))
    assert dict(plain.rows())["batch-invariant"].startswith("none: ")
    assert "batch-invariant" not in plain.numerics
    compiled = decide(EngineConfig(), torch.float32, Backend(CPU, DIGESTS))
    assert dict(compiled.rows())["batch-invariant"].startswith("answers: by construction")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("speculative", "suffix"),
        ("prefix_cache_decode_state_interval", 16),
        ("prefix_cache_answer_ends", "always"),
    ],
)
def test_options_that_reuse_what_decoding_made_are_refused(option: str, value: Any) -> None:
    config = EngineConfig(deterministic=True, block_size=16, **{option: value})
    with pytest.raises(ConfigError, match=f"^{option} ") as caught:
        decide(config, torch.float32, Backend(GPU))
    assert caught.value.param == option
    decide(config, torch.float32, Backend(CPU, DIGESTS))
    decide(replace(config, deterministic=False), torch.float32, Backend(GPU))


def test_ways_differ_in_options_that_exist() -> None:
    for changes in WAYS.values():
        replace(CONFIG, **changes)
