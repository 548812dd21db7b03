"""Which places are trusted, and how ours are made."""

from __future__ import annotations

import fcntl
import grp
import os
import pwd
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace

import pytest
from other_user import NOBODY, mode, needs_root, open_folder, umask

from vlm_serve.system.private_files import (
    UnsafePathError,
    cache_path,
    check_path,
    make_private,
    open_private,
    secure_cache,
)


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o022, 0o077, 0o777])
def test_what_is_made_is_private_whatever_the_umask(tmp_path: Path, mask: int) -> None:
    tmp_path.chmod(0o755)
    with umask(mask):
        make_private(tmp_path / "one" / "two")
        make_private(tmp_path / "one" / "two")
    assert [mode(tmp_path / each) for each in ("one", "one/two")] == [0o700] * 2
    assert mode(tmp_path) == 0o755


def test_what_is_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "folder"):
        with pytest.raises(OSError, match="file"):
            make_private(path)


def test_the_way_is_followed_through_links(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "to-b").symlink_to("a/./b")
    (tmp_path / "a" / "up").symlink_to("../to-b/..")
    (tmp_path / "whole").symlink_to(tmp_path / "a" / "up" / "b")
    for name in ("to-b", "a/up", "whole", "a/b/../up/b"):
        check_path(tmp_path / name)
        (tmp_path / "a").chmod(0o777)
        with pytest.raises(UnsafePathError, match=f"others may write in {tmp_path}/a$"):
            check_path(tmp_path / name)
        (tmp_path / "a").chmod(0o755)


def test_links_that_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "round").symlink_to("round")
    with pytest.raises(OSError, match="too many links"):
        check_path(tmp_path / "round")
    (tmp_path / "broken").symlink_to("nothing")
    with pytest.raises(FileNotFoundError):
        check_path(tmp_path / "broken")


def test_a_relative_path_leads_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("below").mkdir()
    check_path(Path("below"))
    tmp_path.chmod(0o777)
    with pytest.raises(UnsafePathError):
        check_path(Path("below"))


@needs_root
def test_the_owner_of_a_link_could_change_it(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/usr")
    check_path(tmp_path / "link")
    os.lchown(tmp_path / "link", NOBODY, NOBODY)
    with pytest.raises(UnsafePathError, match="link belongs to another user"):
        check_path(tmp_path / "link")


@needs_root
def test_a_user_trusts_root_and_itself_and_nobody_else() -> None:
    with open_folder() as folder:
        own, roots, others = folder / "own", folder / "roots", folder / "others"
        for each, owner in ((own, NOBODY), (roots, 0), (others, 1)):
            each.mkdir(mode=0o755)
            os.chown(each, owner, owner)
        os.seteuid(NOBODY)
        try:
            check_path(own)
            check_path(roots)
            with pytest.raises(UnsafePathError):
                check_path(others)
        finally:
            os.seteuid(0)
        with pytest.raises(UnsafePathError):
            check_path(own)


def test_a_group_of_one_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where everybody has a group of the same name; root's is often that of several people."""
    status = tmp_path.stat()
    user = SimpleNamespace(pw_name="ann", pw_gid=status.st_gid)
    group = SimpleNamespace(gr_name="ann", gr_gid=status.st_gid, gr_mem=[])
    monkeypatch.setattr(pwd, "getpwuid", lambda number: user)
    monkeypatch.setattr(grp, "getgrgid", lambda number: group)
    tmp_path.chmod(0o775)
    with pytest.raises(UnsafePathError), monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 0)
        check_path(tmp_path)
    if status.st_uid == 0:
        # As another user would see folders of its own.
        monkeypatch.setattr(
            "vlm_serve.system.private_files._check_owner", lambda path, status: None
        )
        monkeypatch.setattr(os, "geteuid", lambda: 4242)
    check_path(tmp_path)
    group.gr_mem = ["ann"]
    check_path(tmp_path)
    group.gr_mem = ["ann", "bob"]
    with pytest.raises(UnsafePathError):
        check_path(tmp_path)
    group.gr_mem, group.gr_name = [], "staff"
    with pytest.raises(UnsafePathError):
        check_path(tmp_path)
    group.gr_name = "ann"
    tmp_path.chmod(0o777)
    with pytest.raises(UnsafePathError):
        check_path(tmp_path)


