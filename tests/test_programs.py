"""Programs outside of the package find the modules of this tree that they import.

Pytest and mypy have all of these folders on their paths. A program that somebody starts has its own
folder alone.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("benchmarks", "examples", "release", "tests", "train_demo")
WITH_PATH = {
    "release/check.py": "the Makefile",
    "tests/specialisations.py": "engine/start/test_warm_up.py",
}
"""Programs whose one caller names the folders of their modules in PYTHONPATH."""

# Imports each program as Python would start it, in one process. Prints the names of modules that
# are missing.
LOADS = """
import contextlib, importlib, io, os, runpy, sys
path = [each for each in sys.path if each]
scripts = tuple(sys.argv[1].split(os.pathsep))
for program in sys.argv[2:]:
    before = set(sys.modules)
    sys.path[:] = [os.path.dirname(program), *path]
    sys.argv[:] = [program]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            runpy.run_path(program, run_name="loaded")
    except ModuleNotFoundError as error:
        print(program, error.name, file=sys.stderr)
    except SystemExit:
        pass
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(scripts):
            del sys.modules[name]
"""


def programs() -> list[Path]:
    """Return the files that somebody may start, those of other environments left out."""
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return [
        path
        for path in files
        if "tries" not in path.parts
        and str(path.relative_to(ROOT)) not in WITH_PATH
        and not path.name.startswith("test_")
        and re.search(r'^if __name__ == "__main__"', path.read_text(encoding="utf-8"), re.M)
    ]


@pytest.mark.processes
def test_programs_find_the_modules_of_this_tree() -> None:
    ours = {path.stem for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    ours |= {"vlm_serve", *FOLDERS}
    found, folders = programs(), [str(ROOT / folder) for folder in FOLDERS]
    assert ROOT / "tests" / "server" / "lmms" / "start.py" in found
    done = subprocess.run(
        [sys.executable, "-c", LOADS, os.pathsep.join(folders), *map(str, found)],
        cwd="/",
        capture_output=True,
        text=True,
    )
    assert not done.returncode, done.stderr
    missing = [line for line in done.stderr.splitlines() if line.startswith(str(ROOT))]
    assert not [line for line in missing if line.split()[-1].split(".")[0] in ours]
