"""Stands between a client and the server, passes everything on, and notes what each request used.

It changes nothing. Usage is read from the answers; a stream without usage is told by the server's
metrics, so requests that overlap may share a number there.
"""

from __future__ import annotations

import http.client
import http.server
import json
import re
import threading
import time
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from typing import Any

WIRES = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/completions": "completions",
}
_HOP = frozenset({"connection", "content-length", "host", "keep-alive", "transfer-encoding"})
_COUNTER = r"^vlm_serve[:_]{}_total(?:\{{[^}}]*\}})? (\S+)$"
LEAST = 64
"""Tokens of a turn that are compared; a shorter one is shorter than the cache's blocks."""


@dataclass(frozen=True)
class Turn:
    """One answered request: its wire, what it said, and its tokens."""

    wire: str
    items: list[Any]
    previous: bool
    prompt: int
    cached: int
    answer: int


@dataclass
class Recorder:
    """A server on the loopback address; `url` takes the place of the other one's.

    Args:
        upstream: the base URL of the server, with /v1.
    """

    upstream: str
    turns: list[Turn] = field(default_factory=list)
    wires: list[str] = field(default_factory=list)

    def __enter__(self) -> Recorder:
        recorder = self
        place = urllib.parse.urlsplit(self.upstream)
        self._host, self._port = place.hostname or "", place.port or 80
        self._lock = threading.Lock()
        self._counted = self._counters()

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None:
                pass

            def _pass_on(self) -> None:
                recorder.pass_on(self)

            do_GET = do_POST = do_DELETE = do_HEAD = do_OPTIONS = do_PUT = _pass_on

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._server.shutdown()
        self._server.server_close()

    def pass_on(self, request: http.server.BaseHTTPRequestHandler) -> None:
        """Send a request to the server and its answer to the client, piece by piece."""
        body = request.rfile.read(int(request.headers.get("content-length") or 0))
        if "chunked" in (request.headers.get("transfer-encoding") or ""):
            body = _chunks(request.rfile)
        headers = {
            name: value for name, value in request.headers.items() if name.lower() not in _HOP
        }
        upstream = http.client.HTTPConnection(self._host, self._port, timeout=900)
        kept = bytearray()
        try:
            upstream.request(request.command, request.path, body or None, headers)
            answer = upstream.getresponse()
            request.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in _HOP:
                    request.send_header(name, value)
            request.send_header("Connection", "close")
            request.end_headers()
            while piece := answer.read1(1 << 16):
                kept += piece
                request.wfile.write(piece)
                request.wfile.flush()
        except OSError:  # the client has what it wanted
            pass
        finally:
            upstream.close()
            request.close_connection = True
        wire = WIRES.get(request.path.partition("?")[0])
        if wire and request.command == "POST":
            self._note(wire, body, bytes(kept))

    def _note(self, wire: str, body: bytes, answer: bytes) -> None:
        try:
            asked = json.loads(body)
        except ValueError:
            return
        items = asked.get("messages", asked.get("input", asked.get("prompt")))
        items = items if isinstance(items, list) else [items]
        previous = bool(asked.get("previous_response_id"))
        with self._lock:
            if wire not in self.wires:
                self.wires.append(wire)
            if used := usage_in(answer) or self._grown():
                self.turns.append(Turn(wire, items, previous, *used))

    def _counters(self) -> tuple[int, int, int]:
        place = f"http://{self._host}:{self._port}/metrics"
        with urllib.request.urlopen(place, timeout=30) as answer:
            text = answer.read().decode()
        names = ("prompt_tokens", "prefix_cache_hits", "generation_tokens")
        found = [re.search(_COUNTER.format(name), text, re.MULTILINE) for name in names]
        first, second, third = (int(float(each.group(1))) if each else 0 for each in found)
        return first, second, third

    def _grown(self) -> tuple[int, int, int] | None:
        time.sleep(0.2)
        try:
            now = self._counters()
        except OSError:
            return None
        (a, b, c), self._counted = self._counted, now
        grown = now[0] - a, now[1] - b, now[2] - c
        return grown if grown[0] else None

    def second_turn(self) -> str:
        """Return how much of a turn the next one has from the cache, of the first pair of requests
        in which one continues the other: as "98.7 % of 1234"."""
        for at, turn in enumerate(self.turns):
            before = next((one for one in reversed(self.turns[:at]) if _continues(turn, one)), None)
            if before is not None and before.prompt >= LEAST:
                known = before.prompt + before.answer
                return f"{min(100.0, 100 * turn.cached / known):.1f} % of {known}"
        return ""


def _continues(turn: Turn, before: Turn) -> bool:
    if turn.wire != before.wire:
        return False
    count = len(before.items)
    begin = [_bare(item) for item in turn.items[:count]]
    return turn.previous or (count < len(turn.items) and begin == list(map(_bare, before.items)))


def _bare(value: Any) -> Any:
    """Return an item without marks of caches, which clients move with every turn."""
    if isinstance(value, list):
        bare = [_bare(each) for each in value]
        only = bare[0] if len(bare) == 1 else None
        return only["text"] if isinstance(only, dict) and set(only) == {"type", "text"} else bare
    if isinstance(value, dict):
        return {name: _bare(each) for name, each in value.items() if name != "cache_control"}
    return value


def usage_in(answer: bytes) -> tuple[int, int, int] | None:
    """Return (prompt, cached, answer) tokens of an answer's last usage; None if it has none."""
    found: dict[str, Any] = {}
    texts = [line[5:] for line in answer.splitlines() if line.startswith(b"data:")] or [answer]
    for text in texts:
        if b"usage" in text:
            try:
                read = json.loads(text)
            except ValueError:
                continue
            for place in (read, read.get("response") or {}, read.get("message") or {}):
                found |= place.get("usage") or {}
    if "prompt_tokens" in found:
        cached = (found.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return found["prompt_tokens"], cached, found.get("completion_tokens") or 0
    if "cache_read_input_tokens" in found:
        cached = found["cache_read_input_tokens"]
        prompt = found["input_tokens"] + cached + found.get("cache_creation_input_tokens", 0)
        return prompt, cached, found.get("output_tokens") or 0
    if "input_tokens" in found:
        cached = (found.get("input_tokens_details") or {}).get("cached_tokens") or 0
        return found["input_tokens"], cached, found.get("output_tokens") or 0
    return None


def _chunks(file: Any) -> bytes:
    body = bytearray()
    while size := int(file.readline().partition(b";")[0], 16):
        body += file.read(size)
        file.readline()
    file.readline()
    return bytes(body)
