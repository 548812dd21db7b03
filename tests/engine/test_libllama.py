"""llama.cpp's own library answers alike about the same file, where it has been fetched:
`python benchmarks/gguf_files.py --fetch` does that. Tests never do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from vlm_serve.models.gguf.reader import BY_NAME

ROOT = Path(__file__).resolve().parents[2]
KINDS = [name for name, kind in BY_NAME.items() if kind.quantised]
CASES = [("qwen3", kinds) for kinds in (KINDS[::2], KINDS[1::2])]
CASES += [(family, ["Q4_K"]) for family in ("qwen3_5", "qwen3_moe")]


@pytest.mark.sweep
@pytest.mark.skipif(
    not any((ROOT / "build" / "libllama").rglob("libllama.*so")),
    reason="llama.cpp's library has not been fetched",
)
@pytest.mark.parametrize(("family", "kinds"), CASES)
def test_the_next_token(family: str, kinds: list[str]) -> None:
    """libllama quantises activations beside blocks, which is most of the difference."""
    command = [sys.executable, "benchmarks/gguf_files.py", "--families", family, "--types", *kinds]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    rows = [row.split(" | ") for row in done.stdout.splitlines()[2:]]
    assert [row[1] for row in rows] == kinds
    for row in rows:
        assert float(row[5]) < 1e-3, row
        assert float(row[6].rstrip(" |")) < 0.6, row
