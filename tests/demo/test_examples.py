"""The example scripts answer correctly, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from sweeps import quick

EXAMPLES = Path(__file__).parents[2] / "examples"
EXPECTED = {
    "chat_image.py": (
        "A red star at the top left, a green triangle at the top right, "
        "a blue circle at the bottom right.",
        "Three.",
        "The star is red.",
        "A blue circle.",
        "A circle.",
        "The triangle is at the top right.",
        "A yellow square: no.",
        "The star is bigger, so yes.",
        "The heart is not there.",
        "Sorry, I cannot tell.",
    ),
    "video_qa.py": (
        "A red circle turns blue at second 4.",
        "Red.",
        "Blue.",
        "At second 4.",
        "In the second half.",
        "Sorry, I cannot tell.",
    ),
    "multi_turn.py": (
        "A yellow heart.",
        "The star is in the first.",
        "A star.",
        "Yellow.",
        "A red star in the second: no.",
    ),
}


@pytest.mark.parametrize("name", quick(EXPECTED, 1, pytest.mark.processes))
def test_example_answers_correctly(name: str) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)], capture_output=True, text=True, check=True
    )
    lines = [line.strip() for line in done.stdout.splitlines()]
    answers = lines[1::3]
    assert tuple(answers) == EXPECTED[name]
