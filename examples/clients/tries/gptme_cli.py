"""gptme: two turns, of which the first runs a command in the shell."""

import os
import subprocess
from pathlib import Path

from common import KEY, MODEL, URL, holds, step

with step("runs a command, and goes on"):
    ran = subprocess.run(
        ["gptme", "-n", "-m", f"local/{MODEL}", "GPTME WRITE one", "-", "Say hello."],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        env={**os.environ, "OPENAI_BASE_URL": URL, "OPENAI_API_KEY": KEY},
    )
    holds(Path("one.txt").read_text(), "one")
    holds(ran.stdout, "It is done.", "hello to you")
