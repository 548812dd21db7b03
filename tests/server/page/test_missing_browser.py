"""The page's tests are skipped by name where there is no Chromium."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from browser import NEEDED

FILE = Path(__file__).with_name("test_chat.py")


def test_the_quick_test_of_the_page_is_skipped_without_a_browser(tmp_path: Path) -> None:
    chosen = f"{FILE}::test_the_second_question_about_a_picture_encodes_nothing"
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-rs", "-p", "no:cacheprovider", chosen],
        env=os.environ | {"PATH": str(tmp_path), "COLUMNS": "200"},
        cwd=FILE.parents[3],
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout
    assert NEEDED in ended.stdout and "1 skipped" in ended.stdout