def test_what_is_opened_is_a_file_that_nobody_else_may_write(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("text")
    path.chmod(0o644)
    os.close(open_private(path))
    for permissions in (0o666, 0o664, 0o646):
        path.chmod(permissions)
        with pytest.raises(UnsafePathError, match="others may write"):
            open_private(path)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError, match="link"):
        open_private(tmp_path / "link")
    with pytest.raises(UnsafePathError, match="is not a file"):
        open_private(tmp_path)


def test_the_cache_itself_is_closed_and_never_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other things of this user's may lie in there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    root = cache_path()
    assert root == tmp_path / "vlm-serve"
    secure_cache(root)
    assert not root.exists(), "whoever keeps something there makes it"
    root.mkdir()
    (root / "kept").touch()
    root.chmod(0o777)
    secure_cache(root)
    assert mode(root) == 0o700 and (root / "kept").exists()


def test_a_folder_of_ours_is_emptied_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas start at once: what one has put there since is not another user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    root = cache_path()
    assert root is not None
    folder = root / "native"
    for _ in range(20):
        folder.mkdir(parents=True, exist_ok=True)
        for each in (root, folder):
            each.chmod(0o777)
        for number in range(100):
            (folder / f"old-{number}").mkdir()
            (folder / f"old-{number}" / "file").touch()
        meet = Barrier(4)

        def start(number: int, meet: Barrier = meet) -> list[str]:
            meet.wait()
            secure_cache(folder)
            (folder / f"new-{number}").touch(exist_ok=False)
            return [each.name for each in folder.glob("old-*")]

        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(start, range(4))) == [[]] * 4
        assert {each.name for each in folder.iterdir()} == {f"new-{number}" for number in range(4)}
        for each in folder.iterdir():
            each.unlink()


def test_nobody_keeps_a_server_from_starting_by_a_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever can read a folder can lock it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    root = cache_path()
    assert root is not None
    root.mkdir(mode=0o755)
    held = os.open(root, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    secure_cache(root)
    assert mode(root) == 0o700
    os.close(held)


NAMESPACE = """
import ctypes, os, sys
from pathlib import Path
from vlm_serve.system.private_files import UnsafePathError, check_path
from vlm_serve.system.private_files import TemporaryFolder
others = Path(sys.argv[1])
libc = ctypes.CDLL(None)
told, tells = os.pipe()
asks, asked = os.pipe()
child = os.fork()
if child:
    os.read(told, 1)
    for name, text in ("setgroups", "deny"), ("uid_map", "UID"), ("gid_map", "UID"):
        Path(f"/proc/{child}/{name}").write_text(text.replace("UID", f"{sys.argv[2]} 1000 1"))
    os.write(asked, b".")
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
os.setresgid(1000, 1000, 1000)
os.setresuid(1000, 1000, 1000)
if libc.unshare(0x10000000):
    os.write(tells, b".")
    os._exit(77)
os.write(tells, b".")
os.read(asks, 1)
assert os.geteuid() == int(sys.argv[2])
assert Path("/").stat().st_uid == 65534
folder = TemporaryFolder("vlm-serve-test-")
print(folder.path)
folder.remove()
try:
    check_path(others)
except UnsafePathError as error:
    assert "belongs to another user" in str(error)
    os._exit(0)
os._exit(1)
"""


@needs_root
@pytest.mark.parametrize("inside", [1000, 0])
def test_root_is_known_where_it_has_no_number(inside: int) -> None:
    """In a container that a user has started, root's files are shown as nobody's."""
    with open_folder() as folder:
        os.chown(folder, 1, 1)
        done = subprocess.run(
            [sys.executable, "-P", "-c", NAMESPACE, str(folder), str(inside)],
            capture_output=True,
            text=True,
            env={**os.environ, "TMPDIR": "/tmp"},
            check=False,
        )
    if done.returncode == 77:
        pytest.skip("user namespaces are not allowed here")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("/tmp/vlm-serve-test-")
