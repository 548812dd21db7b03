"""Reads rows of CSV or JSON lines files, with line numbers."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vlm_serve.errors import ConfigError

SUFFIXES = (".csv", ".jsonl")


def read_rows(path: Path, param: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield line numbers and rows of a file; its suffix must be one of `SUFFIXES`.

    Raises:
        ConfigError: the file cannot be read, is not UTF-8, or a line is not a row; `param` is the
            option with the file's name.
    """
    rows = _csv_rows if path.suffix == ".csv" else _json_rows
    try:
        yield from rows(path, param)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", param=param) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: it is not UTF-8 text", param=param) from None


def _csv_rows(path: Path, param: str) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        try:
            for row in reader:
                yield reader.line_num, row
        except csv.Error as error:
            raise ConfigError(f"{path}, line {reader.line_num}: {error}", param=param) from None


def _json_rows(path: Path, param: str) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if not isinstance(row, dict):
                raise ConfigError(f"{path}, line {number}: it is not a JSON object", param=param)
            yield number, row
