"""The benchmarks' index names every script, and their notes stay short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_map import anchors

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
MAIN = 'if __name__ == "__main__":'
CHILDREN = {"engine_child.py"}
"""Modules in `common/` that another one starts as a process."""
NOTES = sorted((FOLDER / "notes").glob("*.md"))
MAX_LINES, MAX_COLUMNS = 150, 120


def programs(folder: Path) -> set[str]:
    """Return the names of the modules in a folder that can be run."""
    return {path.name for path in folder.glob("*.py") if MAIN in path.read_text(encoding="utf-8")}


def rows() -> list[tuple[str, str, str, str]]:
    """Return script, what it shows, command and time of every row in the index."""
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    return re.findall(
        r"^\| \[(\w+\.py)\]\(\1\) \| (.+?) \| `(.+?)` \| (.+?) \|$", text, re.MULTILINE
    )


def test_the_index_lists_every_script_once() -> None:
    scripts = [script for script, *_ in rows()]
    assert len(scripts) == len(set(scripts))
    assert set(scripts) == programs(FOLDER)
    assert {path.name for path in FOLDER.glob("*.py")} == set(scripts), "modules go to common/"
    for script, _, command, _ in rows():
        assert command.split()[0] == script


def test_shared_modules_are_no_scripts() -> None:
    assert programs(FOLDER / "common") == CHILDREN
    users = "".join(path.read_text(encoding="utf-8") for path in FOLDER.rglob("*.py"))
    for path in (FOLDER / "common").glob("[a-z]*.py"):
        name = path.stem
        imported = rf"from (benchmarks\.)?common(\.{name} import| import {name}\b)"
        started = path.name in CHILDREN and f'"{path.name}"' in users
        assert started or re.search(imported, users), f"{name} has no user"


@pytest.mark.parametrize("path", NOTES, ids=lambda path: path.stem)
def test_a_page_of_notes_is_short_and_its_links_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    assert len(lines) <= MAX_LINES
    assert max(map(len, lines)) <= MAX_COLUMNS
    for name, anchor in re.findall(r"\]\(([^)#:]+)(?:#([\w-]+))?\)", text):
        target = path.parent / name
        assert target.is_file(), name
        assert not anchor or anchor in anchors(target), f"{name}#{anchor}"


def test_the_notes_are_all_linked() -> None:
    index = (FOLDER / "notes" / "README.md").read_text(encoding="utf-8")
    linked = {"README.md", *re.findall(r"\]\((\S+\.md)\)", index)}
    assert linked == {path.name for path in NOTES}


def test_scripts_that_the_notes_name_exist() -> None:
    names = {path.name for path in FOLDER.parent.rglob("*.py") if ".venv" not in path.parts}
    for path in NOTES:
        for name in re.findall(r"`(?:[\w./]*/)?(\w+\.py)\b", path.read_text(encoding="utf-8")):
            assert name in names, f"{path.name}: {name}"
