"""The counts of `house_numbers.py` and the graph that its layers come from, on small houses."""

from __future__ import annotations

from pathlib import Path

import pytest
from house_numbers import Numbers, numbers_of
from import_graph import HELPERS, circles, folder_graphs, imported_names, layers

SOURCE = '''"""A module."""

import os  # That is code.


def two() -> str:
    """Say two.

    In three lines.
    """
    # Nothing but a comment.
    return (
        "two"
    )


LIMIT = os.sep
"""A constant's own sentence."""
'''


def test_own_lines_are_counted_by_kind_and_those_of_others_left_out(tmp_path: Path) -> None:
    (tmp_path / "vendor").mkdir()
    (tmp_path / "it.py").write_text(SOURCE)
    for name, lines in (("a.cpp", 2), ("b.h", 3), ("c.js", 5), ("d.mjs", 7), ("e.css", 11)):
        (tmp_path / name).write_text("x\n" * lines)
    for name in ("f.html", "g.json", "vendor/h.js", "vendor/i.py", "vendor/j.h"):
        (tmp_path / name).write_text("x\n" * 13)
    numbers = numbers_of(tmp_path)
    assert (numbers.files, numbers.python, numbers.compiled) == (1, SOURCE.count("\n"), 5)
    assert numbers.page == 5 + 7 + 11 + 13
    assert numbers.lines == numbers.python + numbers.compiled + numbers.page
    assert numbers.code_lines == 6
    assert len(numbers.docstrings) == 2
    both = sum([numbers, numbers], Numbers())
    assert (both.lines, both.code_lines) == (2 * numbers.lines, 12)
    assert len(both.docstrings) == 4


def test_imports_within_functions_count(tmp_path: Path) -> None:
    path = tmp_path / "it.py"
    path.write_text("import a.b\ndef f():\n    from c import d, e\n    from . import g\n")
    assert imported_names(path) == {("a.b", ""), ("c", "d"), ("c", "e")}


@pytest.mark.parametrize(
    ("graph", "found", "floors"),
    [
        ({"a": "b", "b": "c", "c": "", "d": "c"}, [], 3),
        ({"a": "b", "b": "ac", "c": "d", "d": ""}, ["ab"], 3),
        ({"a": "b", "b": "c", "c": "ad", "d": "e", "e": "d"}, ["abc", "de"], 2),
        ({"a": "a"}, [], 1),
        ({}, [], 0),
    ],
)
def test_circles_and_layers(graph: dict[str, str], found: list[str], floors: int) -> None:
    nodes = {node: set(others) for node, others in graph.items()}
    assert sorted("".join(sorted(circle)) for circle in circles(nodes)) == found
    assert layers(nodes, nodes) == floors


def test_folders_count_with_what_is_below_them() -> None:
    places = ("p/a/one.py", "p/a/two.py", "p/b/deep/three.py", "p/four.py", "tests/oracle.py")
    one, two, three, four, oracle = map(Path, places)
    graph = {one: {two, three}, two: {four}, three: set(), four: {one}, oracle: {four}}
    found = folder_graphs(graph)
    assert found[Path("p")] == {"a": {"b", "four.py"}, "b": set(), "four.py": {"a"}}
    assert circles(found[Path("p")]) == [{"a", "four.py"}]
    assert found[Path(".")] == {"p": set(), HELPERS: {"p"}}
    assert not circles(found[Path("p/a")])
