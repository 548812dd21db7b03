"""Reader of LongBench v2's questions: a JSON file, JSON lines, or the published file on the hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlm_serve.errors import ConfigError

HUB = "hub"
"""Stands for the published file instead of a local one."""
_REPOSITORY, _FILE = "THUDM/LongBench-v2", "data.json"
_TEXTS = (
    *("_id", "domain", "sub_domain", "difficulty", "length", "question"),
    *("choice_A", "choice_B", "choice_C", "choice_D", "answer", "context"),
)


@dataclass(frozen=True, slots=True)
class LongBenchItem:
    """One question with the fields of the data set.

    `id` is `_id`, `choices` are A to D, and `answer` is a letter.
    """

    id: str
    domain: str
    sub_domain: str
    difficulty: str
    length: str
    question: str
    choices: tuple[str, str, str, str]
    answer: str
    context: str


def find_data(source: str) -> Path:
    """Return the file for `--data`; the published one is downloaded or found in the hub's cache.

    Raises ConfigError if the download fails.
    """
    if source != HUB:
        return Path(source)
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(_REPOSITORY, _FILE, repo_type="dataset"))
    except Exception as error:  # Several libraries raise their own.
        reasons = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"data: {_REPOSITORY} could not be fetched from the hub: {reasons[0]}", param="data"
        ) from error


def read_items(path: Path, limit: int | None = None) -> list[LongBenchItem]:
    """Return the questions in the file's order, at most `limit`.

    Raises ConfigError that names the file and the line or question at fault.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", param="data") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: it is no UTF-8 text", param="data") from None
    questions: dict[str, LongBenchItem] = {}
    for place, row in _rows(path, text):
        if limit is not None and len(questions) == limit:
            break
        item = _item(row, place)
        if questions.setdefault(item.id, item) is not item:
            raise ConfigError(f"{place}: the _id {item.id!r} appears twice", param="data")
    if not questions:
        raise ConfigError(f"{path}: there are no questions", param="data")
    return list(questions.values())


def _rows(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """Yield each row with its place in the file."""
    if text.lstrip().startswith("["):
        try:
            rows = json.loads(text)
        except json.JSONDecodeError as error:
            problem = f"{path}, line {error.lineno}: it is no valid JSON: {error.msg}"
            raise ConfigError(problem, param="data") from None
        except RecursionError:
            raise ConfigError(f"{path}: its JSON is too deep", param="data") from None
        for number, row in enumerate(rows, start=1):
            yield f"{path}, question {number}", row
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield f"{path}, line {number}", json.loads(line)
        except (ValueError, RecursionError):
            problem = f"{path}, line {number}: it is no JSON object"
            raise ConfigError(problem, param="data") from None


def _item(row: Any, place: str) -> LongBenchItem:
    if not isinstance(row, dict):
        raise ConfigError(f"{place}: it is no JSON object", param="data")
    missing = [name for name in _TEXTS if not isinstance(row.get(name), str)]
    if missing:
        raise ConfigError(f"{place}: it needs a text for {', '.join(missing)}", param="data")
    if row["answer"] not in ("A", "B", "C", "D"):
        problem = f"{place}: answer must be A, B, C or D, got {row['answer'][:40]!r}"
        raise ConfigError(problem, param="data")
    named = ("domain", "sub_domain", "difficulty", "length", "question", "answer", "context")
    return LongBenchItem(
        id=row["_id"],
        choices=(row["choice_A"], row["choice_B"], row["choice_C"], row["choice_D"]),
        **{name: row[name] for name in named},
    )
