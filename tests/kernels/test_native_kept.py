"""Where the library is kept: what another user could have put there is not run, damage is noticed.

Each test builds a small library into a cache of its own. The other user's one writes a file when it
is loaded, and is sealed as ours are: a digest is no secret.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from other_user import NOBODY, mode, needs_root, open_folder, umask

from vlm_serve.kernels import native_build, native_kept, native_library, native_self_test
from vlm_serve.kernels.native_build import APART, recipe, seal
from vlm_serve.kernels.native_library import built, load

SOURCE = """#include <cstdint>
extern "C" int answer() { return 42; }
extern "C" int64_t vlm_self_test(uint64_t* digests) {
    digests[0] = 7;
    digests[1] = 0;
    return 0;
}
"""
EVIL = SOURCE.replace("42", "13") + (
    "#include <cstdio>\n"
    "__attribute__((constructor)) static void run() {\n"
    '    if (FILE* file = std::fopen("%s", "w")) std::fclose(file);\n'
    "}\n"
)

pytestmark = pytest.mark.usefixtures("compiler")


def forget() -> None:
    """As a process that has not asked for the library yet."""
    native_library._load.cache_clear()
    native_library._functions.clear()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """XDG_CACHE_HOME, which is made when something is kept there."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "answer.cpp").write_text(SOURCE)
    monkeypatch.setattr(native_self_test, "FLOAT32", f"{7:016x}")
    monkeypatch.setattr(native_build, "SOURCES", (folder,))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(APART, "")
    monkeypatch.delenv("CXX", raising=False)
    forget()
    yield tmp_path / "cache"
    forget()


@pytest.fixture
def evil(tmp_path: Path) -> Callable[[], Path]:
    """Puts a library that is not ours where ours would be kept, in folders as they were made until
    now; returns its path."""

    def plant() -> Path:
        path = recipe().path()
        path.parent.mkdir(parents=True, mode=0o755, exist_ok=True)
        source = tmp_path / "evil.cpp"
        source.write_text(EVIL % (tmp_path / "ran"))
        subprocess.run(["g++", "-shared", "-fPIC", str(source), "-o", str(path)], check=True)
        seal(path)
        return path

    return plant


@pytest.fixture
def ran(tmp_path: Path) -> Path:
    """What the other library writes."""
    return tmp_path / "ran"


def answered(ran: Path) -> bool:
    """Whether ours is loaded and the other one is not."""
    forget()
    return bool(load().answer() == 42) and not ran.exists()


def test_the_other_library_would_be_seen(cache: Path, evil: Callable[[], Path], ran: Path) -> None:
    evil()
    assert load().answer() == 13 and ran.exists(), "it is this user's own, and whole"


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o022, 0o077])
def test_what_is_kept_is_this_users_alone(cache: Path, mask: int) -> None:
    with umask(mask):
        load()
    path = recipe().path()
    assert mode(path) == 0o600
    for folder in (path.parent, path.parent.parent, cache):
        assert mode(folder) == 0o700
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_folders_of_an_older_version_are_made_private(cache: Path) -> None:
    load()
    path = recipe().path()
    before = path.stat().st_ino
    for folder in (path.parent, path.parent.parent, cache):
        folder.chmod(0o755)
    path.chmod(0o755)
    forget()
    assert built() and load().answer() == 42
    assert path.stat().st_ino == before, "nobody else could write there"
    assert mode(path.parent) == mode(path.parent.parent) == 0o700
    assert mode(cache) == 0o755, "that one is not ours to change"


