"""The notebook: each cell runs, and shows what its text says."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def run_cell(source: str, names: dict[str, Any]) -> Any:
    """Runs a cell as a notebook does, `await` included, and returns the value of its last line."""
    tree = ast.parse(source)
    last = tree.body[-1]
    if isinstance(last, ast.Expr):
        tree.body[-1] = ast.Assign([ast.Name("shown", ast.Store())], last.value)
    code = compile(ast.fix_missing_locations(tree), "cell", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    names["shown"] = None
    running = eval(code, names)
    if inspect.iscoroutine(running):
        asyncio.run(running)
    return names["shown"]


def test_the_notebook_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook = json.loads((ROOT / "examples" / "pipeline.ipynb").read_text(encoding="utf-8"))
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {}
    shown: list[Any] = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"], "outputs of one machine are no part of the example"
            shown.append(run_cell("".join(cell["source"]), names))
    said = capsys.readouterr().out
    assert "The star is red. The triangle is at the top right." in said
    hello, reuse, color, again, _, (call,), _, ids, answers, _ = shown
    assert repr(hello).startswith("Output(text='Hello!") and len(repr(again)) < 200
    assert reuse[0] > 20 and "red" in color.lower()
    assert call["function"]["name"] == "get_weather" and len(ids) == 3
    assert "1 the file 'nosuch.png' cannot be read" in said and len(answers) == 2
