"""docs/performance.md has the figures of the kept results, and the notes have them too."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
from test_docs import given_reasons

from benchmarks.common.charts import axis_of, draw, number
from benchmarks.common.plot_data import FOLDER, Figure, Result, Row, load
from benchmarks.plots import PAGE, PLOTS, figures, plots, with_figures

ROOT = Path(__file__).resolve().parent.parent
RESULTS = load()
FIGURES = [(result, figure) for result in RESULTS for figure in result.figures]
NAMES = [f"{result.machine}-{result.script}-{figure.name}" for result, figure in FIGURES]
PAGE_TEXT = PAGE.read_text(encoding="utf-8")
SVG = "{http://www.w3.org/2000/svg}"


def numbers(text: str) -> set[float]:
    """All that stand in a text; a space may stand between thousands."""
    found = re.findall(r"-?\d{1,3}(?: \d{3})+|-?\d+(?:\.\d+)?", text)
    both_signs = {float(each.replace(" ", "")) for each in found}
    return both_signs | {abs(each) for each in both_signs}


def section(source: str) -> str:
    """Return the text below the heading `FILE#anchor`, up to the next heading of its rank."""
    name, anchor = source.split("#")
    text = (ROOT / "benchmarks" / name).read_text(encoding="utf-8")
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        heading = part.splitlines()[0].lower()
        if re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") == anchor:
            return part
    raise AssertionError(f"no heading {source}")


def test_the_plots_and_the_page_are_those_of_the_results() -> None:
    drawn = plots(RESULTS)
    assert {path.name for path in PLOTS.iterdir()} == drawn.keys(), "python benchmarks/plots.py"
    for name, text in drawn.items():
        assert (PLOTS / name).read_text(encoding="utf-8") == text, "python benchmarks/plots.py"
    assert with_figures(PAGE_TEXT, RESULTS) == PAGE_TEXT, "python benchmarks/plots.py"


def test_what_is_kept_is_of_scripts_and_processors() -> None:
    assert {path.suffix for path in FOLDER.glob("*/*")} == {".json"}
    for result in RESULTS:
        assert (ROOT / "benchmarks" / f"{result.script}.py").is_file()
        assert result.processor == next(
            other.processor for other in RESULTS if other.machine == result.machine
        )
    scripts = {result.script for result in RESULTS}
    assert {"engine_cpu", "quantised", "shared_store", "speculative"} <= scripts


@pytest.mark.parametrize(("result", "figure"), FIGURES, ids=NAMES)
def test_a_figure_has_what_its_source_says(result: Result, figure: Figure) -> None:
    text = section(figure.source)
    page = (ROOT / "benchmarks" / figure.source.split("#")[0]).read_text(encoding="utf-8")
    assert figure.source.startswith("notes/")
    assert figure.date in text
    assert f"{result.script}.py" in page
    told = numbers(text)
    for row in figure.rows:
        assert len(row.values) == len(figure.series)
        assert not row.ranges or len(row.ranges) == len(row.values)
        known = [value for value in row.values if value is not None]
        known += [end for span in row.ranges if span for end in span]
        known += numbers(row.measured)
        assert known and not set(known) - told, row.name
        for value, span in zip(row.values, row.ranges, strict=False):
            assert span is None or (value is not None and span[0] <= value <= span[1])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", figure.date)
    assert re.fullmatch(r"[0-9a-f]{7}", figure.noted)
    assert figure.command.startswith(f"{result.script}.py")


@pytest.mark.parametrize(("result", "figure"), FIGURES, ids=NAMES)
def test_a_plot_shows_every_value_inside_of_its_frame(result: Result, figure: Figure) -> None:
    root = ET.fromstring(draw(figure))
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    texts = [element.text or "" for element in root.iter(f"{SVG}text")]
    for row in figure.rows:
        assert row.name in texts
        for value in row.values:
            assert value is None or number(value) in texts
    for element in root.iter(f"{SVG}rect"):
        right = float(element.get("x", 0)) + float(element.get("width", 0))
        bottom = float(element.get("y", 0)) + float(element.get("height", 0))
        assert right <= width and bottom <= height
    for element in root.iter(f"{SVG}text"):
        wide = 7.5 * len(element.text or "")  # of the widest letters at this size, on average
        assert 0 < float(element.attrib["y"]) < height
        if element.get("text-anchor") == "end":
            assert float(element.attrib["x"]) - 0.87 * wide > 0, element.text


def example(scale: str, *values: float | None) -> Figure:
    rows = [Row(f"row {index}", [value]) for index, value in enumerate(values)]
    fields = ("name", "title", "unit")
    return Figure(*fields, scale, "c.py", "", "", "", "", ["one"], rows)  # type: ignore[arg-type]


def bars(figure: Figure) -> list[tuple[float, float]]:
    """Left and right ends of the bars, in the order of rows."""
    rects = [each for each in ET.fromstring(draw(figure)).iter(f"{SVG}rect") if each.get("fill")]
    ends = [(float(each.attrib["x"]), float(each.attrib["width"])) for each in rects]
    return [(left, left + wide) for left, wide in ends]


def test_bars_begin_at_one_or_at_zero_and_are_as_long_as_their_values() -> None:
    slower, faster = bars(example("ratio", 0.5, 2.0))
    assert slower[1] == pytest.approx(faster[0], abs=0.2)
    assert slower[1] - slower[0] == pytest.approx(faster[1] - faster[0], abs=0.2)
    (_, half), (_, whole) = bars(example("linear", 4.0, 8.0))
    left = bars(example("linear", 4.0, 8.0))[0][0]
    assert (half - left) * 2 == pytest.approx(whole - left, abs=0.2)
    small, large = bars(example("each row", 1.0, 1000.0))
    assert small == large
    first, second, third = (right for _, right in bars(example("log", 1.0, 10.0, 100.0)))
    assert second - first == pytest.approx(third - second, abs=0.2)


def test_what_was_not_measured_has_no_bar_and_an_empty_cell() -> None:
    figure = example("linear", 1.0, None)
    assert len(bars(figure)) == 1
    result = Result("cpu", "c", "some processor", [figure])
    assert "| row 1 |  |" in figures([result])


def test_ends_of_ranges_beyond_the_axis_are_drawn_at_its_edge() -> None:
    figure = example("ratio", 1.5)
    wide = replace(figure, rows=[Row("row 0", [1.5], [[-0.9, 3.0]])])
    axis = axis_of(wide, wide.rows)
    assert axis.place(-0.9) == axis.place(axis.least) < axis.place(1.5) < axis.place(3.0)


def test_a_processor_more_is_a_heading_more() -> None:
    more = Result("nvidia-h100", "engine_gpu", "One H100", [example("ratio", 2.0)])
    text = figures([*RESULTS, more])
    assert text.count("\n### ") == figures(RESULTS).count("\n### ") + 1
    assert "### nvidia-h100\n\nOne H100.\n" in text


def test_unknown_fields_of_a_result_are_refused(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "c.json").write_text(
        '{"processor": "p", "figures": [{"name": "n", "colour": "red", "rows": []}]}'
    )
    with pytest.raises(TypeError, match="colour"):
        load(tmp_path)


def test_every_reason_has_an_example_and_a_remedy() -> None:
    part = PAGE_TEXT.split("<!-- begin reasons -->")[1].split("<!-- end reasons -->")[0]
    sections = re.split(r"^#### ", part, flags=re.MULTILINE)[1:]
    told = {re.match(r"`(\w+)`\n", each)[1]: each for each in sections}  # type: ignore[index]
    assert told.keys() == given_reasons()
    for name, text in told.items():
        for word in ("Example", "Remedy"):
            said = re.search(rf"^\*{word}:\* (.+?)(?=^\*|\Z)", text, re.MULTILINE | re.DOTALL)
            assert said is not None and len(said[1].split()) >= 5, name
