"""The documents that show the way name files and headings that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
SUFFIXES = {".py", ".md", ".h", ".cpp"}


def anchors(path: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).strip().replace(" ", "-") for each in headings}


def sources() -> list[Path]:
    """Files with text of our own."""
    folders = ("benchmarks", "cache", "docs", "examples", "kernels", "preprocess", "tests")
    found = [*ROOT.glob("*.md")]
    for folder in (*folders, "vlm_serve"):  # whose links are not followed
        found += [each for each in (ROOT / folder).rglob("*") if each.suffix in SUFFIXES]
    return found


def test_references_to_a_heading_lead_to_one() -> None:
    seen = 0
    for path in sources():
        text = path.read_text(encoding="utf-8")
        for name, anchor in re.findall(r"(?:docs/|\()([\w-]+\.md)#([\w-]+)", text):
            seen += 1
            assert anchor in anchors(DOCS / name), f"{path.relative_to(ROOT)}: {name}#{anchor}"
    assert seen > 20


def test_no_document_is_cited_that_is_not_here() -> None:
    cited = re.compile(r"\(design, sections? \d")
    found = [path for path in sources() if cited.search(path.read_text(encoding="utf-8"))]
    assert not found


def test_files_that_the_map_names_exist() -> None:
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    folders = (ROOT, ROOT / "vlm_serve", ROOT / "vlm_serve" / "server")
    names = [name for name in re.findall(r"`([\w./*-]+)`", text) if "/" in name[1:]]
    assert len(names) > 50
    for name in names:
        assert name[0] == "/" or any(list(folder.glob(name.rstrip("/"))) for folder in folders), (
            name
        )


def test_the_glossary_is_in_order_and_says_a_word_once() -> None:
    text = (DOCS / "glossary.md").read_text(encoding="utf-8")
    words = re.findall(r"^\| ([\w -]+) \|", text, re.MULTILINE)[1:]
    assert words == sorted(set(words))
    assert len(words) > 30
