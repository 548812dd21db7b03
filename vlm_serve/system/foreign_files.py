"""Names files that are not what a checkpoint should hold, for error messages."""

from __future__ import annotations

from pathlib import Path

_HEAD_BYTES = 512
_GGUF = b"GGUF"
_KINDS = (
    (b"version https://git-lfs.github.com/", "is a Git LFS pointer: run `git lfs pull` there"),
    (_GGUF, "is a GGUF file: name it as the model, without a checkpoint's folder"),
    (b"PK\x03\x04", "is a PyTorch or zip archive, which is not supported: take the safetensors"),
)
_PAGES = (b"<!doctype html", b"<html")


def is_gguf(path: Path) -> bool:
    """Return True for a GGUF file, by its first bytes."""
    try:
        with path.open("rb") as file:
            return file.read(len(_GGUF)) == _GGUF
    except OSError:
        return False


def foreign(path: Path) -> str | None:
    """Return the end of a sentence about a file of another kind; None if it is of none known."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return None
    for start, description in _KINDS:
        if head.startswith(start):
            return description
    page = head.lstrip().lower().startswith(_PAGES)
    return "is a web page, not the file: download it again" if page else None
