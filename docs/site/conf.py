"""The documents as a site: `make docs`. Sphinx reads the checkout, so links hold as they are.

Pages are the Markdown files that a reader opens on any forge. `docs/index.md` orders them.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(HERE), str(ROOT)]

project = "vlm-serve"
author = "vlm-serve developers"
language = "en"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "module_pages"]

root_doc = "docs/index"
include_patterns = [
    "*.md",
    "docs/*.md",
    "benchmarks/*.md",
    "release/*.md",
    "benchmarks/notes/*.md",
    "examples/**/README.md",
    "vlm_serve/eval/README.md",
]
# The links of the three folders would show everything in them twice.
exclude_patterns = [".*", "build", "dist", "checkpoints", "tests", "**/node_modules"]
exclude_patterns += [f"vlm_serve/{name}" for name in ("cache", "kernels", "preprocess")]

myst_enable_extensions = ["html_image"]
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # Folded parts of a page may have smaller headings.

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = "vlm-serve"
html_theme_options = {"navigation_with_keys": True}
html_show_sphinx = False
html_copy_source = False
html_show_sourcelink = False
html_css_files = ["site.css"]
html_static_path = ["static"]

_LINK = re.compile(r"(?<!!)\[([^\]\n]*)\]\(([^)#:\s]+)\)")


def _follow_folders(app: Any, name: str, source: list[str]) -> None:
    """Lead links to folders to their README.md; where there is none, keep the text alone."""
    folder = (ROOT / name).parent

    def replaced(found: re.Match[str]) -> str:
        text, target = found.groups()
        if not (folder / target).is_dir():
            return found[0]
        if (folder / target / "README.md").is_file():
            return f"[{text}]({target.rstrip('/')}/README.md)"
        return text

    source[0] = _LINK.sub(replaced, source[0])


def _send_to_the_start(app: Any, error: Exception | None) -> None:
    """Write the page that a browser opens first."""
    if error is None and app.builder.format == "html":
        page = (
            '<!doctype html><meta charset="utf-8"><title>vlm-serve</title>'
            '<meta http-equiv="refresh" content="0; url=docs/index.html">'
            '<a href="docs/index.html">vlm-serve</a>\n'
        )
        (Path(app.outdir) / "index.html").write_text(page, encoding="utf-8")


def setup(app: Any) -> None:
    app.connect("source-read", _follow_folders)
    app.connect("build-finished", _send_to_the_start)
