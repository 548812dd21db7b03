"""The trace of `benchmarks/routing.py` through simulated replicas: nothing in it is timed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from sweeps import quick

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "routing.py"
COLUMNS = 26


@pytest.mark.parametrize("words", quick([[], ["--hot"]], 1, pytest.mark.fuzz))
def test_four_replicas_reuse_nearly_what_a_large_one_does_and_work_evenly(words: list[str]) -> None:
    """On a seed that the weights were tuned on: it is here to notice what breaks them."""
    command = [sys.executable, str(SCRIPT), "--seed", "103", "--only", "ou", *words]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = {line[:COLUMNS].strip(): line[COLUMNS:].split() for line in said.splitlines()}
    ours, others = rows["ours"], rows["round robin"]
    of_one, worst, last_first_token = (float(ours[place].rstrip("%")) for place in (1, 2, 5))
    assert of_one >= 90.0
    assert worst <= (1.5 if words else 1.25)
    assert last_first_token <= float(others[5])
