"""The check of what can be installed, with a stand-in for uv: it asks for everything, on behalf of
a machine without a configuration, and believes no answer that it should not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import resolution
from dockerfile import ROOT
from resolution import PLATFORMS, PYTHONS, pins, public_environment, unpinned

SCRIPT = ROOT / "tests" / "resolution.py"
CONSTRAINTS = ROOT / "constraints.txt"
UV = """#!/bin/sh
{{ echo "$*"; env; }} > "$(mktemp {folder}/asked-XXXXXXXX)"
case "$*" in {fails}) echo "error: No solution found" >&2; exit 1;; esac
echo torch==2.13.0
{more}
"""
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def run(folder: Path, fails: str = "nothing", more: str = "") -> subprocess.CompletedProcess[str]:
    """Runs the check with a uv that leaves what it was asked in the folder."""
    program = folder / "uv"
    program.write_text(UV.format(folder=folder, fails=fails, more=more))
    program.chmod(0o755)
    own = {
        "PIP_FIND_LINKS": "/opt/wheels",
        "UV_INDEX_URL": "http://index.test",
        "SSL_CERT_FILE": "x",
    }
    return subprocess.run(
        [sys.executable, str(SCRIPT), "--uv", str(program)],
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        check=False,
    )


def test_everything_is_asked_for_everywhere(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 0, done.stdout
    asked = [path.read_text() for path in tmp_path.glob("asked-*")]
    commands = [each.splitlines()[0] for each in asked]
    extras = PROJECT["optional-dependencies"]
    wanted = [f"--extra {name}" for name in extras] + ["--all-extras", "requirements.txt"]
    for python in PYTHONS:
        for platform in PLATFORMS:
            where = f"--python-version {python} --python-platform {platform} "
            here = [command for command in commands if where in command]
            assert all(any(what in command for command in here) for what in wanted)
            assert len(here) == len(extras) + 2 + 6, "none and all; what has no dependencies"
    assert all("--no-config" in command for command in commands)
    built = [command for command in commands if "--no-build" not in command]
    assert len(built) == 2 * len(PYTHONS) * len(PLATFORMS), "AutoGPTQ and AutoAWQ are built here"
    for each in asked:
        assert "SSL_CERT_FILE=x" in each
        assert not re.search(r"^(PIP_FIND_LINKS|UV_INDEX_URL)=", each, re.MULTILINE)


def test_the_supported_pythons_are_asked_for() -> None:
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"


def test_what_cannot_be_resolved_and_what_has_no_pin_fail_by_name(tmp_path: Path) -> None:
    newcomers = (
        'echo nvidia-nccl-cu13==2.29.7; case "$*" in *3.12*x86*otel*) echo loose==1.0;; esac'
    )
    done = run(tmp_path, fails="*3.14*aarch64*gpu", more=newcomers)
    assert done.returncode == 1
    assert "extra gpu, Python 3.14, aarch64-manylinux_2_31:\nerror: No solution" in done.stdout
    where = "extra otel, Python 3.12, x86_64-manylinux_2_31:\n"
    assert f"{where}not in the constraints: loose==1.0\n" in done.stdout
    assert done.stderr.startswith("2 of ")


def test_names_are_compared_as_indexes_do() -> None:
    pinned = pins(CONSTRAINTS)
    assert pinned["typing-extensions"] == pinned[resolution.normalised("Typing_Extensions")]
    found = ["PyYAML==6", "ray[serve]==2.60", "cuda-toolkit==13", "loose==1 ; python_version > '3'"]
    assert [line.split("=")[0] for line in unpinned(found, pinned)] == ["loose"]


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("PATH", True),
        ("HTTPS_PROXY", True),
        ("SSL_CERT_FILE", True),
        ("PIP_CERT", True),
        ("PIP_PROXY", True),
        ("PIP_FIND_LINKS", False),
        ("PIP_INDEX_URL", False),
        ("UV_EXTRA_INDEX_URL", False),
        ("PYTHONPATH", False),
        ("XDG_CONFIG_DIRS", False),
        ("TORCH_INDEX", False),
    ],
)
def test_a_machines_own_configuration_is_left_out(name: str, kept: bool) -> None:
    assert (name in public_environment({name: "x"})) is kept
