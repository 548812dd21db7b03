"""The example that tunes adapters, as its readers start it: a process that has no interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.processes
def test_adapters_are_tuned_saved_and_asked(tmp_path: Path) -> None:
    """One step for each: it goes through transformers' model, which needs a GPU with fla."""
    variables = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "examples/tune_adapters.py", "--seconds", "0.001"]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=variables | {"PYTHONPATH": str(ROOT)},
        timeout=240,
        check=False,
    )
    assert not done.returncode, done.stderr
    assert done.stdout.count("not learnt yet") == done.stdout.count("  1 steps") == 3
    for name in ("shout", "brief", "french"):
        assert (tmp_path / name / "adapter_model.safetensors").is_file()
        assert done.stdout.count(f"  {name}: ") == 3
