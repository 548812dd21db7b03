"""What a developer waits for: which tests `make test` leaves out, and what collection imports."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import timekeeper
from costs import MOST_MINUTES, PARTS, Costs, Part, Row, kept
from selection import ALWAYS
from sweeps import MARKS

ROOT = Path(__file__).resolve().parent.parent
# What is collected without torch; the other areas compute with tensors.
LIGHT = ("cache", "grammar", "native", "routing")
LIGHT_PREPROCESS = {
    "identity": ("affinity", "keys"),
    "media": ("decode_slots", "decode_wire", "decoders", "fetch", "fetch_local", "http_get"),
    "reading": ("data_url",),
    "text": ("end_tokens", "typed_text"),
}
SLOW = " or ".join(MARKS)
QUICK = f"not ({SLOW})"
COLLECT = """
import sys
import pytest

status = pytest.main(["--collect-only", "-qq", "-n", "0", "-p", "no:cacheprovider", *sys.argv[1:]])
print(int(status), *sorted({"torch", "transformers"} & sys.modules.keys()))
"""


def test_markers_are_registered_left_out_and_documented() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    markers = settings["tool"]["pytest"]["ini_options"]["markers"]
    assert [line.partition(":")[0] for line in markers] == [ALWAYS, *MARKS]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    left_out = re.search(r"^SLOW := (.*)$", makefile, re.MULTILINE)
    assert left_out is not None and left_out[1].split(" or ") == list(MARKS)
    rows = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \|", rows, re.MULTILINE) == [ALWAYS, *MARKS]


def test_nothing_that_is_left_out_is_lost() -> None:
    """CI runs all tests within three landings, as far as its time goes."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    needed = "$(VENV)/installed-dev $(OLD_TRITON)/installed"
    assert f"\ntest-all: {needed}\n\t$(PYTEST) $(ARGS)\n" in makefile
    assert f'\ntest-slow: {needed}\n\t$(PYTEST) -m "$(SLOW)" $(ARGS)\n' in makefile
    commands = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert "make test" in commands and "part=$(.ci/part)" in commands
    assert any(line.startswith('make test-slow ARGS="$part --slow-minutes ') for line in commands)


def test_a_failure_is_named_at_once_and_late_slow_tests_are_counted(tmp_path: Path) -> None:
    mark = MARKS[0]
    (tmp_path / "conftest.py").write_text(
        (ROOT / "tests" / "conftest.py").read_text(encoding="utf-8"), encoding="utf-8"
    )
    (tmp_path / "test_it.py").write_text(
        f"import pytest\n\n@pytest.mark.{mark}\ndef test_a(): assert 0\n\n"
        "def test_b(): assert not 'this'\n\ndef test_c(): pass\n",
        encoding="utf-8",
    )
    options = ["-n", "0", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--slow-minutes", "0", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    said = done.stdout
    assert done.returncode == 1 and "1 failed, 1 passed, 1 skipped" in said, said
    assert said.index("forecast: 0 seconds if") < said.index("collected 3 items")
    assert said.index("test_it.py::test_b: AssertionError") < said.index("= FAILURES =")
    assert "1 slow tests did not run" in said and "left out: 1 of " in said


@pytest.fixture
def landings(tmp_path: Path) -> Callable[..., str]:
    """Return a function that commits in a repository with CI's script, and runs the script there.

    Its argument is the number in `.ci/landing`; None leaves it.
    """
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "part", tmp_path / ".ci")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.test", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "-q"], check=True)

    def land(number: int | None = None) -> str:
        if number is not None:
            (tmp_path / ".ci" / "landing").write_text(f"{number}\n")
        subprocess.run([*git, "add", "--all"], check=True)
        subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "One"], check=True)
        done = subprocess.run([tmp_path / ".ci" / "part"], capture_output=True, text=True)
        assert done.returncode == 0 and f" {done.stdout.strip()};" in done.stderr
        return done.stdout.strip() + (" (warned)" if "make landing" in done.stderr else "")

    return land


def test_each_landing_has_another_part_of_the_slow_tests(landings: Callable[..., str]) -> None:
    assert [landings(number) for number in range(6, 9)] == [
        "--part 1/3",
        "--part 2/3",
        "--part 3/3",
    ]
    assert landings(9) == "--part 1/3 --backwards"


def test_a_landing_without_its_number_has_the_next_part_and_is_told(
    landings: Callable[..., str],
) -> None:
    assert landings(6) == "--part 1/3"
    assert [landings(), landings()] == ["--part 2/3 (warned)", "--part 3/3 (warned)"]
    assert landings(9) == "--part 1/3 --backwards"


def test_every_slow_file_is_in_one_part_and_the_parts_cost_the_same() -> None:
    files = [f"tests/test_{number}.py" for number in range(40)]
    costs = Costs(rows={file: Row(slow=float(n)) for n, file in enumerate(files[:30])})
    parts = [Part(number, PARTS).of_files(files, costs) for number in range(1, PARTS + 1)]
    assert sorted(file for part in parts for file in part) == sorted(files)
    sums = [sum(costs.row(file).left_out for file in part) for part in parts]
    assert max(sums) - min(sums) < 30
    part = Part(2, PARTS)
    assert costs.in_part(part).rows.keys() == parts[1] & costs.rows.keys()


@pytest.mark.parametrize("text", ["0/3", "4/3", "2", "a/b", ""])
def test_a_part_that_there_is_not_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Part.read(text)


