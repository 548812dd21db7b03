"""The version, of an installed package and of a source tree."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import pytest

from vlm_serve import own_version as module
from vlm_serve.cli import main


def test_of_an_installed_package() -> None:
    assert module.own_version() == version("vlm-serve")


def test_a_source_tree_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(module, "version", missing)
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == "vlm-serve not installed\n"
