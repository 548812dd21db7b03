"""The parts of the check that installs: what it installs from, and when it is not content."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest
from dockerfile import ROOT
from install import CPU_BYTES, check_size, copied, index_of, stranger

from vlm_serve.torch_index import find_problem, pinned_version


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """One with a torch of no size."""
    packages = tmp_path / f"lib/python3.{sys.version_info[1]}/site-packages"
    (packages / "torch-2.13.0+cpu.dist-info").mkdir(parents=True)
    return tmp_path


def test_what_git_tracks_is_copied_with_its_links(tmp_path: Path) -> None:
    checkout = copied(tmp_path / "checkout")
    assert (checkout / "Makefile").read_bytes() == (ROOT / "Makefile").read_bytes()
    assert (checkout / "vlm_serve" / "kernels").is_symlink()
    assert not (checkout / ".venv").exists()


def test_the_stand_in_is_an_index_that_the_makefile_takes(tmp_path: Path) -> None:
    version, wheels = pinned_version(), tmp_path / "wheels"
    wheels.mkdir()
    with index_of(wheels, tmp_path / "empty") as url:
        problem = find_problem(url, version)
        assert problem is not None and problem.startswith(f"has no torch {version}")
    tag = f"cp3{sys.version_info[1]}-cp3{sys.version_info[1]}{sys.abiflags}"
    name = f"torch-{version}+cpu-{tag}-manylinux_2_28_{platform.machine()}.whl"
    (wheels / name).touch()
    with index_of(wheels, tmp_path / "full") as url:
        assert find_problem(url, version) is None


def test_nothing_of_this_machine_is_left_but_the_way_out(tmp_path: Path) -> None:
    mine = {"PATH": "/bin", "HOME": "/root", "SSL_CERT_FILE": "certificates", "PIP_CERT": "too"}
    theirs = {
        "PIP_FIND_LINKS": "/opt",
        "XDG_CACHE_HOME": "/c",
        "MAKEFLAGS": "-j",
        "VLM_SERVE_PORT": "1",
    }
    found = stranger(mine | theirs, tmp_path)
    assert found["HOME"] == str(tmp_path)
    assert not theirs.keys() & found.keys()
    assert {name: found[name] for name in ("PATH", "SSL_CERT_FILE", "PIP_CERT")} == {
        name: mine[name] for name in ("PATH", "SSL_CERT_FILE", "PIP_CERT")
    }


def test_a_small_environment_for_cpus_will_do(
    environment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_size(environment, must_be_small=True)
    assert "torch-2.13.0+cpu, without CUDA: 0.00 GB" in capsys.readouterr().out


def test_a_large_one_will_not(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (environment / "some").write_bytes(bytes(1 << 20))
    monkeypatch.setattr("install.CPU_BYTES", 1 << 19)
    with pytest.raises(SystemExit, match="more than"):
        check_size(environment, must_be_small=False)
    assert CPU_BYTES == 2_600_000_000


def test_cuda_is_large_and_may_be_so_unless_the_stand_in_was_there(environment: Path) -> None:
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "nvidia").mkdir()
    check_size(environment, must_be_small=False)
    with pytest.raises(SystemExit, match="has not been taken"):
        check_size(environment, must_be_small=True)
