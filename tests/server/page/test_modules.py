"""The page's files by themselves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from browser import MEDIA, Visit

from vlm_serve.server.http.static_page import PAGE_FOLDER

MOST_LINES = 300
MODULES = [path for path in sorted(PAGE_FOLDER.rglob("*.js")) if "vendor" not in path.parts]
FILES = [
    path
    for path in sorted(PAGE_FOLDER.rglob("*.*"))
    if not {"vendor", "examples"} & set(path.parts[len(PAGE_FOLDER.parts) :])
]
# What makes a text into code or elements, and what asks other hosts.
FORBIDDEN = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function"
    r"|localStorage.*[kK]ey|setTimeout\(\s*[\"'`]|createContextualFragment|importScripts"
    r"|https?://(?!www\.w3\.org/2000/svg)"
)
IMPORT = re.compile(r"^import .*? from \"([^\"]+)\";$", re.MULTILINE | re.DOTALL)


def name(path: Path) -> str:
    return path.relative_to(PAGE_FOLDER).as_posix()


@pytest.mark.parametrize("path", FILES, ids=name)
def test_a_file_fits_in_a_few_looks_and_turns_no_text_into_code(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= MOST_LINES
    allowed = "(?:https?:\\/\\/|mailto:)"  # the pattern of addresses that links may have
    assert FORBIDDEN.findall(text.replace(allowed, "")) == []


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_a_module_parses_and_exports_what_others_import(visit: Visit, path: Path) -> None:
    """Chromium links it with everything that it imports."""
    if name(path) == "main.js":
        return  # has run: it is what opened the page
    visit.page.evaluate("async (url) => Object.keys(await import(url))", f"/{name(path)}")


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_a_module_says_first_what_it_is(path: Path) -> None:
    assert path.read_text(encoding="utf-8").startswith("// ")


def test_every_module_is_used() -> None:
    used = {PAGE_FOLDER / "main.js", PAGE_FOLDER / "live" / "worker.js"}
    for path in MODULES:
        for target in IMPORT.findall(path.read_text(encoding="utf-8")):
            used.add((path.parent / target).resolve())
    assert set(MODULES) <= used


def test_arrows_between_parts_point_one_way() -> None:
    """The views know `shared`; `shared` knows none of them."""
    for path in (PAGE_FOLDER / "shared").iterdir():
        targets = IMPORT.findall(path.read_text(encoding="utf-8"))
        assert all(target.startswith("./") for target in targets), path


def test_libraries_come_with_their_licences() -> None:
    libraries = {path.stem for path in (PAGE_FOLDER / "vendor").glob("*.js")}
    assert libraries == {"marked", "purify", "katex", "highlight"}
    for path in (PAGE_FOLDER / "vendor" / "languages").iterdir():
        assert "Highlight.js" in path.read_text(encoding="utf-8")[:200]
    for library in (*libraries, "fonts"):
        licence = PAGE_FOLDER / "vendor" / f"{library}.LICENSE.txt"
        assert "Copyright" in licence.read_text(encoding="utf-8")


def test_examples_are_those_of_the_examples() -> None:
    for path in (PAGE_FOLDER / "examples").iterdir():
        if path.name != "change.png":  # the first frame of change.mp4
            assert path.read_bytes() == (MEDIA / path.name).read_bytes()


def test_every_language_that_is_named_is_there() -> None:
    text = (PAGE_FOLDER / "chat" / "highlighting.js").read_text(encoding="utf-8")
    named = re.findall(r"^  (\w+): \[", text, re.MULTILINE)
    assert named == sorted(path.stem for path in (PAGE_FOLDER / "vendor" / "languages").iterdir())


WORDS = """async () => {
    const words = await import("/shared/words.js");
    return [
        words.count(1234567), words.counted(1, "token"), words.counted(0, "token"),
        words.bytes(1023), words.bytes(1024), words.bytes(1.5 * 1024 ** 3),
        words.duration(0.25), words.duration(84.4), words.duration(1274),
        words.percent(0), words.percent(0.001), words.percent(0.5), words.percent(0.999),
        words.percent(1), words.listed(["a", "b", "c"]), words.listed(["a"]), words.listed([]),
    ];
}"""


def test_numbers_are_said_as_people_say_them(visit: Visit) -> None:
    thin = "\u202f"
    assert visit.page.evaluate(WORDS) == [
        *(f"1{thin}234{thin}567", "1 token", "0 tokens", "1020 B", "1 KiB"),
        *("1.5 GiB", "0.25 ms", "84 ms", "1.27 s", "0 %", "under 1 %", "50 %", "over 99 %"),
        *("100 %", "a, b and c", "a", ""),
    ]


EVENTS = """async () => {
    const {serverSentEvents} = await import("/shared/sse.js");
    const bytes = new TextEncoder().encode(
        ": hello\\n\\nid: 7\\nevent: tree\\ndata: {\\ndata: }\\n\\ndata:é\\r\\n\\r\\ndata: cut");
    const body = new ReadableStream({
        start(controller) {  // one byte at a time: a message and a letter may be cut anywhere
            for (const byte of bytes) controller.enqueue(Uint8Array.of(byte));
            controller.close();
        },
    });
    const told = [];
    for await (const message of serverSentEvents(new Response(body))) told.push(message);
    return told;
}"""


def test_server_sent_events_are_cut_anywhere(visit: Visit) -> None:
    assert visit.page.evaluate(EVENTS) == [
        {"event": "tree", "id": "7", "data": "{\n}"},
        {"event": "message", "id": None, "data": "é"},
    ]
