"""Workers that die: each death costs one test, and the run comes to an honest end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sweeps import quick

TESTS = Path(__file__).resolve().parent
CONFTEST = "from surviving_workers import pytest_xdist_make_scheduler\n"
FATAL = "import os\ndef test_{name}(): os.abort()\n"
SOUND = "def test_{name}(): pass\n"
WRONG = "def test_{name}(): assert False\n"


def run(folder: Path, **files: str) -> tuple[int, str]:
    """Run a folder's tests on two workers, and return the exit status and the output.

    Args:
        files: a letter a test by file: d dies, f fails, p passes.
    """
    texts = {"d": FATAL, "f": WRONG, "p": SOUND}
    (folder / "conftest.py").write_text(CONFTEST)
    for name, letters in files.items():
        tests = (texts[letter].format(name=index) for index, letter in enumerate(letters))
        (folder / f"test_{name}.py").write_text("".join(tests))
    return run_folder(folder)


def run_folder(folder: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(folder)]
        + ["-p", "no:cacheprovider", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
        + ["--max-worker-restart", "100", str(folder)],
        env={**os.environ, "PYTHONPATH": str(TESTS), "PYTHONFAULTHANDLER": ""},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    "files",
    quick(
        [
            {"a": "ppdddp", "b": "pd", "c": "p"},
            {"a": "ddddddddddp", "b": "ppp", "c": "p", "d": "p"},
            {"a": "dp", "b": "pd", "c": "d", "d": "pfdp"},
            {"a": "p", "b": "p", "c": "ppd"},
            {"a": "d", "b": "d", "c": "dpd"},
        ],
        1,
    ),
    ids=lambda files: "-".join(files.values()),
)
def test_each_death_costs_one_test(tmp_path: Path, files: dict[str, str]) -> None:
    status, output = run(tmp_path, **files)
    letters = "".join(files.values())
    died = re.findall(r"^FAILED (\S+)::test_(\d+)\b", output, re.MULTILINE)
    failed = {
        (f"test_{name}.py", str(index))
        for name, text in files.items()
        for index, letter in enumerate(text)
        if letter != "p"
    }
    assert {(Path(path).name, index) for path, index in died} == failed, output
    summary = {word: int(count) for count, word in re.findall(r"(\d+) (failed|passed)", output)}
    assert summary.get("passed", 0) == letters.count("p"), output
    assert (status, summary["failed"]) == (1, len(failed)), output


def test_workers_that_die_while_collecting_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_a.py").write_text("import os\nos.abort()\n")
    status, output = run_folder(tmp_path)
    assert status == 3, output
    assert "workers die while they collect the tests" in output
