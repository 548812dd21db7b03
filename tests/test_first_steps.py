"""The first steps of the README, run as they stand: shell lines, Python, and the command line."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from serving import running

from vlm_serve.cli import main
from vlm_serve.engine.engine import Engine
from vlm_serve.options.config import EngineConfig

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def _checkout(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    """The commands name files of the checkout."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("VLM_SERVE_CACHE_MEMORY", "64MiB")


def block(heading: str, language: str = "") -> str:
    """The first fenced block below a heading."""
    behind = README.split(f"\n## {heading}\n")[1]
    return str(re.findall(rf"^```{language}\n(.*?)^```", behind, re.M | re.S)[0])


def lines(command: str) -> list[list[str]]:
    """The words behind `vlm-serve` of one command's lines."""
    found = [
        shlex.split(line, comments=True) for line in block("From the command line").splitlines()
    ]
    return [words[1:] for words in found if words[:2] == ["vlm-serve", command]]


@pytest.mark.skipif(not shutil.which("curl"), reason="needs curl")
def test_the_request_about_a_picture() -> None:
    script = block("Ask about a picture")
    with running(Engine.from_checkpoint("demo", EngineConfig(cache_memory="64MiB"))) as server:
        script = script.replace("http://127.0.0.1:8000", server.url)
        answers = []
        for question in ("Where is the triangle?", "What color is the star?"):
            asked = script.replace("Where is the triangle?", question)
            done = subprocess.run(["sh", "-c", asked], capture_output=True, text=True, check=True)
            answers.append(json.loads(done.stdout))
    first, second = answers
    assert "top right" in first["choices"][0]["message"]["content"]
    report = second["cache_report"]
    assert (report["media_encoded"], report["reason"]) == (0, "unseen"), "as the README says"


def test_the_program_of_python(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(block("From Python", "python"), "README.md", "exec"), {})
    first, second = capsys.readouterr().out.splitlines()
    assert "top right" in first and "red" in second
    assert int(second.split()[-2]) > 0 and second.endswith("unseen")


def test_a_question_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    _, words = lines("chat")
    assert main(words) == 0
    assert "top right" in capsys.readouterr().out


def test_what_lists_and_what_answers_many(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (words,) = lines("models")
    assert main(words) == 0 and "qwen3_5" in capsys.readouterr().out
    (words,) = lines("video-qa")
    place = words.index("-o") + 1
    words[place] = str(tmp_path / words[place])
    assert main(words) == 0
    answers = (tmp_path / "answers.csv").read_text()
    assert "turns blue" in answers and answers.count("change.mp4") == 2


def test_the_command_is_where_the_readme_says() -> None:
    assert "`.venv/bin/vlm-serve`" in README and "`make shell`" in README
    done = subprocess.run(
        [sys.executable, "-m", "vlm_serve.cli", "--version"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("vlm-serve ")
