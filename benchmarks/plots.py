"""Draw the figures of docs/performance.md from kept results, and write its part about them.

    python benchmarks/plots.py

Whatever lies in `results/` (`common/plot_data.py` says in which form) is drawn and told; to add a
processor or a script is to add a file there. Nothing is measured here.
"""

from __future__ import annotations

import argparse
import re
import sys
from itertools import groupby
from pathlib import Path
from textwrap import fill

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.common.charts import draw, number  # noqa: E402
from benchmarks.common.plot_data import Figure, Result, Row, load  # noqa: E402

PAGE = ROOT / "docs" / "performance.md"
PLOTS = ROOT / "docs" / "plots"
BEGIN, END = "<!-- begin figures -->\n", "<!-- end figures -->"
FIRST = ("engine_cpu", "engine_gpu", "large_model", "quantised")
"""Scripts whose figures come before all others of a processor."""


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    results = load()
    drawn = plots(results)
    for path in PLOTS.glob("*.svg"):
        if path.name not in drawn:
            path.unlink()
    PLOTS.mkdir(exist_ok=True)
    for name, text in drawn.items():
        (PLOTS / name).write_text(text, encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(with_figures(page, results), encoding="utf-8")


def plots(results: list[Result]) -> dict[str, str]:
    """File name in docs/plots -> SVG."""
    return {_file(result, figure): draw(figure) for result in results for figure in result.figures}


def with_figures(page: str, results: list[Result]) -> str:
    """The page with the part between the marks made anew."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + figures(results) + END + rest.split(END)[1]


def figures(results: list[Result]) -> str:
    """All figures as Markdown, a heading for every processor."""
    parts = []
    for machine, group in groupby(results, key=lambda result: result.machine):
        of_machine = sorted(group, key=_place)
        parts.append(f"\n### {machine}\n\n{of_machine[0].processor}.\n")
        for result in of_machine:
            parts += [_told(result, figure) for figure in result.figures]
    return "".join(parts) + "\n"


def _place(result: Result) -> tuple[int, str]:
    first = FIRST.index(result.script) if result.script in FIRST else len(FIRST)
    return first, result.script


def _file(result: Result, figure: Figure) -> str:
    return f"{result.machine}-{result.script}-{figure.name}.svg"


def _told(result: Result, figure: Figure) -> str:
    title = re.sub(r"[\[\]]", "", figure.title)
    measured = any(row.measured for row in figure.rows)
    heads = ["", *(["vlm-serve"] if measured else []), *figure.series]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in figure.rows:
        cells = [row.name, *([row.measured] if measured else [])]
        cells += [_cell(row, index) for index in range(len(figure.series))]
        lines.append(f"| {' | '.join(cells)} |")
    at = f"commit {figure.commit}" if figure.commit else f"written down in {figure.noted}"
    how = f"`{figure.command}`, {figure.date}, {at}: {figure.conditions}. {figure.note}"
    return "\n".join(
        [
            f"\n![{title}](plots/{_file(result, figure)})\n",
            f"<details><summary>{title}: the numbers</summary>\n",
            *lines,
            "\n" + fill(how, 125, break_long_words=False, break_on_hyphens=False),
            f"In full: [benchmarks/{figure.source.split('#')[0]}](../benchmarks/{figure.source}).",
            "</details>\n",
        ]
    )


def _cell(row: Row, index: int) -> str:
    value, span = row.values[index], row.span(index)
    if value is None:
        return ""
    return number(value) + (f" ({number(span[0])} to {number(span[1])})" if span else "")


if __name__ == "__main__":
    main()
