"""The files of this house that are written here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("vlm_serve", "cache", "kernels", "preprocess")
OTHERS = ("tests", "benchmarks", "examples", "release", "train_demo")
LINKS = ("cache", "kernels", "preprocess")


def python_files(folder: Path) -> Iterator[Path]:
    """Yield the source files below a folder; links are not followed, so each appears once."""
    yield from own_files(folder, (".py",))


def own_files(folder: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    """Yield the files of some kinds below a folder, without those of others in `vendor`."""
    for path in sorted(folder.rglob("*")):
        linked = any(ROOT / "vlm_serve" / link in path.parents for link in LINKS)
        if path.suffix in suffixes and not linked and "vendor" not in path.parts:
            yield path
