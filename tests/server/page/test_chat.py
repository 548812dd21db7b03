"""The view Chat, with a real model behind it."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
from pathlib import Path

import httpx
import pytest
from browser import MEDIA, Visit, answer_of, reuse_of
from playwright.sync_api import Route, expect

PICTURE = "shapes.png"

BRING = """([type, selector, name, mime, bytes]) => {
    const data = new DataTransfer();
    const content = Uint8Array.from(atob(bytes), (letter) => letter.charCodeAt(0));
    data.items.add(new File([content], name, {type: mime}));
    const facts = {bubbles: true, cancelable: true};
    const event = type === "paste"
        ? new ClipboardEvent(type, {...facts, clipboardData: data})
        : new DragEvent(type, {...facts, dataTransfer: data});
    document.querySelector(selector).dispatchEvent(event);
}"""


def bring(visit: Visit, kind: str, where: str, path: Path, mime: str) -> None:
    """What a browser does when a file is dropped or pasted."""
    content = base64.b64encode(path.read_bytes()).decode()
    visit.page.evaluate(BRING, [kind, where, path.name, mime, content])


def endless(route: Route) -> None:
    """The same request for an answer that goes on and on."""
    body = json.loads(route.request.post_data or "")
    body |= {"ignore_eos": True, "max_tokens": 3000}
    route.continue_(post_data=json.dumps(body))


def test_the_second_question_about_a_picture_encodes_nothing(visit: Visit) -> None:
    url = f"{visit.url}/v1/cache/flush"
    httpx.post(url, json={}, timeout=60, trust_env=False).raise_for_status()
    page = visit.page
    visit.upload(PICTURE)
    visit.ask("What color is the star?")
    assert answer_of(page, 0) == "The star is red."
    assert "1 picture encoded" in reuse_of(page, 0)
    visit.ask("Where is the triangle?")
    assert answer_of(page, 1) == "The triangle is at the top right."
    assert "no picture encoded again" in reuse_of(page, 1)
    expect(page.locator(".turn").nth(1).locator(".part.device")).to_have_count(1)
    page.locator(".reuse-of summary").nth(1).click()
    told = page.locator(".turn").nth(1).locator(".sentences")
    expect(told).to_contain_text("none went through the vision encoder again")
    expect(told).to_contain_text("the rest of the prompt is new")


@pytest.mark.parametrize(
    ("kind", "where"), [("drop", ".conversation"), ("paste", ".composer textarea")]
)
def test_a_picture_comes_by_drop_and_by_paste(visit: Visit, kind: str, where: str) -> None:
    bring(visit, kind, where, MEDIA / PICTURE, "image/png")
    expect(visit.page.locator(".attachment img")).to_have_count(1)
    visit.ask("What color is the circle?")
    assert answer_of(visit.page, 0) == "The circle is blue."
    expect(visit.page.locator(".question img")).to_be_visible()


def test_what_is_no_picture_video_or_text_is_refused_by_name(visit: Visit, tmp_path: Path) -> None:
    (tmp_path / "data.bin").write_bytes(b"\0\xff\xfe")
    bring(visit, "drop", ".conversation", tmp_path / "data.bin", "application/octet-stream")
    expect(visit.page.locator(".notice")).to_have_text(
        "data.bin is neither a picture, a video, a PDF document nor a text."
    )
    expect(visit.page.locator(".attachment")).to_have_count(0)


def test_a_video_is_asked_about_and_shown_in_place(visit: Visit) -> None:
    visit.upload("change.mp4")
    visit.ask("What happens?")
    assert answer_of(visit.page, 0) == "A red circle turns blue at second 4."
    expect(visit.page.locator(".question video")).to_have_attribute("src", re.compile("^blob:"))
    visit.ask("What happens?")
    assert "no video encoded again" in reuse_of(visit.page, 1)


def test_an_answer_streams_and_stops(visit: Visit, server_url: str) -> None:
    page = visit.page
    page.route("**/v1/chat/completions", endless)
    visit.ask("Hello?", wait=False)
    expect(page.locator(".markdown p").first).not_to_be_empty()
    expect(page.locator(".answer")).to_have_attribute("aria-busy", "true")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".answer .note")).to_have_text("Stopped.")
    assert answer_of(page, 0)
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    for _ in range(200):
        load = httpx.get(f"{server_url}/load", timeout=60, trust_env=False).json()
        if load["server_load"] == 0:
            return
        page.wait_for_timeout(50)
    raise AssertionError("the server goes on with an answer that nobody waits for")


def test_a_conversation_is_there_after_a_reload(visit: Visit) -> None:
    page = visit.page
    visit.upload(PICTURE)
    visit.ask("What color is the star?")
    page.reload()
    expect(page.locator(".markdown")).to_have_text("The star is red.")
    expect(page.locator(".question img")).to_be_visible()
    expect(page.locator(".question img")).to_have_js_property("naturalWidth", 240)
    assert "first token" in reuse_of(page, 0)
    visit.ask("What color is the circle?")
    assert answer_of(page, 1) == "The circle is blue."


def test_a_question_is_edited_and_an_answer_asked_for_again(visit: Visit) -> None:
    page = visit.page
    visit.upload(PICTURE)
    visit.ask("What color is the star?")
    visit.ask("Where is the triangle?")
    page.get_by_role("button", name="Edit this question").first.click()
    expect(page.locator(".attachment img")).to_have_count(1)
    page.keyboard.press("Control+a")
    page.keyboard.type("What color is the circle?")
    page.keyboard.press("Enter")
    expect(page.locator(".markdown")).to_have_text(["The circle is blue."])
    page.get_by_role("button", name="Ask again").click()
    expect(page.locator(".markdown")).to_have_text(["The circle is blue."])
    expect(page.locator(".numbers-line")).to_contain_text("no picture encoded again")


def test_conversations_are_kept_apart_and_deleted(visit: Visit) -> None:
    page = visit.page
    visit.ask("One?")
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator(".turn")).to_have_count(0)
    visit.ask("Two?")
    names = page.locator(".sidebar .open")
    expect(names).to_have_text(["Two?", "One?"])
    names.nth(1).click()
    expect(page.locator(".typed")).to_have_text("One?")
    page.get_by_role("button", name="Delete One?").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(names).to_have_text(["Two?"])
    page.reload()
    expect(names).to_have_text(["Two?"])


def test_options_are_part_of_the_request_and_checked(visit: Visit) -> None:
    page = visit.page
    page.get_by_role("button", name="Options").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("System prompt").fill("Be brief.")
    dialog.get_by_label("Temperature").fill("0")
    dialog.get_by_label("Longest answer").fill("2")
    dialog.get_by_label("Tools").fill("{}")
    dialog.get_by_role("button", name="Use these options").click()
    expect(dialog.get_by_role("alert")).to_have_text("Tools must be a JSON list.")
    dialog.get_by_label("Tools").fill("")
    dialog.get_by_role("button", name="Use these options").click()
    with page.expect_request("**/v1/chat/completions") as asked:
        visit.ask("Hello?")
    body = asked.value.post_data_json
    assert body is not None
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (body["temperature"], body["max_tokens"]) == (0, 2)
    assert "top_p" not in body
    expect(page.locator(".answer .note")).to_have_text("The answer reached its maximum length.")


def test_an_export_holds_the_conversation(visit: Visit) -> None:
    visit.upload(PICTURE)
    visit.ask("What color is the star?")
    with visit.page.expect_download() as download:
        visit.page.get_by_role("button", name="Export as JSON").click()
    told = json.loads(Path(download.value.path()).read_text())
    (turn,) = told["turns"]
    assert (turn["text"], turn["answer"]["text"]) == ("What color is the star?", "The star is red.")
    encoded = turn["media"][0]["url"].removeprefix("data:image/png;base64,")
    assert base64.b64decode(encoded) == (MEDIA / PICTURE).read_bytes()


def test_the_curl_command_runs_and_a_name_is_no_code(visit: Visit, tmp_path: Path) -> None:
    """Neither what was typed nor the name of a file is anything to a shell."""
    page = visit.page
    page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=visit.url)
    picture = tmp_path / "$(touch owned)`touch owned`'\".png"
    picture.write_bytes((MEDIA / PICTURE).read_bytes())
    visit.choose(picture)
    visit.ask("What color is the star? $(touch owned) `touch owned` \\ 'and' \"so\"")
    page.get_by_role("button", name="Copy as a curl command").click()
    expect(page.locator(".notice")).to_contain_text("on the clipboard")
    command = page.evaluate("() => navigator.clipboard.readText()")
    (name,) = re.findall(r"base64 -w0 (\S+)\)", command)
    picture.rename(tmp_path / name)
    with page.expect_request("**/v1/chat/completions") as asked:
        page.get_by_role("button", name="Ask again").click()
    # A server that only keeps what it was sent.
    script = tmp_path / "curl"
    script.write_text(f"#!/bin/sh\nexec cat > {tmp_path}/body\n")
    script.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["sh", "-c", command], cwd=tmp_path, env=environment, check=True)
    assert json.loads((tmp_path / "body").read_text()) == asked.value.post_data_json
    assert not (tmp_path / "owned").exists()
    expect(page.locator(".answer")).to_have_attribute("aria-busy", "false")


def test_tabs_of_one_browser_share_conversations(visit: Visit) -> None:
    other = visit.tab()
    visit.open(page=other)
    visit.ask("One?")
    expect(other.locator(".sidebar .open")).to_have_text(["One?"])
