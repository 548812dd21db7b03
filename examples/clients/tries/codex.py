"""Codex CLI: three turns with tools, over the Responses API with its default settings."""

import shutil
import subprocess
from pathlib import Path

from common import MODEL, PICTURE, URL, holds, step

CONFIG = f"""model = "{MODEL}"
model_provider = "vlm"
[model_providers.vlm]
name = "vlm-serve"
base_url = "{URL}"
wire_api = "responses"
"""
FREE = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")


def ask(*words: str) -> str:
    ran = subprocess.run(
        ["codex", "exec", *FREE, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stdout[-1500:]
    return ran.stdout


home = Path.home() / ".codex"
home.mkdir()
(home / "config.toml").write_text(CONFIG)
shutil.copy(PICTURE, "heart.png")
with step("a command writes a file"):
    ask("CODEX FIRST")
    holds(Path("one.txt").read_text(), "one")
with step("two commands in one turn"):
    holds(ask("resume", "--last", "CODEX SECOND"), "The tool says one")
    holds(Path("two.txt").read_text(), "two")
with step("looks at a picture"):
    holds(ask("resume", "--last", "CODEX THIRD"), "It is done.")
