"""Renders pages of PDF documents, with pdfium (the extra `media`).

A page counts as a picture: a file of its own, its number with the document's bytes behind it. So it
has a key like any upload, and a known page is not rendered again. Only decoding processes open
documents.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import PIL.Image

from vlm_serve.errors import MediaError
from vlm_serve.preprocess.media.limits import MediaLimits

PACKAGE = "pypdfium2"
MAX_PAGES = 100
"""Pages of a document that become pictures; longer documents are refused."""
_POINTS_PER_INCH = 72
_DOTS_PER_INCH = 144
_LONGEST = 2048
"""Pixels of a page's longer side at most: a poster is not more legible for a model."""
_DOMAIN = b"vlm-serve PDF page 1\0"
_NUMBER_BYTES = 4


@dataclass(frozen=True, slots=True)
class PdfPage:
    """A page of a document: its bytes and the page's index."""

    document: bytes
    index: int

    @property
    def packed(self) -> bytes:
        """The page as a file."""
        return _DOMAIN + self.index.to_bytes(_NUMBER_BYTES, "little") + self.document


def is_page(data: bytes | memoryview) -> bool:
    """Return True for a file made by `PdfPage.packed`."""
    return bytes(data[: len(_DOMAIN)]) == _DOMAIN


@cache
def renderer() -> str | None:
    """Return the package that renders pages, with its version; None if it is not installed."""
    try:
        return f"{PACKAGE} {version(PACKAGE)}"
    except PackageNotFoundError:
        return None


def count_pages(document: bytes) -> int:
    """Return the number of pages. Raises MediaError for a broken, encrypted or empty document."""
    with _opened(document) as pdf:
        if not len(pdf):
            raise MediaError("the PDF document has no pages")
        return len(pdf)


def render_page(data: bytes, limits: MediaLimits) -> PIL.Image.Image:
    """Render a packed page on white: 144 dots an inch, up to 2048 pixels a side, mode RGB.

    Raises MediaError if the document is broken, or its page has no size.
    """
    start = len(_DOMAIN) + _NUMBER_BYTES
    index = int.from_bytes(data[len(_DOMAIN) : start], "little")
    with _opened(data[start:]) as pdf:
        page = pdf[index]
        width, height = page.get_size()
        if not (0 < width < float("inf") and 0 < height < float("inf")):
            raise MediaError("a page of the document has no size")
        scale = min(_DOTS_PER_INCH / _POINTS_PER_INCH, _LONGEST / max(width, height))
        area = width * height * scale * scale
        if area > limits.max_image_pixels:
            scale *= (limits.max_image_pixels / area) ** 0.5 * 0.99
        bitmap = page.render(scale=scale, rev_byteorder=True, prefer_bgrx=False)
        picture: PIL.Image.Image = bitmap.to_pil()
        return picture.convert("RGB")


@contextlib.contextmanager
def _opened(document: bytes) -> Iterator[Any]:
    pdfium = import_module(PACKAGE)
    try:
        with contextlib.closing(pdfium.PdfDocument(document)) as pdf:
            pdf.init_forms()
            yield pdf
    except pdfium.PdfiumError as error:
        why = "needs a password" if "password" in str(error).lower() else "is damaged"
        raise MediaError(f"the PDF document {why}") from None
