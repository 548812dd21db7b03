"""A subset of the Triton kernels compiles ahead of time for every target, without spills.

In a process of its own: this one imported Triton for its interpreter.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_subset_compiles(target: str, tmp_path: Path) -> None:
    only = ",".join(KERNELS)
    command = ["--no-write", "--only", only, "--models", "4B", "--targets", target]
    result = subprocess.run(
        [sys.executable, str(SCRIPT), *command],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    compiled = [line for line in result.stdout.splitlines() if line.startswith(target)]
    for kernel in KERNELS:
        assert any(kernel in line for line in compiled), kernel
    hot = [line for line in compiled if "fp32" not in line]
    assert all(re.search(r"spilled=0,", line) for line in hot), hot
