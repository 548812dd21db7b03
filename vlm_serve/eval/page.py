"""A report as one HTML page, without scripts and external files, in a light and a dark scheme.

Bar charts are inline SVG, and the page's style gives their colours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

_SIDES = ("with caching", "without")
_STYLE = Path(__file__).with_name("page.css")
_LONGEST = 300
_OVERVIEW: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "part": lambda part: part["name"],
    "answers": lambda part: part["items"],
    "equal": lambda part: part["equal"],
    "differ": lambda part: _alarm(part["different"]),
    "failed": lambda part: _alarm(part["failed"]),
    "hit rate": lambda part: shown(part["with_caching"]["hit_rate"], "%"),
    "prompt tokens": lambda part: shown(part["without_caching"]["prompt_tokens"], ""),
    "computed, with caching": lambda part: shown(part["with_caching"]["computed_tokens"], ""),
    "computed, without": lambda part: shown(part["without_caching"]["computed_tokens"], ""),
    "seconds, with caching": lambda part: shown(part["with_caching"]["seconds"], ""),
    "seconds, without": lambda part: shown(part["without_caching"]["seconds"], ""),
    "right": lambda part: _share(part["accuracy"].get("all")),
}
"""The columns of the overview: title, and what stands in it for a part."""


def page(report: Mapping[str, Any]) -> str:
    """Return the HTML document of a report from `make_report`."""
    parts = report["parts"]
    heading = f"{report['title']}: {report['model']}"
    bad = " bad" if report["different"] or report["failed"] else ""
    body = [
        f"<h1>{escape(heading)}</h1>",
        '<p class="soft">With and without prefix caching, answer by answer</p>',
        f'<p class="verdict{bad}">{escape(report["verdict"])}</p>',
        _facts(report),
        "<h2>Parts</h2>",
        _overview(parts),
        "".join(map(draw, _charts(parts))),
        "<h2>What this means</h2>",
        _listed(report["meaning"]),
        *map(_part, parts),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(heading)}</title><style>{_STYLE.read_text(encoding='utf-8')}</style></head>\n"
        f"<body>{''.join(body)}</body></html>\n"
    )


def _facts(report: Mapping[str, Any]) -> str:
    facts = {"model": report["model"]}
    if report["data"] is not None:
        facts |= {"questions": report["data"]["file"], "SHA-256": report["data"]["sha256"]}
    facts |= report["machine"] | report["settings"]
    rows = (
        f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in facts.items()
    )
    return f"<dl>{''.join(rows)}</dl>"


def _overview(parts: Sequence[Mapping[str, Any]]) -> str:
    rows = [[cell(part) for cell in _OVERVIEW.values()] for part in parts]
    return _table(tuple(_OVERVIEW), rows)


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


def _part(part: Mapping[str, Any]) -> str:
    blocks = [f"<h2>{escape(part['name'])}</h2><p>{escape(part['note'])}</p>"]
    groups = {name: count for name, count in part["accuracy"].items() if name != "all"}
    if groups:
        shares = ", ".join(f"{name} {_share(count)}" for name, count in groups.items())
        blocks.append(f"<p>Right answers by group: {escape(shares)}.</p>")
    if part["differences"]:
        differences = [
            (item["item"], item["what"], _cut(item["cached"]), _cut(item["uncached"]))
            for item in part["differences"]
        ]
        blocks.append('<h3 class="bad">What differs</h3>')
        blocks.append(_table(("item", "what", *_SIDES), differences, words=True))
    if part["failures"]:
        failures = [(item["item"], item["side"], item["error"]) for item in part["failures"]]
        blocks.append('<h3 class="bad">What failed</h3>')
        blocks.append(_table(("item", "side", "why"), failures, words=True))
    head = ("item", "answer", "taken as", "expected", "", "hit rate", "same on both")
    blocks.append(f"<details><summary>All {part['items']} answers</summary>")
    blocks.append(_table(head, map(_answer, part["answers"]), words=True) + "</details>")
    return "".join(blocks)


def _answer(answer: Mapping[str, Any]) -> Sequence[str]:
    text = " ⏎ ".join(answer["answers"]) or _scores(answer["scores"]) or answer["error"] or ""
    return (
        answer["item"],
        _cut(text),
        _cut(answer["chosen"]),
        answer["expected"] or "",
        {True: "right", False: "wrong", None: ""}[answer["right"]],
        shown(answer["hit_rate"], "%"),
        "yes" if answer["same"] else "no",
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]], *, words: bool = False) -> str:
    style = ' class="words"' if words else ""
    first = "".join(f"<th{style}>{escape(name)}</th>" for name in head)
    cells = ("".join(f"<td{style}>{_cell(value)}</td>" for value in row) for row in rows)
    others = "".join(f"<tr>{row}</tr>" for row in cells)
    return (
        f'<div class="wide"><table><thead><tr>{first}</tr></thead>'
        f"<tbody>{others}</tbody></table></div>"
    )


class _Markup(str):
    """A cell of HTML, not to be escaped."""


def _cell(value: Any) -> str:
    return value if isinstance(value, _Markup) else escape(str(value))


def _alarm(count: int) -> _Markup:
    """Format a number that should be 0."""
    return _Markup(f'<span class="{"bad" if count else "good"}">{count}</span>')


def _share(count: Mapping[str, int] | None) -> str:
    return f"{count['right']} of {count['of']}" if count else ""


def _scores(scores: Sequence[float]) -> str:
    return "  ".join(f"{chr(ord('A') + n)} {score:.3f}" for n, score in enumerate(scores))


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else text[:_LONGEST] + " …"


def _listed(texts: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ul>"


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


def shown(value: float, unit: str) -> str:
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
