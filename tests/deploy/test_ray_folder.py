"""Folders for Ray's files: one for each deployment, and none is left for long."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from other_user import mode, umask

import vlm_serve
from vlm_serve.deploy.cluster import LONGEST, PREFIX, RayFolder
from vlm_serve.errors import EngineError
from vlm_serve.system.private_files import remove_leftovers

OWNER = """
import os, sys
from vlm_serve.deploy.cluster import RayFolder

folder = RayFolder()
open(os.path.join(folder.path, "file"), "w").close()
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


@contextmanager
def owner() -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process with a folder of its own."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


def test_a_folder_goes_with_who_has_made_it(temporary: Path) -> None:
    folder = RayFolder()
    assert Path(folder.path).is_dir() and Path(folder.path).parent == temporary
    for _ in range(2):
        folder.remove()
    assert list(temporary.iterdir()) == []


def test_only_what_was_left_is_removed(temporary: Path) -> None:
    """Of two processes one is killed; the other's folder, and others' files, stay."""
    others = temporary / "vlm-serve-else"
    others.mkdir()
    (temporary / f"{PREFIX}file").touch()
    (temporary / f"{PREFIX}link").symlink_to(others)
    with owner() as (killed, left), owner() as (_, kept):
        remove_leftovers(PREFIX)
        assert (left / "file").exists() and (kept / "file").exists()
        killed.kill()
        killed.wait()
        assert (left / "file").exists()
        folder = RayFolder()
        assert not left.exists() and (kept / "file").exists()
        assert Path(folder.path).is_dir()
        folder.remove()
    assert {path.name for path in temporary.iterdir()} == {
        *("vlm-serve-else", f"{PREFIX}file", f"{PREFIX}link", kept.name)
    }


def test_nobody_else_can_enter_what_ray_makes_in_it(temporary: Path) -> None:
    with umask(0):
        folder = RayFolder()
        Path(folder.ray).mkdir()
        Path(folder.ray).chmod(0o777)  # As Ray does.
        start = Path(folder.start())
    assert mode(Path(folder.path)) == 0o700 and Path(folder.ray).parent == Path(folder.path)
    assert [each.name for each in start.iterdir()] == ["vlm_serve"]
    folder.remove()
    assert (Path(vlm_serve.__file__).parent / "__init__.py").exists(), "what a link leads to stays"


def test_a_folder_that_others_can_enter_by_now_ends_the_start(temporary: Path) -> None:
    folder = RayFolder()
    folder.check()
    Path(folder.path).chmod(0o755)
    with pytest.raises(EngineError, match="other users can enter"):
        folder.check()
    Path(folder.path).chmod(0o700)
    temporary.chmod(0o777)
    with pytest.raises(EngineError, match="others may write"):
        folder.check()
    folder.remove()
    with pytest.raises(EngineError, match="not safe"):
        folder.check()


def test_sockets_have_room_in_its_path(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever TMPDIR says: the path of a socket has a limit."""
    long = temporary / ("long" * 20)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    folder = RayFolder(LONGEST)
    assert len(folder.path) <= LONGEST and Path(folder.path).parent != long
    folder.remove()


def test_a_folder_that_others_could_exchange_is_not_made(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary.chmod(0o777)
    folder = RayFolder()
    assert Path(folder.path).parent != temporary, "they could rename it"
    folder.remove()
    temporary.chmod(0o1777)
    folder = RayFolder()
    assert Path(folder.path).parent == temporary
    folder.remove()
