"""The documents that show the way name files and headings that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from vlm_serve.cli import build_parser

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
SUFFIXES = {".py", ".md", ".h", ".cpp"}
WANTED = {
    "README.md": {
        "docs/architecture.md#where-something-new-goes",
        "docs/architecture.md#what-a-hit-guarantees",
        "docs/performance.md",
    },
    "docs/architecture.md": {
        "adding-a-model.md",
        "http-api.md",
        "performance.md#figures",
        "performance.md#how-to-read-a-low-hit-rate",
    },
}
"""What somebody who looks for it finds: a document -> links in it."""
NEW = {"model", "weight format", "kernel", "cache tier", "endpoint", "drafter", "metric", "option"}
"""What one may want to add."""


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


def documents() -> list[Path]:
    """Those that a reader opens."""
    return [*ROOT.glob("*.md"), *DOCS.glob("*.md")]


def linked(path: Path) -> set[Path]:
    """The documents that one leads to."""
    targets = re.findall(r"\]\(([^)#:]+\.md)(?:#[\w-]+)?\)", path.read_text(encoding="utf-8"))
    return {(path.parent / target).resolve() for target in targets}


def test_references_to_a_heading_lead_to_one() -> None:
    seen = 0
    for path in sources():
        text = path.read_text(encoding="utf-8")
        for name, anchor in re.findall(r"docs/([\w-]+\.md)#([\w-]+)", text):
            seen += 1
            assert anchor in anchors(DOCS / name), f"{path.relative_to(ROOT)}: {name}#{anchor}"
    assert seen > 20


def test_links_to_a_heading_lead_to_one() -> None:
    seen = 0
    for path in documents():
        text = path.read_text(encoding="utf-8")
        for name, anchor in re.findall(r"\]\(([^)#:]*)#([\w-]+)\)", text):
            seen += 1
            target = path.parent / name if name else path
            assert anchor in anchors(target), f"{path.relative_to(ROOT)}: {name}#{anchor}"
    assert seen > 25


def test_every_document_is_two_links_from_the_readme_at_most() -> None:
    first = linked(ROOT / "README.md")
    found = first | {page for path in first for page in linked(path)}
    assert set(documents()) - found <= {ROOT / "README.md"}


def test_what_one_looks_for_is_linked() -> None:
    for name, links in WANTED.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        for link in links:
            assert f"]({link})" in text, f"{name} does not link {link}"
    assert {"what-a-hit-guarantees", "replicas"} <= anchors(DOCS / "architecture.md")
    assert "how-to-read-a-low-hit-rate" in anchors(DOCS / "performance.md")


def test_the_map_says_where_everything_new_goes() -> None:
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    table = text.split("## Where something new goes")[1]
    rows = dict(re.findall(r"^\| ([\w ]+) \| (.+?) \|", table, re.MULTILINE))
    assert rows.keys() >= NEW
    for name in NEW - {"option"}:
        assert re.search(r"`[\w*<>/.-]+/[\w*<>/.-]*`", rows[name]), f"no place for a new {name}"


def test_scripts_and_targets_that_documents_name_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    scripts = 0
    for path in documents():
        text = path.read_text(encoding="utf-8")
        fenced = "\n".join(re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
        said = re.findall(r"`make ([a-z][\w-]+)", text)
        for name in said + re.findall(r"^make ([a-z][\w-]+)", fenced, re.MULTILINE):
            assert name in targets, f"{path.name}: make {name}"
        for name in re.findall(r"(?:benchmarks|examples|tests)/[\w/]+\.py", text):
            scripts += 1
            assert (ROOT / name).is_file(), f"{path.name}: {name}"
    assert scripts > 20


def test_commands_in_the_documents_are_accepted() -> None:
    seen = 0
    for path in documents():
        blocks = re.findall(r"^```\w*\n(.*?)^```", path.read_text("utf-8"), re.M | re.S)
        for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
            if line.startswith("vlm-serve "):
                words = shlex.split(line.split("|")[0], comments=True)[1:]
                seen += 1
                build_parser().parse_args([word for word in words if word != "&"])
    assert seen > 15


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
