"""The machine code of every Triton kernel is within its limits on every target.

In processes of their own: this one imported Triton for its interpreter. Kernels whose source is
as it was when their rows were kept are not compiled again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sweeps import quick

from vlm_serve.kernels.triton_support import Target

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "aot.py"
TARGETS = ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942"]


def run(*arguments: str, cache: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_CACHE_DIR": str(cache)},
        check=False,
    )


@pytest.mark.parametrize("target", quick(TARGETS, ["sm_90"], pytest.mark.processors))
def test_changed_kernels_are_within_their_limits(target: str, tmp_path: Path) -> None:
    result = run("--check", "--targets", target, "--tritons", "pinned", cache=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1].endswith(", 0 faults")


@pytest.mark.processors
@pytest.mark.parametrize("target", TARGETS)
def test_changed_kernels_are_with_the_triton_of_older_torch(target: str, tmp_path: Path) -> None:
    """torch 2.11, the oldest that is supported, brings 3.6."""
    if not (ROOT / ".venv" / "triton-3.6.0" / "installed").exists():
        pytest.skip("make .venv/triton-3.6.0/installed")
    result = run("--check", "--targets", target, "--tritons", "3.6.0", cache=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "Triton 3.6.0: " in result.stdout


def test_a_kernel_is_compiled_and_read(tmp_path: Path) -> None:
    """Although nothing has changed."""
    names = "gated_delta: scan_kernel"
    result = run(
        *("--check", "--all", "--only", names, "--models", "4B", "--targets", "sm_90"),
        *("--tritons", "pinned"),
        cache=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    compiled, summary = result.stdout.splitlines()
    assert compiled.startswith("sm_90   gated_delta: scan_kernel") and "unordered=0" in compiled
    assert "1 kernels compiled, 0 as before, 0 faults" in summary


def test_a_missing_triton_is_named(tmp_path: Path) -> None:
    result = run("--check", "--targets", "sm_90", "--tritons", "2.0.0", cache=tmp_path)
    assert result.returncode == 1
    assert "make .venv/triton-2.0.0/installed" in result.stderr


def test_shared_memory_by_architecture() -> None:
    limits = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
    for arch, kib in limits.items():
        assert Target("cuda", arch).shared_memory == kib << 10
        assert Target("cuda", arch).roomy == (kib == 227)
    assert not Target("hip", "gfx942").roomy
