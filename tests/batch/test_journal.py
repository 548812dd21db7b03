"""What a killed run leaves behind is known again."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlm_serve.batch.journal import Journal
from vlm_serve.errors import ConfigError


def test_a_piece_of_a_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with Journal(path) as journal:
        journal.append({"id": "a", "n": 1})
        journal.append({"id": "b", "n": 2})
    whole = path.read_bytes()
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        with Journal(path) as journal:
            kept = whole[:length].count(b"\n")
            assert journal.done == set(("a", "b")[:kept])
            journal.append({"id": "c", "n": 3})
            assert [row["id"] for row in journal.rows()] == [*("a", "b")[:kept], "c"]
            assert [row["n"] for row in journal.rows(["c"])] == [3]


@pytest.mark.parametrize("text", ["notes\n", "{}\n", "[1]\n", '{"id": 5}\n', '{"id": "a"}\n' * 2])
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"out\.jsonl, line"):
        Journal(path)
    assert path.read_text() == text
