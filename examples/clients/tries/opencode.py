"""opencode: turns with its bash tool, by a provider of @ai-sdk/openai-compatible."""

import json
import subprocess
from pathlib import Path

from common import KEY, MODEL, URL, holds, step

Path("opencode.json").write_text(
    json.dumps(
        {
            "provider": {
                "vlm": {
                    "npm": "@ai-sdk/openai-compatible",
                    "options": {"baseURL": URL, "apiKey": KEY},
                    "models": {MODEL: {"limit": {"context": 65536, "output": 4096}}},
                }
            },
            "permission": {"bash": "allow"},
            "autoupdate": False,
        }
    )
)
for number, (word, *more) in enumerate((("one",), ("two", "--continue"), ("three", "--continue"))):
    with step(f"turn {number + 1} with a command"):
        ran = subprocess.run(
            ["opencode", "run", "-m", f"vlm/{MODEL}", *more, f"OPENCODE WRITE {word}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
        )
        holds(ran.stdout, f"The tool says {word}")
        holds(Path(f"{word}.txt").read_text(), word)
