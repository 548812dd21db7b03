"""Files of a folder that others may write to: there is no way out of what is allowed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from vlm_serve.errors import CheckpointError
from vlm_serve.system.opened_files import files_below

NAMES = ("one", "two")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path.resolve() / "allowed" / "deep" / "folder"
    folder.mkdir(parents=True)
    (folder / "one").write_text("1")
    (folder / "three").write_text("not asked for")
    (tmp_path / "allowed" / "shared").mkdir()
    (tmp_path / "allowed" / "shared" / "blob").write_text("2")
    (tmp_path / "secret").write_text("secret")
    return tmp_path.resolve() / "allowed"


def test_files_are_read_as_they_were_opened(root: Path) -> None:
    """Whatever becomes of them meanwhile; links below the root may be followed."""
    folder = root / "deep" / "folder"
    (folder / "two").symlink_to("../../shared/blob")
    before = len(os.listdir("/dev/fd"))
    with files_below(root, folder, (*NAMES, "missing")) as files:
        assert files.name == "folder" and sorted(os.listdir(files)) == ["one", "two"]
        (root / "shared" / "blob").unlink()
        (folder / "one").unlink()
        (folder / "one").symlink_to(root.parent / "secret")
        assert [(files / name).read_text() for name in NAMES] == ["1", "2"]
        assert (files / "one").is_file()
    assert not files.exists() and len(os.listdir("/dev/fd")) == before


def linked(*targets: str) -> Callable[[Path], None]:
    """Put a link in the place of a file, and others that it leads over into the same folder."""

    def put(file: Path) -> None:
        file.symlink_to(targets[0])
        for number, target in enumerate(targets[1:], 1):
            (file.parent / f"middle{number}").symlink_to(target)

    return put


OUT: dict[str, Callable[[Path], None]] = {
    "an absolute link": linked("/etc/passwd"),
    "a relative link": linked("../../../secret"),
    "a link to a link": linked("middle1", "../../../secret"),
    "a folder that is a link": linked("middle1/secret", "../../.."),
    "a device": linked("/dev/zero"),
    "a link to nothing outside": linked("/nowhere/at/all"),
    "a circle": linked("two"),
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
}


@pytest.mark.parametrize("kind", OUT)
def test_what_leads_out_or_is_no_file_is_refused(root: Path, kind: str) -> None:
    folder = root / "deep" / "folder"
    OUT[kind](folder / "two")
    before = len(os.listdir("/dev/fd"))
    with (
        pytest.raises(CheckpointError, match=r"^two (leads out|is no file|cannot be opened)"),
        files_below(root, folder, NAMES),
    ):
        pass
    assert len(os.listdir("/dev/fd")) == before


def test_a_link_that_is_put_there_meanwhile_is_not_followed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between looking where a file is and opening it."""
    folder, resolve = root / "deep" / "folder", Path.resolve

    def swapped(place: Path, what: str) -> Callable[[Path], Path]:
        def resolved(path: Path) -> Path:
            real = resolve(path)
            if place.is_dir():
                place.rename(place.with_name("moved"))
            else:
                place.unlink()
            place.symlink_to(what)
            return real

        return resolved

    (root.parent / "elsewhere").mkdir()
    (root.parent / "elsewhere" / "one").write_text("secret")
    for place, target in (folder / "one", "../../../secret"), (folder, root.parent / "elsewhere"):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "resolve", swapped(place, str(target)))
            with (
                contextlib.suppress(CheckpointError),
                files_below(root, folder, ["one"]) as files,
            ):
                assert not os.listdir(files)
        assert place.is_symlink()
        place.unlink()
        if place.name == "one":
            place.write_text("1")
