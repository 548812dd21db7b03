"""Draw a figure as bars in SVG, readable on light and dark pages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape

from benchmarks.common.plot_data import Figure, Row

WIDTH = 760
_LEFT, _RIGHT = 250, 700
_BAR, _GAP, _LINE = 13, 10, 18
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f8790")
_STYLE = """
  svg { font: 12px system-ui, sans-serif; }
  .page { fill: #ffffff } .text { fill: #1f2328 } .less { fill: #59636e }
  .line { stroke: #d1d9e0 } .base { stroke: #59636e } .range { stroke: #1f2328 }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117 } .text { fill: #f0f6fc } .less { fill: #9198a1 }
    .line { stroke: #3d444d } .base { stroke: #9198a1 } .range { stroke: #f0f6fc }
  }
"""


@dataclass(frozen=True, slots=True)
class Axis:
    """From values to places between _LEFT and _RIGHT; what lies outside is drawn at the edge."""

    least: float
    most: float
    logarithmic: bool

    def place(self, value: float) -> float:
        value = min(max(value, self.least), self.most)
        share = (value - self.least) / (self.most - self.least)
        if self.logarithmic:
            share = math.log(value / self.least) / math.log(self.most / self.least)
        return _LEFT + share * (_RIGHT - _LEFT)

    def ticks(self) -> list[float]:
        if self.logarithmic:
            powers = range(-3, 7)
            places = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
        else:
            step = 10.0 ** math.floor(math.log10(self.most / 2))
            step *= next(times for times in (1, 2, 5) if self.most / (step * times) <= 8)
            places = [step * count for count in range(9)]
        inside = [tick for tick in places if self.least <= tick <= self.most]
        every = 3 if len(inside) > 9 else 1  # decades alone
        return inside[inside.index(1.0) % every :: every] if 1.0 in inside else inside[::every]


def axis_of(figure: Figure, rows: list[Row]) -> Axis:
    """One that has room for all values of the rows, and for the numbers behind their bars."""
    known = [value for row in rows for value in row.values if value is not None]
    spans = [end for row in rows for span in row.ranges if span for end in span if end > 0]
    most = max(known + spans)
    if figure.scale in ("linear", "each row"):
        return Axis(0.0, most * 1.08, logarithmic=False)
    least = min(known + spans)
    if figure.scale == "ratio":
        least, most = min(least, 0.8), max(most, 1.5)
    return Axis(least / 1.1, most * 1.6, logarithmic=True)


def draw(figure: Figure) -> str:
    """The figure as an SVG document."""
    legend, lines = _legend(figure)
    top = 50 + lines * _LINE
    shared = None if figure.scale == "each row" else axis_of(figure, figure.rows)
    parts: list[str] = []
    height = top
    for row in figure.rows:
        parts += _row(figure, row, shared or axis_of(figure, [row]), height)
        height += len(_shown(row)) * _BAR + _GAP
    baseline = shared.place(1.0) if shared and figure.scale == "ratio" else _LEFT
    parts.append(_line("base", baseline, top - 6, baseline, height - _GAP))
    if shared is not None:
        parts = _grid(shared, top - 6, height) + parts
        height += _LINE
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height + 6}" role="img"'
            f' aria-label="{escape(figure.title)}">',
            f"<style>{_STYLE}</style>",
            f'<rect class="page" width="{WIDTH}" height="{height + 6}"/>',
            f'<text class="text" x="12" y="22" font-size="14" font-weight="600">'
            f"{escape(figure.title)}</text>",
            _text("less", 12, 40, figure.unit),
            *legend,
            *parts,
            "</svg>\n",
        ]
    )


def number(value: float) -> str:
    """With a space between thousands."""
    return f"{value:,g}" if value < 1000 else f"{value:,.0f}".replace(",", " ")


def _shown(row: Row) -> list[tuple[int, float]]:
    return [(index, value) for index, value in enumerate(row.values) if value is not None]


def _legend(figure: Figure) -> tuple[list[str], int]:
    """Its parts, and how many lines they take; one series needs none."""
    if len(figure.series) == 1:
        return [], 0
    parts, x, line = [], 12.0, 0
    for index, name in enumerate(figure.series):
        wide = 34 + 6.6 * len(name)
        if x + wide > WIDTH:
            x, line = 12.0, line + 1
        y = 50 + line * _LINE
        parts.append(_bar(index, x, y, 12.0, 10))
        parts.append(_text("text", x + 17, y + 9, name))
        x += wide
    return parts, line + 1


def _row(figure: Figure, row: Row, axis: Axis, top: float) -> list[str]:
    shown = _shown(row)
    middle = top + len(shown) * _BAR / 2 + 4
    parts = [_text("text", _LEFT - 10, middle - 6 * bool(row.measured), row.name, end=True)]
    if row.measured:
        parts.append(_text("less", _LEFT - 10, middle + 7, row.measured, end=True))
    origin = axis.place(1.0 if figure.scale == "ratio" else axis.least)
    for place, (index, value) in enumerate(shown):
        y, end = top + place * _BAR, axis.place(value)
        parts.append(_bar(index, min(origin, end), y, abs(end - origin), _BAR - 2))
        right = max(origin, end)
        if span := row.span(index):
            least, most = (axis.place(each) for each in span)
            parts.append(_line("range", least, y + 5.5, most, y + 5.5))
            right = max(right, most)
        parts.append(_text("text", right + 5, y + 10, number(value)))
    return parts


def _grid(axis: Axis, top: float, bottom: float) -> list[str]:
    parts = []
    for tick in axis.ticks():
        x = axis.place(tick)
        parts.append(_line("line", x, top, x, bottom - _GAP))
        parts.append(_text("less", x, bottom + 6, number(round(tick, 6)), middle=True))
    return parts


def _bar(index: int, x: float, y: float, wide: float, high: float) -> str:
    return (
        f'<rect fill="{_COLOURS[index]}" x="{x:.1f}" y="{y:.1f}" width="{max(wide, 1.0):.1f}" '
        f'height="{high}"/>'
    )


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(
    kind: str, x: float, y: float, said: str, *, end: bool = False, middle: bool = False
) -> str:
    anchor = ' text-anchor="end"' if end else ' text-anchor="middle"' if middle else ""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}"{anchor}>{escape(said)}</text>'