def test_costs_are_read_as_they_were_written(tmp_path: Path) -> None:
    rows = {"tests/test_a.py": Row(1.5, 2.0, {"test_it": (0.7, 3)}), "tests/test_b.py": Row()}
    costs = Costs(0.1, 20.0, 1.1, rows)
    costs.write(tmp_path / "costs.json")
    assert Costs.read(tmp_path / "costs.json") == costs
    assert Costs.read(tmp_path / "none.json") == Costs()


@pytest.mark.parametrize(("cost_s", "stay"), [(0.001, 500), (0.2, 2), (0.7, 1), (0.8, 0)])
def test_a_table_keeps_the_cases_that_its_share_pays_for(cost_s: float, stay: int) -> None:
    assert kept(cost_s) == stay
    row = Row(1.0, 4.0, {"test_it": (cost_s, 3)})
    assert row.quick() == pytest.approx(1.0 + cost_s * min(3, stay))
    assert row.left_out == pytest.approx(4.0 + cost_s * (3 - min(3, stay)))


def test_make_test_costs_what_two_cores_do_within_eight_minutes() -> None:
    """By what costs.json says, which is not measured here."""
    assert Costs.read().quick_minutes() <= MOST_MINUTES


@pytest.mark.processes
def test_cases_beyond_the_share_wait_for_the_slow_tests(tmp_path: Path) -> None:
    """In a run of a folder of its own, whose costs are then written."""
    tests = tmp_path / "tests"
    tests.mkdir()
    for name in ("conftest", "costs", "selection", "sweeps", "surviving_workers", "timekeeper"):
        shutil.copy(ROOT / "tests" / f"{name}.py", tests)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tests / "test_it.py").write_text(
        "import pytest\n\n@pytest.mark.parametrize('a', range(4))\ndef test_a(a): pass\n\n"
        "def test_b(): pass\n\n@pytest.mark.always\ndef test_c(): pass\n\n"
        "@pytest.mark.fuzz\ndef test_d(): pass\n"
    )
    dear = {"test_a": (0.2, 4), "test_b": (2.1, 1), "test_c": (9.0, 1)}
    Costs(1.0, rows={"tests/test_it.py": Row(tables=dear)}).write(tests / "costs.json")

    def run(*options: str) -> str:
        words = [*(sys.executable, "-m", "pytest", "-v", "-n", "0", "-p", "no:cacheprovider")]
        words += options
        return subprocess.run(words, cwd=tmp_path, capture_output=True, text=True).stdout

    assert re.findall(r"::test_(\S+) PASSED", run("-m", QUICK)) == ["a[0]", "a[1]", "c"]
    assert re.findall(r"::test_(\S+) PASSED", run("-m", SLOW)) == ["a[2]", "a[3]", "b", "d"]
    assert run("-m", QUICK, "--write-costs").count(" PASSED") == 6
    written = Costs.read(tests / "costs.json")
    assert written.collection_s > 0 and not written.row("tests/test_it.py").tables


@pytest.mark.parametrize(
    ("marks", "args", "part", "seconds"),
    [
        # Seconds of the tests and of three workers that collect, halved by two cores, doubled by
        # their speed and doubled by waiting.
        (QUICK, ["tests"], "", 78),
        (QUICK, ["."], "", 78),
        (SLOW, ["tests"], "", 123),
        (SLOW, ["tests"], "2/3", 63),
        ("", ["tests/a/test_it.py::test_a", "tests/b"], "", 132),
        ("ray", ["tests"], "", None),
    ],
)
def test_a_run_says_how_long_it_will_take(
    monkeypatch: pytest.MonkeyPatch, marks: str, args: list[str], part: str, seconds: int | None
) -> None:
    monkeypatch.setattr(timekeeper, "yardstick", lambda: 0.2)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    a, b, c = (f"tests/{name}/test_it.py" for name in "abc")
    rows = {a: Row(10.0), b: Row(48.0, 54.0, {"test_b": (1.0, 8)}), c: Row(slow=45.0)}
    costs = Costs(0.1, 6.0, 2.0, rows)
    option = SimpleNamespace(markexpr=marks, keyword="", part=part, tx=["popen"] * 3)
    run = SimpleNamespace(option=option, args=args, invocation_params=SimpleNamespace(dir=ROOT))
    said = timekeeper.forecast(cast(pytest.Config, run), costs, [a, b, c])
    if seconds is None:
        assert said is None
    else:
        assert said and said.startswith(f"forecast: {timekeeper.in_words(2 * seconds)} if ")


def collected(*folders: str) -> list[str]:
    """Return the exit status and which of torch and transformers were imported."""
    paths = [str(ROOT / "tests" / folder) for folder in folders]
    done = subprocess.run(
        [sys.executable, "-c", COLLECT, *paths], cwd=ROOT, capture_output=True, text=True
    )
    return done.stdout.splitlines()[-1].split()


def test_some_areas_are_collected_without_torch() -> None:
    files = [
        f"preprocess/{room}/test_{name}.py"
        for room, names in LIGHT_PREPROCESS.items()
        for name in names
    ]
    files.append("system/test_limiter.py")
    files += [f"batch/{path.name}" for path in (ROOT / "tests" / "batch").glob("test_*.py")]
    assert collected(*LIGHT, *files) == ["0"]


def test_no_test_imports_transformers_when_it_is_collected() -> None:
    """It takes seconds; few tests compare with it."""
    pattern = re.compile(r"^(?:import|from) transformers\b", re.MULTILINE)
    files = (ROOT / "tests").rglob("*.py")
    assert [path for path in files if pattern.search(path.read_text(encoding="utf-8"))] == []
