"""Where things stand on the screen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from browser import Visit
from page_checks import LARGE, SMALL, saying
from playwright.sync_api import FloatRect, Locator, expect

SIZES = pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])


def box(locator: Locator) -> FloatRect:
    found = locator.bounding_box()
    assert found is not None
    return found


def tables(tmp_path: Path) -> Path:
    path = tmp_path / "data.csv"
    path.write_text("a,b\n1,2\n")
    return path


@SIZES
@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_pencil_stands_beside_the_text(visit: Visit, size: Any, number: int) -> None:
    page = visit.page
    page.set_viewport_size(size)
    visit.upload(*("shapes.png", "star.png")[:number])
    visit.ask("Where is the star?")
    pencil = box(page.get_by_role("button", name="Edit this question"))
    typed = box(page.locator(".typed"))
    assert 0 <= typed["x"] - (pencil["x"] + pencil["width"]) < 12
    assert typed["y"] <= pencil["y"] + pencil["height"] / 2 <= typed["y"] + typed["height"]


def test_the_pencil_of_pictures_alone_stands_beside_them(visit: Visit) -> None:
    page = visit.page
    visit.upload("shapes.png")
    visit.ask("")
    pencil = box(page.get_by_role("button", name="Edit this question"))
    picture = box(page.locator(".question img"))
    assert 0 <= picture["x"] - (pencil["x"] + pencil["width"]) < 12


@SIZES
def test_a_long_question_leaves_room_for_its_pencil(visit: Visit, size: Any) -> None:
    page = visit.page
    page.set_viewport_size(size)
    visit.ask("Where is the star of which I have asked before? " * 8)
    pencil = box(page.get_by_role("button", name="Edit this question"))
    assert pencil["x"] >= 0
    assert box(page.locator(".typed"))["x"] >= pencil["x"] + pencil["width"]


@SIZES
def test_a_text_file_between_pictures_is_a_small_card(
    visit: Visit, size: Any, tmp_path: Path
) -> None:
    page = visit.page
    page.set_viewport_size(size)
    visit.upload("shapes.png")
    visit.choose(tables(tmp_path))
    visit.upload("star.png")
    assert box(page.locator(".attachment .file"))["height"] < 60
    visit.ask("Where is the star?")
    assert box(page.locator(".question .file"))["height"] < 60


def test_the_legend_is_not_below_each_answer(visit: Visit) -> None:
    page = visit.page
    visit.upload("shapes.png")
    visit.ask("What color is the star?")
    visit.ask("Where is the triangle?")
    visible = page.locator(".turn .legend").locator("visible=true")
    expect(visible).to_have_count(0)
    page.locator(".reuse-of summary").last.click()
    expect(visible).to_have_count(1)
    expect(visible).to_contain_text("computed:")


WRITTEN = """| left | middle | right | as it is |
|:---|:---:|---:|---|
| a | b | 1 | x |
| aaa | bbb | 1000 | xxx |

```python
pass
```

> A quotation behind code.
>
> And its second paragraph.

- one

  with a second paragraph
- two:
  ```sh
  make
  ```
- three:
  > quoted

> first

