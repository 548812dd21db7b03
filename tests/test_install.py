"""The parts of the check that installs: what it installs from, and when it is not content."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tarfile
from pathlib import Path
from zipfile import ZipFile

import pytest
from dockerfile import ROOT
from install import CPU_BYTES, check_size, copied, index_of, stranger, using_torchvision
from torch_index import find_problem, pinned_version
from wheels import unpack

import vlm_serve
from vlm_serve.system.links import find_problem as find_links_problem


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


def test_an_editable_installation_imports_nothing_from_the_current_folder(tmp_path: Path) -> None:
    """Setuptools would have Python look into a folder whose name it makes up."""
    checkout, here, site = copied(tmp_path / "checkout"), tmp_path / "here", tmp_path / "site"
    build = "import sys; from setuptools import build_meta; build_meta.build_editable(sys.argv[1])"
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", build, str(wheels)],
        cwd=checkout,
        capture_output=True,
        check=True,
    )
    with ZipFile(next(wheels.iterdir())) as wheel:
        wheel.extractall(site)
    made_up = f"__editable__.vlm_serve-{vlm_serve.__version__}.finder.__path_hook__"
    (here / made_up / "vlm_serve").mkdir(parents=True)
    (here / made_up / "vlm_serve" / "__init__.py").write_text("raise SystemExit('planted')\n")
    program = (
        "import os, site, sys\n"
        "site.addsitedir(sys.argv[1])\n"
        "import vlm_serve.cli, vlm_serve.kernels.native_processor\n"
        "print(vlm_serve.__file__, *(each for each in sys.path if not os.path.isabs(each)))\n"
    )
    for folder in (tmp_path, here):
        done = subprocess.run(
            [sys.executable, "-S", "-P", "-c", program, str(site)],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout == f"{checkout / 'vlm_serve' / '__init__.py'}\n", done.stderr


def built(checkout: Path, target: Path, kind: str) -> Path:
    """Build a checkout's "wheel" or "sdist" into a new folder and return its path."""
    target.mkdir()
    build = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", build, str(target)],
        cwd=checkout,
        capture_output=True,
        text=True,
        check=True,
    )
    (found,) = target.iterdir()
    return found


def contents(wheel: Path) -> dict[str, bytes]:
    with ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_a_source_distribution_builds_the_same_wheel_and_carries_no_tests(tmp_path: Path) -> None:
    sdist = built(copied(tmp_path / "one"), tmp_path / "sdist", "sdist")
    wheel = built(copied(tmp_path / "two"), tmp_path / "wheel", "wheel")
    with tarfile.open(sdist) as archive:
        names = archive.getnames()
    unpack(sdist, tmp_path / "unpacked")
    (top,) = (tmp_path / "unpacked").iterdir()
    assert not [name for name in names if "/tests" in name]
    again = built(top, tmp_path / "again", "wheel")
    assert contents(again) == contents(wheel)


def without_links(checkout: Path) -> Path:
    """Do to a checkout what Git does without symbolic links."""
    for name in ("cache", "kernels", "preprocess"):
        link = checkout / "vlm_serve" / name
        target = str(link.readlink())
        link.unlink()
        link.write_text(target)
    return checkout


@pytest.mark.parametrize("kind", ["wheel", "sdist", "editable"])
def test_a_checkout_without_symbolic_links_is_not_built(kind: str, tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as raised:
        built(without_links(copied(tmp_path / "checkout")), tmp_path / "built", kind)
    assert "git config core.symlinks true" in raised.value.stderr
    assert "vlm_serve/cache vlm_serve/kernels vlm_serve/preprocess" in raised.value.stderr


def test_a_checkout_without_symbolic_links_is_not_imported(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import vlm_serve"],
        cwd=without_links(copied(tmp_path / "checkout")),
        capture_output=True,
        text=True,
        check=False,
    )
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: this copy of vlm-serve has lost its symbolic links")
    assert "git config core.symlinks true" in last


def test_the_remedy_restores_the_links(tmp_path: Path) -> None:
    """Git's own commands, as the message has them."""
    checkout = copied(tmp_path / "checkout")
    names = [f"vlm_serve/{name}" for name in ("cache", "kernels", "preprocess")]
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", *names], ["commit", "-qm", "links"]):
        subprocess.run([*git, *command], cwd=checkout, check=True)
    subprocess.run([*git, "config", "core.symlinks", "false"], cwd=checkout, check=True)
    for name in names:
        (checkout / name).unlink()
    subprocess.run([*git, "checkout", "-q", "--", *names], cwd=checkout, check=True)
    assert not (checkout / names[0]).is_symlink(), "as on Windows"
    problem = find_links_problem(str(checkout / "vlm_serve"))
    assert problem is not None
    subprocess.run([*git, "config", "core.symlinks", "true"], cwd=checkout, check=True)
    for name in names:
        (checkout / name).unlink()
    command = problem.split("`")[3].split()
    subprocess.run(command, cwd=checkout, check=True)
    assert find_links_problem(str(checkout / "vlm_serve")) is None


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


def test_what_make_is_given_stays_with_it(tmp_path: Path) -> None:
    """Variables of make's command line are exported to what it starts."""
    given = ["ARGS=--wheels /opt", "PORT=1", "HOST=h", "MODEL=m", "TORCH_INDEX=i", "CPU_INDEX=c"]
    makefile = tmp_path / "Makefile"
    makefile.write_text(
        f"all:\n\t@'{sys.executable}' -c 'import json, os; print(json.dumps(dict(os.environ)))'\n"
    )
    made = subprocess.run(
        ["make", "--no-print-directory", *given], cwd=tmp_path, capture_output=True, check=True
    )
    exported: dict[str, str] = json.loads(made.stdout)
    assert exported["ARGS"] == "--wheels /opt"
    found = stranger(exported, tmp_path)
    assert not {each.split("=")[0] for each in given} & found.keys()
    assert found["PATH"] == exported["PATH"]


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


def test_files_that_use_torchvision_are_named() -> None:
    names = using_torchvision(ROOT)
    assert {"tests/test_oracle.py", "tests/demo/test_recipe.py"} <= set(names)
    assert "tests/test_house.py" not in names, "it only speaks of torchvision"
