"""Count the product's files and calls that run for the second of two requests, by thread.

    python benchmarks/review/trace_files.py text|image|lora [--adapter FOLDER] [--out FILE]

It serves the demo model in this process. The second request must be a hit.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import checkout
import httpx
from ports import free_port

from vlm_serve.cli import main as command

QUESTIONS = ("Where is the triangle?", "What color is the star?")
TEXT = "The river bends twice before it meets the old mill. " * 120
LEAST_CACHED = {"text": 1000, "lora": 1000, "image": 20}
_PREFIX = f"{checkout.ROOT}{os.sep}"
_PRODUCT = ("vlm_serve", "cache", "kernels", "preprocess")


class Trace:
    """Calls of the product's functions while it is on.

    Attributes:
        calls: thread -> file -> calls; files in the order of their first call.
    """

    def __init__(self) -> None:
        self.on = False
        self.calls: dict[str, Counter[str]] = defaultdict(Counter)

    def __call__(self, frame: Any, event: str, _: Any) -> None:
        """Count a call, as `sys.setprofile` asks for."""
        if not self.on or event != "call":
            return
        path = os.path.realpath(frame.f_code.co_filename)
        if path.startswith(_PREFIX) and path[len(_PREFIX) :].split(os.sep)[0] in _PRODUCT:
            self.calls[threading.current_thread().name][path[len(_PREFIX) :]] += 1

    def show(self, out: Path | None) -> None:
        """Print files, calls and lines, whole, by thread and by folder."""
        files: Counter[str] = sum(self.calls.values(), Counter())
        lines = sum((checkout.ROOT / each).read_text().count("\n") for each in files)
        print(f"{len(files)} files, {lines} lines, {files.total()} calls")
        for thread, calls in self.calls.items():
            print(f"  {thread}: {len(calls)} files, {calls.total()} calls")
        rooms = Counter(
            "/".join(Path(each).parts[: 1 + each.startswith("vlm_serve/")]) for each in files
        )
        print("  " + ", ".join(f"{room} {number}" for room, number in rooms.most_common()))
        if out is not None:
            rows = [
                f"{thread}\t{path}\t{number}"
                for thread, calls in self.calls.items()
                for path, number in calls.items()
            ]
            out.write_text("\n".join(rows) + "\n")


def content(kind: str, question: str) -> Any:
    """Return a message's content that both requests share up to the question."""
    if kind != "image":
        return TEXT + question
    picture = (checkout.ROOT / "examples" / "media" / "shapes.png").read_bytes()
    url = "data:image/png;base64," + base64.b64encode(picture).decode()
    return [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": question},
    ]


def ask(client: httpx.Client, model: str, asked: Any) -> int:
    """Have a stream answered; return the cached tokens of its prompt."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": asked}],
        "max_tokens": 8,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = client.post("/v1/chat/completions", json=body)
    answer.raise_for_status()
    events = [line for line in answer.text.splitlines() if line.startswith("data: {")]
    usage = json.loads(events[-1].removeprefix("data: ")).get("usage")
    assert usage, f"the answer has no usage: {answer.text[-500:]}"
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def request_twice(trace: Trace, url: str, kind: str, out: Path | None) -> None:
    """Wait for the server, trace the second request, and end the process."""
    status = 1
    try:
        with httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
            while True:
                try:
                    client.get("/health")
                    break
                except httpx.ConnectError:
                    time.sleep(0.5)
            model = "adapter" if kind == "lora" else "demo"
            ask(client, model, content(kind, QUESTIONS[0]))
            time.sleep(2)  # What follows an answer is no part of the next one.
            trace.on = True
            cached = ask(client, model, content(kind, QUESTIONS[1]))
            trace.on = False
            assert cached > LEAST_CACHED[kind], "the second request was no hit"
            trace.show(out)
            status = 0
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind", choices=LEAST_CACHED)
    parser.add_argument("--adapter", metavar="FOLDER", help="of `lora`")
    parser.add_argument("--out", type=Path, metavar="FILE", help="for every file and its calls")
    given = parser.parse_args(arguments)
    port, trace = free_port(), Trace()
    flags = ["--no-page", "--no-access-log", "--port", str(port)]
    if given.kind == "lora":
        flags.append(f"--lora-modules=adapter={given.adapter}")
    url = f"http://127.0.0.1:{port}"
    client = threading.Thread(
        target=request_twice, args=(trace, url, given.kind, given.out), daemon=True
    )
    client.start()
    threading.setprofile(trace)
    sys.setprofile(trace)
    command(["serve", "demo", *flags])


if __name__ == "__main__":
    main()
