"""A subset of the Triton kernels compiles ahead of time for every target, and hardly spills.

In a process of its own: this one imported Triton for its interpreter.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from sweeps import quick

from vlm_serve.kernels.triton_support import Target

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "aot.py"
KERNELS = (
    "copy_kernel",
    "write_kernel",
    "step_kernel",
    "verify_kernel",
    "gated_delta: scan",
    "on bfloat16: decode",
    "linear int4: linear_kernel",
)
ONE_REGISTER = 8
"""Bytes that a thread stores and loads: Triton 3.7.1 spills one in the scan for sm_100."""


def compiled(target: str, kernels: Sequence[str], cache: Path) -> list[str]:
    """Compile kernels for the 4B's shapes and return what each takes, a line a variant."""
    only = ["--only", ",".join(kernels), "--models", "4B", "--targets", target]
    result = subprocess.run(
        [sys.executable, str(SCRIPT), "--no-write", *only],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_CACHE_DIR": str(cache)},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if line.startswith(target)]
    for kernel in kernels:
        assert any(kernel in line for line in lines), kernel
    return lines


@pytest.mark.parametrize(
    "target", quick(["sm_80", "sm_90", "sm_100", "gfx942"], ["sm_90"], pytest.mark.processors)
)
def test_subset_compiles(target: str, tmp_path: Path) -> None:
    hot = [line for line in compiled(target, KERNELS, tmp_path) if "fp32" not in line]
    spilled = {line: int(re.findall(r"spilled=(\d+),", line)[0]) for line in hot}
    assert max(spilled.values()) <= ONE_REGISTER, spilled


@pytest.mark.processors
@pytest.mark.parametrize("target", ["sm_89", "sm_120"])
def test_largest_tiles_fit_consumer_cards(target: str, tmp_path: Path) -> None:
    """The script fails where a program takes more shared memory than its target has."""
    compiled(target, ("on bfloat16: prefill", "on float8_e4m3fn: prefill"), tmp_path)


def test_shared_memory_by_architecture() -> None:
    limits = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
    for arch, kib in limits.items():
        assert Target("cuda", arch).shared_memory == kib << 10
        assert Target("cuda", arch).roomy == (kib == 227)
    assert not Target("hip", "gfx942").roomy
