"""A folder of modules that say who has imported them: nobody should."""

from __future__ import annotations

import sys
from pathlib import Path

FOREIGN = (
    *("PIL", "aiohttp", "av", "blake3", "fastapi", "grpc", "h2", "httpx", "huggingface_hub"),
    *("jinja2", "lmms_eval", "numpy", "pandas", "psutil", "pydantic", "pydantic_core", "ray"),
    *("redis", "regex", "safetensors", "socksio", "starlette", "tokenizers", "torch"),
    *("transformers", "triton", "uvicorn", "uvloop", "yaml"),
)
"""Of packages that are installed, and of some that others import if there are any."""
STANDARD = tuple(sorted(sys.stdlib_module_names - {"__main__"}))
LATER = ("json", "csv", "email", "hmac", "http", "secrets", "sqlite3", "uuid", "zipfile")
"""Modules of the standard library that Python has no need of to start."""


def plant(folder: Path, names: tuple[str, ...]) -> Path:
    """Plants the modules; returns the file with a line for each process that imported one."""
    ran = folder.parent / f"{folder.name}.ran"
    text = (
        f"with open({str(ran)!r}, 'a') as _file, open('/proc/self/cmdline') as _line:\n"
        "    _file.write(__name__ + ': ' + _line.read().replace(chr(0), ' ') + chr(10))\n"
    )
    for name in names:
        if not (folder / name).exists():
            (folder / f"{name}.py").write_text(text)
    return ran


def imported(ran: Path) -> list[str]:
    """A line for each module that was imported, and by whom."""
    return sorted(set(ran.read_text().splitlines())) if ran.exists() else []
