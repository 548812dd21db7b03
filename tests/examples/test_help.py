"""Every example explains itself, and takes no flag for the name of a file."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

TRAINING = Path(__file__).parents[2] / "train_demo"
SCRIPTS = (
    *("chat_image", "compare_runs", "live_camera", "make_batch", "make_checkpoint"),
    *("make_eval_samples", "openai_client", "steer_cache", "tune_adapters", "video_qa"),
)


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_is_printed_and_nothing_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(TRAINING)])
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(name).main()
    assert ended.value.code == 0
    assert f"usage: {name}.py [-h]" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
