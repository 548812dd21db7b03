"""The example that compares two runs finds no difference."""

from __future__ import annotations

import sys

import compare_runs
import pytest


@pytest.mark.usefixtures("compiler", "one_thread")
def test_two_runs_are_equal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["compare_runs.py"])
    monkeypatch.setattr(compare_runs, "QUESTIONS", compare_runs.QUESTIONS[:4])
    assert compare_runs.main() == 0
    said = capsys.readouterr().out
    assert "batch-invariant: answers: by construction" in said
    assert "equal tokens: 4, equal log-probabilities: 4, largest difference: 0" in said
