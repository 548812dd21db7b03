"""The example that learns from rollouts, in processes that have no interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENDS = """
import sys
from rollouts import train

def ended(*options):
    sys.argv = ["train.py", *options]
    return train.main()

codes = [ended("--steps", "1", "--rate", "0")]
train.RISE = -1.0
codes.append(ended("--steps", "0"))
train.ALLOWED = 0.0
codes.append(ended("--steps", "0"))
print("codes", codes)
"""


def started(*command: str) -> subprocess.CompletedProcess[str]:
    variables = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=variables | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'examples'}"},
        timeout=600,
        check=False,
    )


@pytest.mark.processes
def test_the_demo_model_learns() -> None:
    done = started("examples/rollouts/train.py", "--steps", "5")
    assert not done.returncode, done.stdout + done.stderr
    means = [float(mean) for mean in re.findall(r"mean reward (\d\.\d\d)", done.stdout)]
    assert len(means) == 6 and means[-1] > means[0] + 0.2


@pytest.mark.processes
def test_no_rise_and_other_log_probabilities_are_failures() -> None:
    done = started("-c", ENDS)
    assert "codes [1, 0, 1]" in done.stdout, done.stdout + done.stderr