> second
"""
GAPS = """(root) => {
    const blocks = new Set(["P", "UL", "OL", "PRE", "BLOCKQUOTE", "DIV", "TABLE"]);
    const gaps = [];
    for (const block of root.querySelectorAll("p, blockquote, .code-block, .wide")) {
        const range = document.createRange();
        let before = block.previousSibling;
        while (before && !before.textContent.trim()) before = before.previousSibling;
        if (!before || block.closest("pre")) continue;
        range.selectNode(before);
        const above = range.getBoundingClientRect().bottom;
        const name = block.textContent.trim();
        gaps.push([name, block.getBoundingClientRect().top - above]);
    }
    return gaps;
}"""


def test_columns_stand_as_they_are_written(visit: Visit) -> None:
    page = visit.page
    page.route("**/v1/chat/completions", saying(content=WRITTEN))
    visit.ask("A table?")
    for row, cell in (("thead tr", "th"), ("tbody tr >> nth=0", "td")):
        cells = page.locator(".markdown table").locator(row).locator(cell)
        told = cells.evaluate_all("(all) => all.map((one) => getComputedStyle(one).textAlign)")
        aligned = [each.removeprefix("-webkit-").replace("start", "left") for each in told]
        assert aligned == ["left", "center", "right", "left"]


def test_a_list_begins_with_the_number_that_is_written(visit: Visit) -> None:
    page = visit.page
    page.route("**/v1/chat/completions", saying(content="3. three\n4. four\n"))
    visit.ask("A list?")
    expect(page.locator(".markdown ol")).to_have_js_property("start", 3)


def test_blocks_of_an_answer_keep_their_distance(visit: Visit) -> None:
    page = visit.page
    page.route("**/v1/chat/completions", saying(content=WRITTEN))
    visit.ask("A quotation?")
    gaps = page.locator(".markdown").evaluate(GAPS)
    assert len(gaps) >= 8
    assert [name for name, gap in gaps if gap < 4] == []


def test_the_line_of_numbers_begins_no_row_with_a_dot(visit: Visit) -> None:
    page = visit.page
    page.set_viewport_size(SMALL)
    visit.upload("shapes.png")
    visit.ask("What color is the star?")
    told = page.locator(".numbers-line span").evaluate_all(
        "(all) => all.map((one) => getComputedStyle(one, '::before').content)"
    )
    assert set(told) == {"none"}


CHARTS = """(told) => import("/live/gauges.js").then(({Gauges}) => {
    const gauges = new Gauges();
    gauges.addPast(JSON.parse(told));
    const find = (title) => [...gauges.element.querySelectorAll(".card")].find(
        (card) => card.querySelector("h3").textContent === title);
    const titles = ["Hit rate", "Steps a second", "Running, waiting"];
    return JSON.stringify(Object.fromEntries(titles.map((title) => [title, {
        path: find(title).querySelector("path.line-0").getAttribute("d"),
        text: find(title).textContent,
    }])));
})"""


def status(
    age: float, steps: int, hit: int, prompt: int, told: float | None = None
) -> dict[str, Any]:
    """Return what the server says of itself `age` seconds ago; `told`: when the page had it."""
    latency = {"p50": None, "p99": None}
    return {
        "age_seconds": age if told is None else told,
        "time": 1_800_000_000 - age,
        "steps": steps,
        "generated_tokens": steps,
        "hit_tokens": hit,
        "prompt_tokens": prompt,
        "running": 0,
        "waiting": 0,
        "joined": 0,
        "memory": {"kv": 1},
        "memory_limits": {"kv": 2},
        "time_to_first_token_seconds": latency,
        "inter_token_seconds": latency,
    }


def charts(visit: Visit, past: list[dict[str, Any]]) -> dict[str, Any]:
    told = json.loads(visit.page.evaluate(CHARTS, json.dumps(past)))
    assert isinstance(told, dict)
    return told


def lines_of(chart: dict[str, Any]) -> list[list[tuple[float, float]]]:
    """The points of each line of a chart, all of whose strokes are level or upright."""
    assert set(chart["path"]) <= set("MHV 0123456789.-"), chart["path"]
    lines: list[list[tuple[float, float]]] = []
    x = y = 0.0
    for part in chart["path"].replace("M", "|M").split("|")[1:]:
        head, *rest = part.replace("H", "~H").replace("V", "~V").split("~")
        x, y = (float(each) for each in head[1:].split())
        line = [(x, y)]
        for step in rest:
            number = float(step[1:])
            x, y = (number, y) if step[0] == "H" else (x, number)
            line.append((x, y))
        lines.append(line)
    return lines


def test_a_burst_after_a_quiet_time_is_no_ramp(visit: Visit) -> None:
    """Idle from 290 s to 10 s ago, then one burst of five seconds."""
    past = [
        status(295, 0, 0, 0),
        status(290, 100, 0, 100),
        status(10, 100, 0, 100),
        status(5, 200, 90, 200),
    ]
    told = charts(visit, past)
    (line,) = lines_of(told["Steps a second"])
    heights = [y for _, y in line]
    width = max(x for x, _ in line)
    quiet = [x for (x, y), (_, z) in zip(line, line[1:], strict=False) if y == z == max(heights)]
    assert quiet and min(quiet) < 0.1 * width, "a quiet time lies at the bottom, all of it"
    rising = [(x, z) for (x, y), (z, w) in zip(line, line[1:], strict=False) if y != w]
    assert all(x == z for x, z in rising), "it rises in no time"


def test_a_time_of_which_nothing_is_known_is_a_gap(visit: Visit) -> None:
    """The tab was hidden for minutes in which the server worked."""
    past = [status(290, 0, 0, 0), status(289, 10, 0, 10), status(9, 5000, 4, 4000)]
    past += [status(8, 5010, 9, 4010)]
    told = charts(visit, past)
    for title in ("Steps a second", "Hit rate", "Running, waiting"):
        lines = lines_of(told[title])
        assert len(lines) == 2, title
        gap = lines[1][0][0] - lines[0][-1][0]
        assert gap > 200, (title, "no line where nothing is known")


def test_messages_that_come_at_once_are_no_peak(visit: Visit) -> None:
    """A rate goes by the server's clock, not by that of the network."""
    past = [status(20, 0, 0, 0), status(15, 50, 0, 0), status(10, 100, 0, 0, told=5.01)]
    told = charts(visit, [*past, status(5, 150, 0, 0)])
    (line,) = lines_of(told["Steps a second"])
    assert len({y for _, y in line}) == 1
    assert "10" in told["Steps a second"]["text"]


def test_the_hit_rate_has_a_scale(visit: Visit) -> None:
    past = [status(20, 1, 0, 0), status(15, 2, 50, 100), status(10, 3, 50, 100)]
    past += [status(5, 4, 150, 200)]
    told = charts(visit, past)
    assert "100 %" in told["Hit rate"]["text"]
    first, second = lines_of(told["Hit rate"])
    assert first[0][1] == first[-1][1] and second[0][1] == second[-1][1], "no slanted stroke"
    assert first[-1][0] - first[0][0] > 10, "as long as the time of which it tells"
    assert second[0][1] < first[0][1]


@SIZES
def test_labels_of_the_gauges_are_whole_and_bars_aligned(visit: Visit, size: Any) -> None:
    page = visit.page
    page.set_viewport_size(size)
    visit.ask("Something to do for the gauges.")
    visit.open("live")
    expect(page.locator(".gauges .card").first).to_be_visible()
    expect(page.locator(".gauges .card").filter(has_text="First token")).to_contain_text("p99")
    cut = page.locator(".gauges .card *:not(svg, svg *), .meters *").evaluate_all(
        "(all) => all.filter((one) => one.scrollWidth > one.clientWidth + 1"
        " && getComputedStyle(one).display !== 'inline').map((one) => one.textContent)"
    )
    assert cut == []
    ends = page.locator(".meter").evaluate_all(
        "(all) => all.map((one) => one.getBoundingClientRect())"
        ".map(({left, right}) => `${left} ${right}`)"
    )
    assert len(ends) > 2
    assert len(set(ends)) == 1
