"""Looking at processes that begin, end and open files meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

from process_tree import children_of, opened_by, processes_below, runs


def test_files_that_are_closed_meanwhile_are_absent(tmp_path: Path) -> None:
    """The descriptor of the listing itself is one of them."""
    kept = tmp_path / "kept"
    ended = threading.Event()

    def open_and_close() -> None:
        while not ended.is_set():
            for each in [os.open(tmp_path, os.O_RDONLY) for _ in range(64)]:
                os.close(each)

    thread = threading.Thread(target=open_and_close)
    with kept.open("w"):
        thread.start()
        try:
            assert all(str(kept) in opened_by(os.getpid()) for _ in range(200))
        finally:
            ended.set()
            thread.join()
    assert opened_by(1 << 30) == set()


def test_processes_that_end_meanwhile_are_absent() -> None:
    lines = "import subprocess\nprint(flush=True)\nwhile True:\n    subprocess.run(['true'])\n"
    command = [sys.executable, "-c", lines]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        try:
            assert parent.stdout is not None and parent.stdout.readline()
            for _ in range(200):
                below = processes_below(os.getpid())
                assert "subprocess.run" in below[parent.pid]
                assert parent.pid in children_of(os.getpid())
        finally:
            parent.kill()
    assert not runs(parent.pid)
    assert parent.pid not in children_of(os.getpid())
