"""The version: one text, of the code that runs."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import vlm_serve
from vlm_serve.cli import main
from vlm_serve.system.version import __version__

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"vlm-serve {vlm_serve.__version__}\n"
    assert __version__ == vlm_serve.__version__


def test_the_metadata_takes_it_from_the_package() -> None:
    whole = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" not in whole["project"] and "version" in whole["project"]["dynamic"]
    assert whole["tool"]["setuptools"]["dynamic"]["version"] == {
        "attr": "vlm_serve.system.version.__version__"
    }


def test_the_changelog_has_it() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\n## {vlm_serve.__version__} - " in text


def test_the_documents_name_wheels_of_it() -> None:
    text = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    named = set(re.findall(r"vlm_serve-([\d.]+)-py3", text))
    assert named == {vlm_serve.__version__}
