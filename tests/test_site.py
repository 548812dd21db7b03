"""The site of `make docs`: every page has one place in it, and every module one entry."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "docs" / "site"
INDEX = ROOT / "docs" / "index.md"
BUILDER = ROOT / ".venv" / "docs"
PRODUCT = ("vlm_serve", "cache", "kernels", "preprocess")


@pytest.fixture(scope="module")
def texts() -> Any:
    """The site's own module, which stands beside Sphinx's configuration."""
    spec = spec_from_file_location("module_texts", SITE / "module_texts.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def places() -> Counter[Path]:
    """Pages in the order of the site, with the number of their places."""
    found: Counter[Path] = Counter()
    for block in re.findall(r"^```\{toctree\}\n(.*?)^```", INDEX.read_text(), re.M | re.S):
        for line in block.splitlines():
            if line and not line.startswith(":"):
                name = (re.findall(r"<(.+)>", line) or [line])[0]
                paths = [path.resolve() for path in INDEX.parent.glob(f"{name}.md")]
                assert paths, f"there is no {name}.md"
                found.update(paths)
    return found


def test_every_page_has_one_place() -> None:
    found = places()
    assert set(found.values()) == {1}
    pages = {*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")} - {INDEX}
    pages |= {*(ROOT / "benchmarks").glob("*.md"), *(ROOT / "benchmarks" / "notes").glob("*.md")}
    assert pages <= found.keys()


def test_every_module_is_found_once(texts: Any) -> None:
    names = Counter(name for folder in PRODUCT for name, _ in texts.modules_of(ROOT / folder))
    assert set(names.values()) == {1}
    files = [
        each for name in ("cache", "kernels", "preprocess") for each in (ROOT / name).rglob("*.py")
    ]
    own = [each for each in (ROOT / "vlm_serve").rglob("*.py") if each.resolve() == each]
    assert len(names) == len({each.resolve() for each in [*files, *own]})
    assert {"vlm_serve", "vlm_serve.cache.trie", "vlm_serve.pipeline.pipeline"} <= names.keys()


def test_an_entry_has_the_public_names_with_their_first_paragraphs(texts: Any) -> None:
    found = dict(texts.modules_of(ROOT / "cache"))["vlm_serve.cache.trie"]
    named = dict(texts.public_names(found))
    assert named and all(not name.startswith("_") for name in named)
    assert texts.beginning("One\ntwo.\n\nMore.") == "One two."


def test_the_builder_is_pinned() -> None:
    lines = (SITE / "requirements.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert pins == sorted(pins, key=lambda pin: pin.split("==")[0])
    assert all(re.fullmatch(r"[a-z0-9-]+==[\w.]+", pin) for pin in pins)
    assert {"sphinx", "furo", "myst-parser"} <= {pin.split("==")[0] for pin in pins}


def test_names_of_the_reference_are_those_of_the_package() -> None:
    import vlm_serve

    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    shown = re.findall(r"autoclass:: ([\w.]+)\.(\w+)$", text, re.M)
    errors = {"FailedItemsError", "VlmServeError", "__version__"}  # Errors have their own page.
    assert {name for _, name in shown} == set(vlm_serve.__all__) - errors
    for module, name in shown:
        assert vlm_serve._HOME[name] == module
    assert "automodule:: vlm_serve.errors" in text


@pytest.mark.processes
@pytest.mark.skipif(
    find_spec("sphinx") is None and not BUILDER.is_dir(), reason="needs the builder of `make docs`"
)
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    paths = [str(BUILDER), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-E", "-W", "--keep-going"]
        + ["-d", str(tmp_path / "trees"), "-c", str(SITE), str(ROOT), str(tmp_path / "site")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    site = tmp_path / "site"
    assert "url=docs/index.html" in (site / "index.html").read_text()
    assert (site / "searchindex.js").stat().st_size > 100_000
    pages = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    assert "max_tokens" in pages[site / "docs" / "reference.html"]
    for path, text in pages.items():
        for source in re.findall(r'<(?:script|link|img)[^>]* (?:src|href)="([^"#]+)"', text):
            assert "://" not in source, f"{path.name} needs a network for {source}"
            if not source.startswith("data:"):
                assert (path.parent / source.split("?")[0]).exists(), f"{path.name}: {source}"
