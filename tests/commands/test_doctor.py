"""What `vlm-serve doctor` says of a machine."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest

from vlm_serve.cli import main
from vlm_serve.commands.doctor import PACKAGES, examine


def test_it_prints_what_it_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == [line.split("  ")[0] for line in text.splitlines()]
    assert all(f"{name} " in found["packages"] for name in PACKAGES)
    assert "missing" not in found["packages"]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="about extensions of x86")
def test_it_says_for_which_instructions_the_compiler_builds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLM_SERVE_NATIVE_ARCH", "x86-64-v3")
    compiler = examine()["compiler"]
    assert "AVX2" in compiler
    assert "AVX-512" not in compiler


def test_without_a_compiler_it_says_that_torch_computes_and_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "nowhere"))
    found = examine()
    assert "was not found" in found["compiler"]
    assert "torch computes" in found["kernels"]
    assert "nowhere was not found" in found["bfloat16 checkpoint"]
    assert "computed in float32" in found["bfloat16 checkpoint"]


def test_it_says_whether_kernels_are_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert str(tmp_path) in examine()["kernels"]
    assert "first start" in examine()["kernels"]


def test_an_unknown_processor_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLM_SERVE_NATIVE_ARCH", "pdp-11")
    assert "pdp-11" in examine()["compiler"]
