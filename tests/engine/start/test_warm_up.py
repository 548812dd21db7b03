"""A GPU's kernels are compiled before an engine serves, and none while it does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES
from make_checkpoint import make_checkpoint
from sweeps import quick

from vlm_serve.engine.numerics.arithmetic import Backend, decide
from vlm_serve.engine.start.warm_up import warm_up
from vlm_serve.models import load_model, read_spec
from vlm_serve.options.config import EngineConfig

ROOT = Path(__file__).resolve().parents[3]
CASES = [
    ("dense", "{}", []),
    ("moe", "{}", []),
    ("dense", '{"lora_modules": ["named=folder"]}', []),
    ("moe", '{"lora_modules": ["named=folder"], "lora_experts": "all"}', []),
    ("moe", '{"deterministic": true, "speculative": "off"}', []),
    ("dense", '{"kv_cache_dtype": "int8"}', []),
    ("dense", '{"speculative": "off"}', ["--graphs"]),
    ("attention alone", '{"kv_cache_dtype": "fp8"}', []),
    ("attention alone, moe", "{}", ["--graphs"]),
    ("next", "{}", []),
    ("dense", '{"quantization": "int4"}', []),
    ("minicpm", "{}", []),
]


def compilations(name: str, *options: str) -> dict[str, Any]:
    """Run tests/specialisations.py, where Triton is not interpreted."""
    folders = (ROOT, ROOT / "tests", ROOT / "examples")
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "specialisations.py"), name, *options],
        capture_output=True,
        text=True,
        check=False,
        env={
            **os.environ,
            "TRITON_INTERPRET": "0",
            "PYTHONPATH": os.pathsep.join(map(str, folders)),
        },
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("name", "options", "flags"), quick(CASES, 2, pytest.mark.sweep, several=True)
)
def test_nothing_is_compiled_while_serving(name: str, options: str, flags: list[str]) -> None:
    found = compilations(name, "--steps", "100", "--options", options, *flags)
    assert found["missing"] == []
    assert found["start"] >= found["served"] - 1 > 4


def test_without_the_warm_up_something_is() -> None:
    missing = " ".join(compilations("moe", "--steps", "60", "--cold")["missing"])
    for kernel in ("_copy_kernel", "_copy_rows_kernel", "_merge_kernel", "gate_up_kernel"):
        assert kernel in missing


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("one_thread")
def test_every_family_has_such_steps(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = make_checkpoint(tmp_path, next(iter(FAMILIES[family].values())))
    config = EngineConfig(
        dtype="float32", block_size=16, max_num_batched_tokens=80, speculative="suffix"
    )
    types = decide(config, read_spec(checkpoint).dtype, Backend(torch.device("cpu")), None).types
    model = load_model(checkpoint, torch.float32, "cpu")
    with caplog.at_level("INFO"):
        warm_up(model, types, config)
    assert "compiled the kernels of all steps" in caplog.text
