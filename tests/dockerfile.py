"""Reads the Dockerfile, as far as ours goes: one stage, no escapes but continued lines."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCKERFILE = ROOT / "Dockerfile"


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: its name in capitals, and what follows it on one line."""

    name: str
    text: str

    @property
    def words(self) -> list[str]:
        """The text as words, or as the JSON list that it is."""
        return json.loads(self.text) if self.text.startswith("[") else self.text.split()


def read(path: Path = DOCKERFILE) -> list[Instruction]:
    """All instructions, in their order."""
    lines = path.read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    joined = re.sub(r"\s*\\\n\s*", " ", text)
    return [
        Instruction(*line.split(maxsplit=1)) for line in map(str.strip, joined.splitlines()) if line
    ]


def arguments(given: dict[str, str]) -> dict[str, str]:
    """Every ARG with its default or what is given for it.

    Raises:
        SystemExit: there is no such argument.
    """
    declared = dict(each.text.split("=", 1) for each in read() if each.name == "ARG")
    if unknown := given.keys() - declared.keys():
        raise SystemExit(f"the Dockerfile has no ARG {', '.join(sorted(unknown))}")
    return declared | given


def copies() -> list[tuple[list[str], str]]:
    """Of every COPY: the sources, as named below the repository, and the target."""
    found = [each.words for each in read() if each.name == "COPY"]
    return [(words[:-1], words[-1]) for words in found]
