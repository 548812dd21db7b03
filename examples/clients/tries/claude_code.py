"""Claude Code: a document by its Read tool, then turns with its Bash tool; default settings."""

import base64
import os
import subprocess
from pathlib import Path

from common import KEY, MODEL, PDF, ROOT_URL, holds, step

SETTINGS = {
    "ANTHROPIC_BASE_URL": ROOT_URL,
    "ANTHROPIC_API_KEY": KEY,
    "ANTHROPIC_MODEL": MODEL,
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "IS_SANDBOX": "1",  # lets root skip the permissions
}


def ask(*words: str) -> str:
    ran = subprocess.run(
        ["claude", "--dangerously-skip-permissions", "-p", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        env={**os.environ, **SETTINGS},
    )
    assert ran.returncode == 0, ran.stdout[-1500:]
    return ran.stdout


(Path.home() / ".claude.json").write_text('{"hasCompletedOnboarding": true}')
Path("sheet.pdf").write_bytes(base64.b64decode(PDF))
with step("reads a PDF document"):
    holds(ask("CLAUDE READ sheet.pdf"), "It is done.")
words = (("one", "--continue"), ("two", "--continue"), ("three", "--continue"))
for number, (word, *more) in enumerate(words):
    with step(f"turn {number + 1} with a command"):
        holds(ask(*more, f"CLAUDE WRITE {word}"), f"The tool says {word}")
        holds(Path(f"{word}.txt").read_text(), word)
