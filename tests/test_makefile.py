"""What `make` does before it starts anything, with a stand-in for Python that installs nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PYTHON = """#!/bin/sh
[ "$1" = -c ] && exit
echo "$*" >> "$LOG"
sleep 0.3
[ "$2" = venv ] || exit 0
mkdir -p "$3/bin"
cp "$0" "$3/bin/python"
printf '#!/bin/sh\\necho served >> "$LOG"\\n' > "$3/bin/vlm-serve"
chmod +x "$3/bin/vlm-serve"
"""


@pytest.mark.skipif(not (shutil.which("make") and shutil.which("flock")), reason="needs both")
def test_two_at_once_in_a_fresh_checkout_install_once(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    python, log = tmp_path / "python", tmp_path / "log"
    python.write_text(PYTHON)
    python.chmod(0o755)
    command = ["make", "serve", f"PYTHON={python}"]
    environment = {**os.environ, "LOG": str(log)}
    running = [
        subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
        for _ in range(2)
    ]
    assert [process.wait(120) for process in running] == [0, 0]
    said = log.read_text().splitlines()
    assert said[0] == "-m venv .venv"
    assert ["setuptools" in line for line in said[1:3]] == [True, False]
    assert said[3:] == ["served", "served"]
