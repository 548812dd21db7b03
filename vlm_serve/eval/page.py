"""A report as one HTML page, without scripts and external files, in a light and a dark scheme.

Bar charts are inline SVG, and the page's style gives their colours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from jinja2 import Environment

_SIDES = ("with caching", "without")
_FOLDER = Path(__file__).parent
_LONGEST = 300


def page(report: Mapping[str, Any]) -> str:
    """Return the HTML document of a report from `make_report`."""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"cut": _cut, "draw": draw, "said": _said, "shown": shown}
    template = environment.from_string(_FOLDER.joinpath("page.html").read_text(encoding="utf-8"))
    facts = {"model": report["model"]}
    if report["data"] is not None:
        facts |= {"questions": report["data"]["file"], "SHA-256": report["data"]["sha256"]}
    return template.render(
        report,
        heading=f"{report['title']}: {report['model']}",
        style=_FOLDER.joinpath("page.css").read_text(encoding="utf-8"),
        facts=facts | report["machine"] | report["settings"],
        charts=_charts(report["parts"]),
    )


def _said(answer: Mapping[str, Any]) -> str:
    """Return the texts of an answer, or else its scores or its error."""
    scores = (f"{chr(ord('A') + n)} {score:.3f}" for n, score in enumerate(answer["scores"]))
    return " ⏎ ".join(answer["answers"]) or "  ".join(scores) or answer["error"] or ""


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else text[:_LONGEST] + " …"


def _charts(parts: Sequence[Mapping[str, Any]]) -> Iterable[Bars]:
    """Yield the charts of a report; accuracy only if right answers are known."""

    def both(field: str) -> dict[str, list[float]]:
        names = ("with_caching", "without_caching")
        return {part["name"]: [part[name][field] for name in names] for part in parts}

    yield Bars("Prompt tokens computed", _SIDES, both("computed_tokens"))
    yield Bars("Wall time", _SIDES, both("seconds"), "s")
    rates = {part["name"]: [part["with_caching"]["hit_rate"]] for part in parts}
    yield Bars("Hit rate: prompt tokens from the cache", ("hit rate",), rates, "%")
    right = {part["name"]: part["accuracy"]["all"] for part in parts if part["accuracy"]}
    if right:
        shares = {name: [count["right"] / count["of"]] for name, count in right.items()}
        yield Bars("Right answers", ("right",), shares, "%")


_WIDTH, _LABELS, _VALUES = 720, 200, 96
_BAR, _GAP, _BETWEEN = 14, 3, 14


@dataclass(frozen=True, slots=True)
class Bars:
    """A chart of horizontal bars on one scale from 0.

    Attributes:
        title: above the chart.
        series: the name of each bar of a row; the n-th has the page's n-th colour.
        rows: name -> value of each series.
        unit: after the values; "%" shows fractions (0 to 1) on a scale to 100 %.
    """

    title: str
    series: Sequence[str]
    rows: Mapping[str, Sequence[float]]
    unit: str = ""


def draw(bars: Bars) -> str:
    """Return the chart as an `<svg>` element with its values as text for screen readers."""
    most = (
        1.0 if bars.unit == "%" else max((v for row in bars.rows.values() for v in row), default=0)
    )
    longest = _WIDTH - _LABELS - _VALUES
    height_of_row = len(bars.series) * (_BAR + _GAP) - _GAP + _BETWEEN
    head = 34 if len(bars.series) > 1 else 10
    height = head + len(bars.rows) * height_of_row
    parts = [_legend(bars.series) if len(bars.series) > 1 else ""]
    for number, (name, values) in enumerate(bars.rows.items()):
        top = head + number * height_of_row
        middle = top + (height_of_row - _BETWEEN) / 2
        parts.append(
            f'<text class="label" x="{_LABELS - 10}" y="{middle:g}" text-anchor="end" '
            f'dominant-baseline="central">{escape(_shortened(name))}</text>'
        )
        for place, value in enumerate(values):
            length = longest * value / most if most else 0.0
            y = top + place * (_BAR + _GAP)
            parts.append(
                f'<rect class="series-{place}" x="{_LABELS}" y="{y}" width="{max(length, 1):.1f}" '
                f'height="{_BAR}" rx="2"><title>{escape(name)}, {escape(bars.series[place])}: '
                f"{shown(value, bars.unit)}</title></rect>"
                f'<text class="value" x="{_LABELS + length + 6:.1f}" y="{y + _BAR / 2:g}" '
                f'dominant-baseline="central">{shown(value, bars.unit)}</text>'
            )
    parts.append(
        f'<line class="axis" x1="{_LABELS}" y1="{head - 6}" x2="{_LABELS}" y2="{height - 8}"/>'
    )
    return (
        f"<figure><figcaption>{escape(bars.title)}</figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(_spoken(bars))}">'
        f"{''.join(parts)}</svg></figure>"
    )


def shown(value: float, unit: str = "") -> str:
    """Format a value: 12 345, 0.52 s, 74.7 %."""
    if unit == "%":
        return f"{100 * value:.1f} %"
    text = f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.2f}"
    return f"{text.replace(',', ' ')} {unit}".rstrip()


def _legend(series: Sequence[str]) -> str:
    parts, x = [], _LABELS
    for place, name in enumerate(series):
        parts.append(
            f'<rect class="series-{place}" x="{x}" y="6" width="12" height="12" rx="2"/>'
            f'<text class="label" x="{x + 18}" y="12" dominant-baseline="central">'
            f"{escape(name)}</text>"
        )
        x += 40 + 8 * len(name)
    return "".join(parts)


def _shortened(name: str) -> str:
    return name if len(name) <= 28 else name[:27] + "…"


def _spoken(bars: Bars) -> str:
    rows = (
        f"{name}: " + ", ".join(f"{series} {shown(value, bars.unit)}" for series, value in pairs)
        for name, values in bars.rows.items()
        for pairs in [list(zip(bars.series, values, strict=True))]
    )
    return f"{bars.title}. " + "; ".join(rows)
