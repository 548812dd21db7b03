"""What the scripts of this folder share: settings, questions, and steps that are reported."""

from __future__ import annotations

import atexit
import base64
import contextlib
import os
import subprocess
import traceback
from collections.abc import Iterator
from pathlib import Path

URL = os.environ["BASE_URL"]
ROOT_URL = URL.removesuffix("/v1")
MODEL = os.environ["MODEL"]
CLIENT = os.environ["CLIENT"]
PICTURE = Path(os.environ["PICTURE"])
KEY = "none"
DATA = base64.b64encode(PICTURE.read_bytes()).decode()
DATA_URL = f"data:image/png;base64,{DATA}"
SEE = "What do you see?"
ASK_PARIS, ASK_ROME = "Call weather for Paris", "Call weather for Rome"
SAY = "Say hello."
FORM = "JSON for Paris"
PICTURE_PARTS = [
    {"type": "text", "text": SEE},
    {"type": "image_url", "image_url": {"url": DATA_URL}},
]
PDF = base64.b64encode(
    b"%PDF-1.4\n1 0 obj <</Type/Catalog/Pages 2 0 R>> endobj\n"
    b"2 0 obj <</Type/Pages/Kids[3 0 R]/Count 1>> endobj\n"
    b"3 0 obj <</Type/Page/Parent 2 0 R/MediaBox[0 0 200 100]/Contents 4 0 R>> endobj\n"
    b"4 0 obj <</Length 24>> stream\n1 1 0 rg 50 20 90 60 re f\nendstream endobj\n"
    b"trailer <</Root 1 0 R/Size 5>>\n%%EOF\n"
).decode()
"""A document of one page, a yellow rectangle, in base64."""
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather", "parameters": PARAMETERS},
}
_failed = []


@contextlib.contextmanager
def step(name: str, of_model: bool = False) -> Iterator[None]:
    """Report one step, and go on after a failure. `of_model`: the model must be good at it."""
    try:
        yield
    except Exception as error:
        if of_model and isinstance(error, AssertionError):
            print(f"MODEL {name}: {error!r:.200}", flush=True)
            return
        traceback.print_exc()
        print(f"FAIL {name}: {error!r:.300}", flush=True)
        _failed.append(name)
    else:
        print(f"ok {name}", flush=True)


def weather(city: str) -> str:
    """Return the weather of a city.

    Args:
        city: name of the city.
    """
    return f"sun in {city}" if city == "Rome" else f"rain in {city}"


def ran(*command: str, **settings: str) -> str:
    """Run a command without a terminal; return what it printed.

    Args:
        settings: environment variables beside those of this process.
    """
    made = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        env={**os.environ, **settings},
    )
    assert made.returncode == 0, made.stdout[-2500:]
    return made.stdout


def holds(text: object, *words: str) -> None:
    """An answer that must contain all words."""
    for word in words:
        assert word.lower() in str(text).lower(), f"no {word!r} in {text!r}"


@atexit.register
def _end() -> None:
    if _failed:
        os._exit(1)
