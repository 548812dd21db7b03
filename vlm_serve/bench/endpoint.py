"""One OpenAI-compatible endpoint, as its client times it."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from vlm_serve.errors import ConfigError, VlmServeError

TIMEOUT_SECONDS = 600.0
"""Longest silence of an endpoint."""
MAX_LINE_BYTES = 1 << 20
OPTIONAL = ("ignore_eos", "stream_options", "temperature")
"""Fields that a request goes without where an endpoint refuses them by name."""
TEXTS = ("content", "reasoning_content", "reasoning")
"""Fields of a chunk's `delta` that hold generated text."""


class EndpointError(VlmServeError):
    """An endpoint is out of reach, refuses a request, or answers in another form.

    `code` is "refused" for HTTP 400 and 422, "status" for any other but 200, else None.
    """


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed answer, timed from before its request was sent.

    Attributes:
        seconds: until the stream's end.
        first: seconds until the first chunk with text; None if no chunk had any.
        prompt_tokens, cached_tokens, completion_tokens: as the endpoint reports them; None if it
            does not.
    """

    seconds: float
    first: float | None
    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int | None


class Endpoint:
    """A client of one endpoint with one open connection. Not safe for threads.

    Args:
        base_url: with or without `/v1` at its end.
        model: the name to ask for; None: the first that the endpoint lists.
        key: sent as a bearer token, if any.

    Raises:
        ConfigError: the URL is not one of http or https.
    """

    def __init__(self, base_url: str, model: str | None = None, key: str | None = None) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"not a URL of an endpoint, such as http://127.0.0.1:8000: {base_url!r}",
                param="base_url",
            )
        try:
            port = parts.port
        except ValueError:
            raise ConfigError(f"no such port: {base_url!r}", param="base_url") from None
        secure = parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._connection = kind(parts.hostname, port, timeout=TIMEOUT_SECONDS)
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self.model = model or ""
        self.without: list[str] = []
        """Fields of OPTIONAL that the endpoint has refused."""
        self._length = "max_tokens"

    def look(self) -> int | None:
        """Choose the model if none was named; return its context in tokens, if it is listed.

        Raises EndpointError if nothing is listed and no model was named.
        """
        try:
            listed = json.loads(self._request("GET", "/models", None).read())["data"]
            names = {str(each["id"]): each for each in listed}
        except (EndpointError, ValueError, KeyError, TypeError) as error:
            if self.model:
                return None
            if isinstance(error, EndpointError):
                raise
            raise EndpointError(f"{self.url} lists no models: name one") from None
        if not self.model:
            if not names:
                raise EndpointError(f"{self.url} lists no models: name one")
            self.model = next(iter(names))
        length = names.get(self.model, {}).get("max_model_len")
        return length if isinstance(length, int) else None

    def ask(self, content: Any, length: int, *, to_the_end: bool = False) -> Answer:
        """Have a user's message answered greedily, as a stream.

        Args:
            content: text, or parts of a message.
            length: most tokens of the answer.
            to_the_end: ask for exactly that many, by `ignore_eos`.

        Raises:
            EndpointError: the endpoint refuses it, or breaks off.
        """
        while True:
            body: dict[str, Any] = {
                "model": self.model,
                "messages": [{"role": "user", "content": content}],
                "stream": True,
                self._length: length,
                "temperature": 0,
                "stream_options": {"include_usage": True},
            }
            if to_the_end:
                body["ignore_eos"] = True
            for name in self.without:
                body.pop(name, None)
            begin = time.perf_counter()
            try:
                response = self._request("POST", "/chat/completions", json.dumps(body).encode())
            except EndpointError as error:
                if not self._adapt(error, body):
                    raise
                continue
            return _timed(begin, self._events(response))

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _adapt(self, error: EndpointError, body: Mapping[str, Any]) -> bool:
        """Leave out the field that a refusal names; False if there is nothing to change."""
        if error.code != "refused":
            return False
        if "max_completion_tokens" in error.message and self._length == "max_tokens":
            self._length = "max_completion_tokens"
            return True
        named = [name for name in OPTIONAL if name in body and name in error.message]
        self.without += named
        return bool(named)

    def _request(self, method: str, path: str, body: bytes | None) -> http.client.HTTPResponse:
        """Send a request; return a response of status 200, unread. Raises EndpointError."""
        for again in (True, False):
            kept = self._connection.sock is not None
            try:
                self._connection.request(method, self._path + path, body, self._headers)
                response = self._connection.getresponse()
                break
            except (OSError, http.client.HTTPException) as error:
                self._connection.close()
                # An idle connection may have been closed by the other side.
                if not (again and kept and isinstance(error, ConnectionError)):
                    why = getattr(error, "strerror", None) or error or type(error).__name__
                    raise EndpointError(f"{self.url}: {why}") from None
        if response.status == 200:
            return response
        said = response.read(4096).decode(errors="replace")
        self._connection.close()
        with contextlib.suppress(ValueError, KeyError, TypeError):
            said = str(json.loads(said)["error"]["message"])
        code = "refused" if response.status in (400, 422) else "status"
        said = " ".join(said.split())[:300]
        raise EndpointError(f"{self.url}: HTTP {response.status}: {said}", code=code)

    def _events(self, response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
        """Yield the chunks of a stream and read it to its end. Raises EndpointError."""
        try:
            while line := response.readline(MAX_LINE_BYTES):
                data = line.strip()
                if data.startswith(b"data:") and data != b"data: [DONE]":
                    chunk = json.loads(data[len(b"data:") :])
                    if chunk.get("error"):
                        raise EndpointError(f"{self.url}: {chunk['error']}")
                    yield chunk
        except (OSError, http.client.HTTPException, ValueError, AttributeError) as error:
            self._connection.close()
            raise EndpointError(f"{self.url}: the answer broke off: {error}") from None


def _timed(begin: float, events: Iterator[dict[str, Any]]) -> Answer:
    """Read a stream; `begin` is the time before its request, of `time.perf_counter`."""
    first = None
    usage: dict[str, Any] = {}
    for chunk in events:
        now = time.perf_counter() - begin
        usage = chunk.get("usage") or usage
        deltas = [choice.get("delta") or {} for choice in chunk.get("choices") or []]
        if any(delta.get(name) for delta in deltas for name in TEXTS):
            first = now if first is None else first
    details = usage.get("prompt_tokens_details") or {}
    return Answer(
        time.perf_counter() - begin,
        first,
        usage.get("prompt_tokens"),
        details.get("cached_tokens"),
        usage.get("completion_tokens"),
    )
