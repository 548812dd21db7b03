"""What a developer waits for: which tests `make test` leaves out, and what collection imports."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from sweeps import MARKS

ROOT = Path(__file__).resolve().parent.parent
# What is collected without torch; the other areas compute with tensors.
LIGHT = ("batch", "cache", "grammar", "native", "routing")
LIGHT_PREPROCESS = (
    *("affinity", "data_url", "decode_slots", "decode_wire", "decoders", "end_tokens"),
    *("fetch", "fetch_local", "http_get", "keys", "limiter", "typed_text"),
)
COLLECT = """
import sys
import pytest

status = pytest.main(["--collect-only", "-qq", "-n", "0", "-p", "no:cacheprovider", *sys.argv[1:]])
print(int(status), *sorted({"torch", "transformers"} & sys.modules.keys()))
"""


def test_markers_are_registered_left_out_and_documented() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    markers = settings["tool"]["pytest"]["ini_options"]["markers"]
    assert [line.partition(":")[0] for line in markers] == list(MARKS)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    left_out = re.search(r"^SLOW := (.*)$", makefile, re.MULTILINE)
    assert left_out is not None and left_out[1].split(" or ") == list(MARKS)
    rows = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \|", rows, re.MULTILINE) == list(MARKS)


def test_nothing_that_is_left_out_is_lost() -> None:
    """CI runs all tests, as far as its time goes."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    needed = "$(VENV)/installed-dev $(OLD_TRITON)/installed"
    assert f"\ntest-all: {needed}\n\t$(PYTEST) $(ARGS)\n" in makefile
    assert f'\ntest-slow: {needed}\n\t$(PYTEST) -m "$(SLOW)" $(ARGS)\n' in makefile
    commands = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert "make test" in commands
    assert any('make test-slow ARGS="--slow-minutes ' in line for line in commands)


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
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--slow-minutes", "0", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    said = done.stdout
    assert done.returncode == 1 and "1 failed, 1 passed, 1 skipped" in said, said
    assert said.index("test_it.py::test_b: AssertionError") < said.index("= FAILURES =")
    assert "1 slow tests did not run" in said


def collected(*folders: str) -> list[str]:
    """Return the exit status and which of torch and transformers were imported."""
    paths = [str(ROOT / "tests" / folder) for folder in folders]
    done = subprocess.run(
        [sys.executable, "-c", COLLECT, *paths], cwd=ROOT, capture_output=True, text=True
    )
    return done.stdout.splitlines()[-1].split()


def test_some_areas_are_collected_without_torch() -> None:
    files = [f"preprocess/test_{name}.py" for name in LIGHT_PREPROCESS]
    assert collected(*LIGHT, *files) == ["0"]


def test_no_test_imports_transformers_when_it_is_collected() -> None:
    """It takes seconds; few tests compare with it."""
    pattern = re.compile(r"^(?:import|from) transformers\b", re.MULTILINE)
    files = (ROOT / "tests").rglob("*.py")
    assert [path for path in files if pattern.search(path.read_text(encoding="utf-8"))] == []
