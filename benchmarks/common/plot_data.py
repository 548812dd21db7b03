"""Kept results: `results/PROCESSOR/SCRIPT.json` has a script's newest figures there.

A file has the name of its `processor` and a list of `figures`. A figure records how it was made:
`command`, `date`, `conditions`, `commit` where it is known, and `noted`, the commit that wrote it
down. `source` is a heading of a page in `notes/`, which has the same numbers. `rows` have a value
for each of `series`, null where nothing was measured; `measured` is our own side of a ratio, in its
unit. `scale` is how the figure is drawn: `ratio` around one, `linear` from zero, `log`, or `each
row` linear by itself.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

FOLDER = Path(__file__).resolve().parents[1] / "results"

Scale = Literal["ratio", "linear", "log", "each row"]


@dataclass(frozen=True, slots=True)
class Row:
    """One row: a value for each series, the least and most of it where several were measured."""

    name: str
    values: list[float | None]
    ranges: list[list[float] | None] = field(default_factory=list)
    measured: str = ""

    def span(self, index: int) -> list[float] | None:
        """Least and most of a value."""
        return self.ranges[index] if self.ranges else None


@dataclass(frozen=True, slots=True)
class Figure:
    """What one run of a script has shown."""

    name: str
    title: str
    unit: str
    scale: Scale
    command: str
    date: str
    noted: str
    conditions: str
    source: str
    series: list[str]
    rows: list[Row]
    commit: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of one script on one processor."""

    machine: str
    script: str
    processor: str
    figures: list[Figure]


def load(folder: Path = FOLDER) -> list[Result]:
    """All that is kept, by processor and script.

    Raises:
        TypeError: a figure lacks a field or has one that nobody knows.
    """
    return [_read(path) for path in sorted(folder.glob("*/*.json"))]


def _read(path: Path) -> Result:
    content = json.loads(path.read_text(encoding="utf-8"))
    figures = [_figure(**each) for each in content["figures"]]
    return Result(path.parent.name, path.stem, content["processor"], figures)


def _figure(rows: list[dict[str, Any]], **fields: Any) -> Figure:
    return Figure(rows=[Row(**row) for row in rows], **fields)
