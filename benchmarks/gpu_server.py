"""Check the whole server over HTTP on the GPU at hand, with the built-in model.

    python benchmarks/gpu_server.py [--requests 64] [--device cpu]

Pictures of one square are asked about, each twice: the second answer must be the first one, and
its prompt must come from the cache. Then many streams at once, some of which their client leaves,
a conversation with a schema, and at last the same question again. Prints requests per second beside
the card's name; exits with 1 if an answer is wrong.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import io
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import common  # noqa: F401  # First: it adds examples/ and tests/ to the path.
import torch
from common.engine_server import Server, free_port, running
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (40, 80, 220)}
QUESTION = "What do you see?"
SCHEMA = {
    "type": "object",
    "properties": {"seen": {"type": "boolean"}},
    "required": ["seen"],
    "additionalProperties": False,
}


def picture(colour: tuple[int, int, int], side: int) -> dict[str, Any]:
    """Return a content part: a picture of one colour."""
    image = Image.new("RGB", (128, 128), (240, 240, 240))
    image.paste(colour, (20, 20, 20 + side, 20 + side))
    file = io.BytesIO()
    image.save(file, "PNG")
    address = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": address}}


def body(part: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Return a chat request about a picture."""
    content = [part, {"type": "text", "text": QUESTION}]
    message = {"role": "user", "content": content}
    return {"model": "demo", "messages": [message], "temperature": 0, "max_tokens": 48} | options


def twice(server: Server, part: dict[str, Any]) -> str:
    """Ask the same twice; return what is wrong."""
    request = body(part)
    first, again = (server.post("/v1/chat/completions", request)[0] for _ in range(2))
    words = [each["choices"][0]["message"]["content"] for each in (first, again)]
    hit = (again["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    if words[0] != words[1]:
        return f"{words[0]!r}, then {words[1]!r}"
    return "" if hit else f"nothing of {again['usage']} came from the cache"


def streamed(port: int, request: dict[str, Any], leave: bool) -> str:
    """Read a streamed answer, or leave it at its first event; return its text."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(request), headers)
    response, text = connection.getresponse(), ""
    for line in response:
        if line.startswith(b"data: {"):
            choices = json.loads(line[6:])["choices"]
            text += (choices[0]["delta"].get("content") or "") if choices else ""
            if leave:
                break
    connection.close()
    return text


def check(server: Server, port: int, count: int) -> list[str]:
    """Run all checks; return what is wrong."""
    parts = [picture(colour, side) for colour in COLOURS.values() for side in (50, 80)]
    wrong = [problem for part in parts if (problem := twice(server, part))]
    expected = [
        server.post("/v1/chat/completions", body(part))[0]["choices"][0]["message"]["content"]
        for part in parts
    ]
    begin = time.perf_counter()
    with ThreadPoolExecutor(32) as pool:
        answers = list(
            pool.map(
                lambda number: streamed(
                    port, body(parts[number % len(parts)], stream=True), number % 7 == 6
                ),
                range(count),
            )
        )
    seconds = time.perf_counter() - begin
    print(f"- {count} streams at once: {count / seconds:.0f} requests/s")
    for number, answer in enumerate(answers):
        whole = expected[number % len(parts)]
        if number % 7 != 6 and answer != whole:
            wrong.append(f"stream {number}: {answer!r}, alone {whole!r}")
    form = {"type": "json_schema", "json_schema": {"name": "seen", "schema": SCHEMA}}
    text = server.post("/v1/chat/completions", body(parts[0], response_format=form))[0]
    filled = json.loads(text["choices"][0]["message"]["content"])
    if set(filled) != {"seen"}:
        wrong.append(f"the schema was filled with {filled}")
    if problem := twice(server, parts[0]):
        wrong.append(f"at the end {problem}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    if given.device != "cpu" and not torch.cuda.is_available():
        print("No GPU found: nothing was checked. Run this script as it is on a machine with one.")
        return 0
    port = free_port()
    command = [sys.executable, "-m", "vlm_serve.cli", "serve", "demo", "--port", str(port)]
    command += ["--device", given.device, "--cache-memory", "256MiB"]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with running(command, port, os.environ | {"PYTHONPATH": path}) as server:
        wrong = check(server, port, given.requests)
    for problem in wrong:
        print(f"- wrong: {problem}")
    print(f"- the server: {'wrong' if wrong else 'right'}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