def damages(data: bytes) -> dict[str, bytes]:
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 1
    return {
        "empty": b"",
        "text": b"not a library\n" * 1000,
        "cut off": data[:-1],
        "half": data[: len(data) // 2],
        "flipped": bytes(flipped),
        "longer": data + b"\0",
        "without a digest": data[: data.rindex(b"vlm-serve kernels")],
        "the digest alone": data[-51:],
        "holes": data[:4096] + bytes(len(data) - 4096),
    }


@pytest.mark.parametrize("kind", damages(bytes(5000) + b"vlm-serve kernels"))
def test_a_damaged_library_is_built_anew(
    cache: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    load()
    path = recipe().path()
    data = path.read_bytes()
    path.unlink()  # Else this process would lose what it has loaded.
    path.write_bytes(damages(data)[kind])
    forget()
    assert not built()
    assert load().answer() == 42
    assert "is rebuilt" in caplog.text
    assert built() and mode(path) == 0o600
    assert [each.name for each in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("kind", ["folder", "pipe", "link", "broken link"])
def test_what_is_no_file_is_replaced(
    cache: Path, tmp_path: Path, evil: Callable[[], Path], ran: Path, kind: str
) -> None:
    path = evil()
    elsewhere = path.rename(tmp_path / "elsewhere.so")
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(elsewhere if kind == "link" else tmp_path / "nothing")
    before = elsewhere.read_bytes()
    assert answered(ran)
    assert elsewhere.read_bytes() == before
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("permissions", [0o666, 0o664, 0o620, 0o602])
def test_a_file_that_others_may_write_is_replaced(
    cache: Path, evil: Callable[[], Path], ran: Path, permissions: int
) -> None:
    path = evil()
    path.chmod(permissions)
    assert answered(ran)
    assert built() and mode(path) == 0o600


@pytest.mark.parametrize("permissions", [0o777, 0o775, 0o757, 0o1777])
@pytest.mark.parametrize("above", [0, 1])
def test_what_lies_in_a_folder_of_ours_that_others_could_write_is_gone(
    cache: Path, evil: Callable[[], Path], ran: Path, permissions: int, above: int
) -> None:
    path = evil()
    path.parents[above].chmod(permissions)
    (path.parent / "more" / "yet").mkdir(parents=True)
    assert answered(ran)
    assert mode(path.parents[above]) == 0o700
    assert [each.name for each in path.parent.iterdir()] == [path.name], "the next start has it"


def test_a_link_is_not_followed_into_a_folder_to_empty_it(
    cache: Path, tmp_path: Path, evil: Callable[[], Path], ran: Path
) -> None:
    path = evil()
    elsewhere = path.parent.rename(tmp_path / "elsewhere")
    (elsewhere / "precious").touch()
    path.parent.symlink_to(elsewhere)
    path.parents[1].chmod(0o777)
    assert answered(ran)
    assert (elsewhere / "precious").exists() and mode(elsewhere) == 0o755


def apart() -> Path:
    return Path(os.environ[APART])


@pytest.mark.parametrize("permissions", [0o777, 0o775, 0o757])
def test_a_cache_that_others_may_write_is_not_used(
    cache: Path,
    evil: Callable[[], Path],
    ran: Path,
    caplog: pytest.LogCaptureFixture,
    permissions: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They could exchange the folders in it. The kernels are compiled all the same: torch would
    give other bits."""
    if os.geteuid():
        permissions |= 0o002  # The group of a user of that name alone may write.
    path = evil()
    cache.chmod(permissions)
    assert not built() and "are not used: others may write in" in caplog.text
    assert answered(ran)
    assert "in a temporary folder: others may write in" in caplog.text and str(cache) in caplog.text
    assert mode(cache) == permissions and path.exists()
    assert mode(apart()) == 0o700
    # The processes that this one starts find it.
    monkeypatch.setattr(native_build, "build", None)
    assert answered(ran)


def test_a_cache_in_a_sticky_folder_is_used(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.mkdir()
    cache.chmod(0o1777)
    assert load().answer() == 42
    assert built() and not caplog.text and cache in recipe().path().parents


@needs_root
@pytest.mark.parametrize("above", [0, 1, 2, 3])
@pytest.mark.parametrize("permissions", [0o755, 0o777, 0o1777])
def test_what_another_user_owns_is_not_run(
    cache: Path, evil: Callable[[], Path], ran: Path, permissions: int, above: int
) -> None:
    path = evil()
    owned = (path, *path.parents)[above]
    owned.chmod(permissions)
    os.chown(owned, NOBODY, NOBODY)
    assert answered(ran)


@needs_root
def test_a_link_that_another_user_has_made_is_not_followed(
    cache: Path, tmp_path: Path, evil: Callable[[], Path], ran: Path
) -> None:
    evil()
    elsewhere = cache.rename(tmp_path / "elsewhere")
    cache.symlink_to(elsewhere)
    forget()
    assert load().answer() == 13, "one's own link is"
    ran.unlink()
    os.lchown(cache, NOBODY, NOBODY)
    assert answered(ran)


@needs_root
def test_a_cache_that_root_has_filled_is_used_by_others(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in an image that was built as root and runs as somebody else."""
    with open_folder() as folder:
        shutil.copytree(native_build.SOURCES[0], folder / "sources")
        monkeypatch.setattr(native_build, "SOURCES", (folder / "sources",))
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        load()
        path = recipe().path()
        for each in (path, *path.parents[:3]):
            each.chmod(0o755)
        forget()
        os.seteuid(NOBODY)
        try:
            assert built() and load().answer() == 42
        finally:
            os.seteuid(0)
        assert not caplog.text


@needs_root
def test_a_cache_that_cannot_be_read_is_not_missed(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with open_folder() as folder:
        shutil.copytree(native_build.SOURCES[0], folder / "sources")
        monkeypatch.setattr(native_build, "SOURCES", (folder / "sources",))
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        (folder / "cache" / "vlm-serve" / "native").mkdir(parents=True, mode=0o700)
        os.seteuid(NOBODY)
        try:
            assert load().answer() == 42
        finally:
            os.seteuid(0)
    assert "in a temporary folder" in caplog.text


def test_a_relative_cache_is_none(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would lead into the folder that the server was started in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for relative in (".", "cache", "../cache", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", relative)
        folder = tmp_path / "home" / ".cache" / "vlm-serve" / "native"
        assert recipe().path().parent == folder, relative
    monkeypatch.setenv("HOME", "home")
    with pytest.raises(native_build.BuildError, match="home directory"):
        recipe().path()


@pytest.fixture(params=["no home", "a file", "a link to nowhere", "not ours to write"])
def unkept(request: pytest.FixtureRequest, cache: Path) -> Iterator[None]:
    """Nothing can be kept here, for one reason or another."""
    patch = request.getfixturevalue("monkeypatch")
    if request.param == "no home":  # As in a container whose user has no entry in passwd.
        patch.setenv("XDG_CACHE_HOME", "")
        patch.setenv("HOME", "nowhere")
        yield
    elif request.param == "a file":
        cache.touch()
        yield
    elif request.param == "a link to nowhere":  # The disk that it is on is not mounted.
        cache.symlink_to("nothing")
        yield
    else:  # A volume of root's, and a server that runs as somebody else.
        if os.geteuid():
            pytest.skip("becoming another user takes root")
        with open_folder() as folder:
            shutil.copytree(native_build.SOURCES[0], folder / "sources")
            patch.setattr(native_build, "SOURCES", (folder / "sources",))
            patch.setenv("XDG_CACHE_HOME", str(folder))
            os.seteuid(NOBODY)
            try:
                yield
            finally:
                os.seteuid(0)


def test_kernels_are_compiled_where_nothing_can_be_kept(
    unkept: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Torch would give other bits, at every start."""
    from vlm_serve.commands.doctor import examine

    assert examine()["kernels"].startswith("built at every start, in a temporary folder: ")
    assert not built()
    assert load().answer() == 42
    assert "in a temporary folder" in caplog.text and mode(apart()) == 0o700


@needs_root
def test_a_file_system_that_nothing_is_run_from_keeps_no_kernels(
    cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.mkdir()
    temporary = cache.parent / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with ExitStack() as stack:
        for folder in (cache, temporary):
            mount = ["mount", "-t", "tmpfs", "-o", "noexec,mode=0755", "none", str(folder)]
            if subprocess.run(mount, check=False, capture_output=True).returncode:
                pytest.skip("mounting is not allowed here")
            stack.callback(subprocess.run, ["umount", str(folder)], check=True)
        assert not built()
        assert load().answer() == 42
        assert f"{cache}: nothing is run from this file system (noexec)" in caplog.text
        assert temporary not in apart().parents


def test_the_compiler_leaves_the_current_folder_alone(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty entry of the compiler's own variables means that folder too."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cstdint").write_text("#error this is not the standard library's\n")
    monkeypatch.setenv("CPATH", ":/nowhere")
    assert load().answer() == 42


@pytest.mark.parametrize("entry", ["", ".", "tools"])
def test_a_compiler_of_the_current_folder_is_not_run(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tools").mkdir()
    for name in ("g++", "c++", "clang++"):
        for folder in (tmp_path, tmp_path / "tools"):
            (folder / name).write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
            (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{entry}:{os.environ['PATH']}")
    assert load().answer() == 42
    assert not (tmp_path / "ran").exists()
    monkeypatch.setenv("CXX", "./g++")
    assert recipe().compiler == str(tmp_path / "g++"), "unless a user names it"


def test_a_folder_in_which_nothing_was_built_is_not_left(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.mkdir()
    cache.chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (native_build.SOURCES[0] / "answer.cpp").write_text("no program")
    with pytest.raises(native_build.BuildError):
        load()
    assert not list(tmp_path.glob("vlm-serve-*")) and not os.environ[APART]


def test_the_doctor_says_that_nothing_can_be_kept(cache: Path) -> None:
    from vlm_serve.commands.doctor import examine

    cache.mkdir()
    cache.chmod(0o777)
    assert f"others may write in {cache}" in examine()["kernels"]


def test_damage_is_logged_once_and_not_for_a_first_build(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        native_kept.kept(recipe())
        native_kept.kept(recipe())
    assert not caplog.text
