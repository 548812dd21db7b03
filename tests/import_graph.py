"""The graph of imports between files of this house: its circles and its layers.

A folder is a node beside the other entries of the folder that it lies in, with all that is below
it; a file that lies beside folders is a node of its own.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from own_sources import LINKS, OTHERS, PRODUCT, ROOT, python_files

Node = TypeVar("Node")
Graph = Mapping[Node, Collection[Node]]
ON_THE_PATH = ("", "examples", "release", "tests")
"""Folders whose modules every script and test imports without more, as pytest's `pythonpath`."""
HELPERS = "test_helpers"
"""The node of the modules that lie loose in `tests`: the other folders use them, tests use all."""


@functools.cache
def imported_names(path: Path) -> frozenset[tuple[str, str]]:
    """Return each imported module, with what is imported from it or an empty string.

    Imports within functions and for the types alone count as well.
    """
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found |= {(node.module, alias.name) for alias in node.names}
    return frozenset(found)


@functools.cache
def house_graph() -> dict[Path, set[Path]]:
    """Return for each file which others it imports, by their places from the root.

    Folders that are linked into the package have their places there.
    """
    paths = {
        placed(path): path for name in (*PRODUCT, *OTHERS) for path in python_files(ROOT / name)
    }
    files = set(paths)
    return {place: imported_files(place, path, files) - {place} for place, path in paths.items()}


def placed(path: Path) -> Path:
    """Return a file's place from the root, below the package where it is imported from there."""
    place = path.relative_to(ROOT)
    return Path("vlm_serve") / place if place.parts[0] in LINKS else place


def imported_files(place: Path, path: Path, files: Collection[Path]) -> set[Path]:
    """Return which of the files one imports; a script finds those of its own folder first."""
    folders = [Path(folder) for folder in ON_THE_PATH]
    if place.parts[0] != "vlm_serve":
        folders = [place.parent, Path(*place.parts[:1]), *folders]
    found = set()
    for module, name in imported_names(path):
        for words in ([*module.split("."), name], module.split(".")):
            stems = [folder.joinpath(*words) for folder in folders if words[-1]]
            ends = [
                end for stem in stems for end in (stem.with_suffix(".py"), stem / "__init__.py")
            ]
            target = next((end for end in ends if end in files), None)
            if target:
                found.add(target)
                break
    return found


def circles(graph: Graph[Node]) -> list[set[Node]]:
    """Return the largest sets of nodes of which each leads to each other."""
    reached: dict[Node, set[Node]] = {}
    for start in in_circles(graph):
        waiting, seen = [start], set[Node]()
        while waiting:
            for node in graph.get(waiting.pop(), ()):
                if node not in seen:
                    seen.add(node)
                    waiting.append(node)
        reached[start] = seen
    found: list[set[Node]] = []
    for start, seen in reached.items():
        circle = {node for node in seen if start in reached.get(node, ())}
        if len(circle) > 1 and circle not in found:
            found.append(circle)
    return found


def in_circles(graph: Graph[Node]) -> set[Node]:
    """Return the nodes that are left when those without successors are taken off, again and again:
    what is in a circle or leads to one."""
    left = {node: set(others) - {node} for node, others in graph.items()}
    while free := {node for node in left if not left[node] & left.keys()}:
        left = {node: others for node, others in left.items() if node not in free}
    return set(left)


def folder_graphs(graph: Graph[Path]) -> dict[Path, dict[str, set[str]]]:
    """Return for each folder which of its entries import which; the root is `Path(".")`."""
    found: dict[Path, dict[str, set[str]]] = {}
    for place, others in graph.items():
        for folder in place.parents:
            own = found.setdefault(folder, {})
            imported = own.setdefault(entry_of(place, folder), set())
            imported |= {entry_of(other, folder) for other in others if folder in other.parents}
            imported.discard(entry_of(place, folder))
    return found


def entry_of(place: Path, folder: Path) -> str:
    """Return the name of a folder's entry that a file is or is below."""
    if place.parts[0] == "tests" and len(place.parts) == 2 and folder == Path("."):
        return "tests" if place.name.startswith("test_") else HELPERS
    return place.relative_to(folder).parts[0]


def layers(graph: Graph[Node], nodes: Iterable[Node]) -> int:
    """Return how many of the nodes the longest chain has of which each imports the next.

    A circle counts as one node, so the number is defined with circles as well.
    """
    chosen = set(nodes)
    within = {node: set(graph[node]) & chosen for node in chosen}
    circle_of: dict[Node, frozenset[Node]] = {node: frozenset({node}) for node in chosen}
    for circle in circles(within):
        circle_of |= dict.fromkeys(circle, frozenset(circle))
    above = {
        circle: {circle_of[other] for node in circle for other in within[node]} - {circle}
        for circle in circle_of.values()
    }
    most = 0
    while above:
        most += 1
        free = {circle for circle, others in above.items() if not others & above.keys()}
        above = {circle: others for circle, others in above.items() if circle not in free}
    return most
