"""The scripts of reviews run with today's modules."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks" / "review"
PARTS = {"checkout", "operations"}
SMALL = {
    "attention_grids": "",
    "capture_streams": "",
    "launches": "--layers 4 --batches 1",
    "plan_bench": "2 1 200 200 --steps 2",
    "plant_faults": "--check",
    "roofline": "",
    "sampling_cost": "--rows 2",
    "table_fill": "--lengths 8192 --batches 2",
    "tower_launches": "--patches 256",
}
"""Arguments with which a script takes seconds."""
LARGE = {
    "sampled_rows": ("--rows 16", "16 rows, 0 differ"),
    "stream_load": ("2 8", "of Python's pace"),
    "trace_files": ("text", " files, "),
    "turn_cost": ("--turns 1 --times 1", "hit by messages"),
}
"""Arguments of scripts that serve a model, and a part of what they print."""


@pytest.mark.parametrize("name", SMALL)
def test_a_script_runs(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    importlib.import_module(name).main(SMALL[name].split())
    assert capsys.readouterr().out


@pytest.mark.processes
@pytest.mark.parametrize("name", LARGE)
def test_a_script_with_a_model_runs(name: str) -> None:
    arguments, said = LARGE[name]
    command = [sys.executable, str(FOLDER / f"{name}.py"), *arguments.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and said in done.stdout, done.stderr


def test_the_index_lists_every_script() -> None:
    scripts = {path.stem for path in FOLDER.glob("*.py")} - PARTS
    assert scripts == SMALL.keys() | LARGE.keys()
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[(\w+)\.py\]\(\1\.py\) \| .+? \| `(\w+)\.py.*?` \|", text, re.M)
    assert {name for name, _ in rows} == scripts
    assert all(name == command for name, command in rows)
