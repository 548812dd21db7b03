"""Files besides pictures: texts, PDF documents, and what is too large."""

from __future__ import annotations

import json
import re
from pathlib import Path

import PIL.Image
import pytest
from browser import SMALL_SERVER, Visit
from playwright.sync_api import Browser, FilePayload, expect
from server_process import server_process

DROP = """([name, size, type]) => {
    window.read = 0;
    const before = Blob.prototype.arrayBuffer;
    Blob.prototype.arrayBuffer = function () { window.read += 1; return before.call(this); };
    const data = new DataTransfer();
    data.items.add(new File([new Uint8Array(size)], name, {type}));
    const facts = {bubbles: true, cancelable: true, dataTransfer: data};
    document.querySelector(".conversation").dispatchEvent(new DragEvent("drop", facts));
}"""


def drop(visit: Visit, name: str, size: int, kind: str) -> None:
    visit.page.evaluate(DROP, [name, size, kind])


def test_a_video_that_is_too_large_is_told_before_it_is_read(visit: Visit) -> None:
    page = visit.page
    requests: list[str] = []
    page.wait_for_load_state("networkidle")
    page.on("request", lambda request: requests.append(request.url))
    drop(visit, "holiday.mp4", 70_000_000, "video/mp4")
    expect(page.locator(".notice")).to_have_text(
        "holiday.mp4 has 66.8 MiB, and 89 MiB as it is sent. "
        "This server takes requests of up to 64 MiB."
    )
    expect(page.locator(".attachment")).to_have_count(0)
    assert page.evaluate("() => window.read") == 0
    assert requests == []


def test_the_limit_is_that_of_the_server_and_of_all_files(browser: Browser) -> None:
    with server_process(*SMALL_SERVER, "--max-body-size", "40KiB") as server:
        visit = Visit(browser, server.url)
        visit.open()
        page = visit.page
        drop(visit, "a.png", 31_000, "image/png")
        expect(page.locator(".notice")).to_contain_text("takes requests of up to 40 KiB")
        drop(visit, "b.png", 20_000, "image/png")
        expect(page.locator(".attachment")).to_have_count(1)
        drop(visit, "c.png", 20_000, "image/png")
        expect(page.locator(".notice")).to_contain_text("c.png does not fit beside the other files")
        expect(page.locator(".attachment")).to_have_count(1)
        visit.close()


@pytest.mark.parametrize(
    ("name", "kind", "content"),
    [
        ("empty.txt", "text/plain", b""),
        ("empty.png", "image/png", b""),
        ("empty.pdf", "application/pdf", b""),
        ("blank.md", "text/markdown", b" \n\t\n"),
        ("mark.csv", "text/csv", b"\xef\xbb\xbf"),
    ],
)
def test_an_empty_file_is_refused(visit: Visit, name: str, kind: str, content: bytes) -> None:
    page = visit.page
    chosen = page.get_by_label("Pictures, videos and texts", exact=True)
    full: FilePayload = {"name": "full.txt", "mimeType": "text/plain", "buffer": b"1"}
    empty: FilePayload = {"name": name, "mimeType": kind, "buffer": content}
    chosen.set_input_files([empty, full])
    expect(page.locator(".notice")).to_have_text(f"{name} is empty.")
    expect(page.locator(".attachment")).to_have_text([re.compile("full.txt")])


def test_a_text_is_part_of_the_question(visit: Visit, tmp_path: Path) -> None:
    page = visit.page
    notes = tmp_path / "notes.md"
    notes.write_text("# Größe\n\n```\n42\n```\n", encoding="utf-8")
    visit.choose(notes)
    expect(page.locator(".attachment .file")).to_contain_text("notes.md")
    with page.expect_request("**/v1/chat/completions") as asked:
        visit.ask("How large?")
    body = asked.value.post_data_json
    assert body is not None
    assert body["messages"][-1]["content"] == [
        {"type": "text", "text": "notes.md:\n````\n# Größe\n\n```\n42\n```\n````\n\n"},
        {"type": "text", "text": "How large?"},
    ]
    expect(page.locator(".question .file")).to_contain_text("notes.md")
    page.reload()
    expect(page.locator(".question .file")).to_contain_text("notes.md")
    with page.expect_request("**/v1/chat/completions") as asked:
        visit.ask("And again?")
    assert "42" in json.dumps(asked.value.post_data_json)


def test_a_pdf_is_a_file_of_the_question(visit: Visit, tmp_path: Path) -> None:
    page = visit.page
    PIL.Image.new("RGB", (200, 300), "white").save(tmp_path / "Report.PDF", "PDF")
    visit.choose(tmp_path / "Report.PDF")
    expect(page.locator(".attachment .file")).to_contain_text("Report.PDF")
    with page.expect_request("**/v1/chat/completions") as asked:
        visit.ask("What is this?")
    body = asked.value.post_data_json
    assert body is not None
    part, _ = body["messages"][-1]["content"]
    assert part["type"] == "file" and part["file"]["filename"] == "Report.PDF"
    assert part["file"]["file_data"].startswith("data:application/pdf;base64,JVBERi")
    expect(page.locator(".turn .legend")).to_contain_text("picture or video")
