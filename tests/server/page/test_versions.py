"""An edited question begins another version, and the earlier one is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from browser import Visit
from playwright.sync_api import expect


def edit(visit: Visit, turn: int, text: str) -> None:
    page = visit.page
    page.locator(".turn").nth(turn).get_by_role("button", name="Edit this question").click()
    visit.page.locator(".composer textarea").fill(text)
    page.keyboard.press("Enter")
    expect(page.locator(".typed")).to_have_count(turn + 1)
    page.get_by_role("button", name="Send").wait_for()


def talk(visit: Visit) -> None:
    """Two questions; the second has two versions, the first then too."""
    visit.upload("shapes.png")
    visit.ask("What color is the star?")
    visit.ask("Where is the triangle?")
    edit(visit, 1, "What color is the circle?")
    edit(visit, 0, "What color is the triangle?")


def test_one_goes_back_and_forth_between_versions(visit: Visit) -> None:
    page = visit.page
    talk(visit)
    versions = page.locator(".versions")
    expect(page.locator(".typed")).to_have_text(["What color is the triangle?"])
    expect(versions).to_have_text(["2 of 2"])
    page.get_by_role("button", name="Earlier version").click()
    expect(page.locator(".typed")).to_have_text(
        ["What color is the star?", "What color is the circle?"]
    )
    expect(versions).to_have_text(["1 of 2", "2 of 2"])
    versions.nth(1).get_by_role("button", name="Earlier version").click()
    expect(page.locator(".markdown")).to_have_text(
        ["The star is red.", "The triangle is at the top right."]
    )
    expect(versions.nth(1).get_by_role("button", name="Earlier version")).to_be_disabled()
    page.reload()
    expect(page.locator(".versions")).to_have_text(["1 of 2", "1 of 2"])
    page.locator(".versions").first.get_by_role("button", name="Later version").click()
    expect(page.locator(".typed")).to_have_text(["What color is the triangle?"])
    expect(page.locator(".question img")).to_have_js_property("naturalWidth", 240)


def test_a_request_has_the_version_that_is_shown(visit: Visit) -> None:
    page = visit.page
    talk(visit)
    page.get_by_role("button", name="Earlier version").click()
    with page.expect_request("**/v1/chat/completions") as asked:
        visit.ask("What color is the circle?")
    sent = json.dumps(asked.value.post_data_json)
    assert "What color is the star?" in sent
    assert "What color is the triangle?" not in sent
    assert "Where is the triangle?" not in sent


def test_asking_again_keeps_the_first_answer(visit: Visit) -> None:
    page = visit.page
    visit.ask("Hello?")
    page.get_by_role("button", name="Ask again").click()
    expect(page.locator(".versions")).to_have_text(["2 of 2"])
    expect(page.locator(".numbers-line")).to_be_visible()
    page.get_by_role("button", name="Earlier version").click()
    expect(page.locator(".markdown")).not_to_be_empty()


def test_an_edit_is_left(visit: Visit) -> None:
    page = visit.page
    visit.upload("shapes.png")
    visit.ask("What color is the star?")
    page.get_by_role("button", name="Edit this question").click()
    expect(page.locator(".attachment")).to_have_count(1)
    page.get_by_role("button", name="Leave it as it was").click()
    expect(page.locator(".attachment")).to_have_count(0)
    visit.ask("Where is the triangle?")
    expect(page.locator(".turn")).to_have_count(2)
    expect(page.locator(".versions")).to_have_count(0)


def export(visit: Visit) -> Path:
    with visit.page.expect_download() as download:
        visit.page.get_by_role("button", name="Export as JSON").click()
    return Path(download.value.path())


def bring_back(visit: Visit, content: bytes) -> None:
    file = {"name": "talk.json", "mimeType": "application/json", "buffer": content}
    visit.page.get_by_label("Exported conversation").set_input_files(file)  # type: ignore[arg-type]


NAMES = {"id", "created", "updated", "branches"}


def shared(told: Any, other: Any) -> Any:
    """What an export says in fields that another one has, whatever its things are called."""
    if isinstance(told, dict):
        names = (told.keys() & other.keys()) - NAMES
        return {name: shared(told[name], other[name]) for name in names}
    if isinstance(told, list) and len(told) == len(other):
        return [shared(each, its) for each, its in zip(told, other, strict=True)]
    return told


def test_an_export_comes_back_whole(visit: Visit) -> None:
    """With pictures, versions, options and what was reused."""
    page = visit.page
    talk(visit)
    page.get_by_role("button", name="Earlier version").click()
    content = export(visit).read_bytes()
    page.get_by_role("button", name="Delete What color is the star?").focus()
    page.keyboard.press("Enter")
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(page.locator(".turn")).to_have_count(0)
    bring_back(visit, content)
    expect(page.locator(".versions")).to_have_text(["1 of 2", "2 of 2"])
    expect(page.locator(".question img").first).to_have_js_property("naturalWidth", 240)
    expect(page.locator(".numbers-line")).to_have_count(2)
    again = json.loads(export(visit).read_bytes())
    assert len(again["branches"]) == 2
    first = json.loads(content)
    assert shared(first, again) == shared(again, first)
    assert again["turns"][0]["answer"]["report"]["segments"]
    assert again["turns"][0]["media"] == first["turns"][0]["media"]
    page.get_by_role("button", name="Earlier version").last.click()
    expect(page.locator(".typed").last).to_have_text("Where is the triangle?")
    visit.ask("What color is the circle?")
    expect(page.locator(".markdown").last).to_have_text("The circle is blue.")
    page.reload()
    expect(page.locator(".turn")).to_have_count(3)


def test_what_is_no_export_is_told(visit: Visit) -> None:
    page = visit.page
    turn = {"text": "x", "media": [{"kind": "image", "name": "x", "url": "https://example.org/x"}]}
    for content, told in (
        (b"no", "talk.json: The file is not JSON."),
        (b"[]", "talk.json: The file is no conversation that this page has exported."),
        (json.dumps({"options": {}, "turns": [turn]}).encode(), "talk.json: A picture or video"),
    ):
        bring_back(visit, content)
        expect(page.locator(".notice")).to_contain_text(told)
    strange = {
        "title": 3,
        "options": {"system": {}},
        "turns": [{"text": "<b>x</b>", "answer": {"text": [], "report": {"prompt_tokens": 9}}}],
        "branches": {"start": {"active": 7, "tails": [3]}, "y": 1},
    }
    bring_back(visit, json.dumps(strange).encode())
    expect(page.locator(".typed")).to_have_text("<b>x</b>")
    expect(page.locator(".versions")).to_have_count(0)


def test_conversations_are_found_and_renamed(visit: Visit) -> None:
    page = visit.page
    visit.ask("Where is the lighthouse?")
    page.keyboard.press("Alt+n")
    visit.ask("What is in the harbour?")
    names = page.locator(".sidebar .open")
    search = page.get_by_label("Search the conversations")
    search.fill("LIGHT where")
    expect(names).to_have_text(["Where is the lighthouse?"])
    search.fill("zeppelin")
    expect(names).to_have_count(0)
    expect(page.locator(".sidebar")).to_contain_text("No conversation has these words.")
    search.fill("")
    names.nth(1).hover()
    page.get_by_role("button", name="Rename Where is the lighthouse?").click()
    page.get_by_role("dialog").get_by_label("Name").fill("A tower")
    page.keyboard.press("Enter")
    expect(names.filter(has_text="A tower")).to_have_count(1)
    page.reload()
    expect(names.filter(has_text="A tower")).to_have_count(1)
    search.fill("lighthouse")
    expect(names).to_have_text(["A tower"])
