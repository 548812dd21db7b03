"""Where Triton keeps what it compiles, which it loads at the next start, and for which GPU it
compiles."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from other_user import NOBODY, mode, needs_root, open_folder, umask

from vlm_serve.kernels import triton_support
from vlm_serve.kernels.triton_support import current_target, keep_private


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    monkeypatch.delenv("TRITON_HOME", raising=False)
    return tmp_path / "cache"


def told() -> Path:
    """Where Triton itself would keep something now."""
    knobs = pytest.importorskip("triton.knobs")
    return Path(str(knobs.cache.dir))


@pytest.mark.parametrize("mask", [0o000, 0o022])
def test_it_is_this_users_alone(cache: Path, mask: int) -> None:
    with umask(mask):
        keep_private()
    assert told() == cache / "vlm-serve" / "triton"
    assert mode(told()) == mode(cache / "vlm-serve") == 0o700
    keep_private()
    assert told() == cache / "vlm-serve" / "triton"


def test_what_others_could_have_put_there_is_gone(cache: Path) -> None:
    folder = cache / "vlm-serve" / "triton"
    folder.mkdir(parents=True)
    (folder / "launcher.so").touch()
    folder.chmod(0o777)
    keep_private()
    assert told() == folder and mode(folder) == 0o700 and not list(folder.iterdir())


def test_a_cache_that_others_may_write_is_not_used(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.mkdir()
    cache.chmod(0o777)
    keep_private()
    assert cache not in told().parents and mode(told()) == 0o700
    assert "into a temporary folder: others may write in" in caplog.text


@needs_root
def test_a_cache_that_cannot_be_written_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A kernel that is missing there would end a request."""
    with open_folder() as folder:
        (folder / "vlm-serve" / "triton").mkdir(parents=True)
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
        os.seteuid(NOBODY)
        try:
            keep_private()
        finally:
            os.seteuid(0)
        assert folder not in told().parents
    assert "vlm-serve/triton cannot be written" in caplog.text


@pytest.mark.parametrize("name", ["TRITON_CACHE_DIR", "TRITON_HOME"])
def test_what_a_user_names_is_taken(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, str(tmp_path / "mine"))
    before = dict(os.environ)
    keep_private()
    assert dict(os.environ) == before and not cache.exists()


def test_each_gpu_of_a_process_has_a_target_and_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from vlm_serve.kernels.paged_attention.tiles_triton import prefill_tile

    current, cards = [0], ((9, 0), (12, 0))
    monkeypatch.setattr(triton_support, "_interprets", lambda: False)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: cards[index])
    triton_support._device_target.cache_clear()
    found = []
    try:
        for current[0] in (0, 1, 0):
            found.append((current_target(), prefill_tile(torch.bfloat16, 256, False)))
    finally:
        triton_support._device_target.cache_clear()
    assert [target.arch for target, _ in found] == [90, 120, 90]
    assert found[0] == found[2] and found[0][1] != found[1][1]
