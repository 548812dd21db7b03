"""What `vlm-serve chat` talks to: a model in this process, or a server that speaks OpenAI's API."""

from __future__ import annotations

import base64
import contextlib
import json
import mimetypes
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from vlm_serve.engine.requests.outputs import Delta, Usage
from vlm_serve.errors import ModelNotFoundError, VlmServeError

if TYPE_CHECKING:
    from vlm_serve.pipeline.pipeline import Pipeline

Message = dict[str, Any]
_CONNECT_SECONDS = 600


class ChatModel(Protocol):
    """Answers conversations.

    Attributes:
        name: the model that answers, or one of its adapters; one of `names`.
    """

    name: str

    @property
    def names(self) -> Sequence[str]:
        """Names that may answer: a local model and its adapters, or all models of a server."""

    def stream(self, messages: Sequence[Message]) -> Iterator[Delta]:
        """Yield the answer, split as by `Pipeline.stream`. Raises VlmServeError."""


class LocalModel:
    """A model in this process.

    Args:
        pipe: answers.
        name: what it is called.
        params: max_tokens and temperature, None for defaults.
    """

    def __init__(self, pipe: Pipeline, name: str, params: Mapping[str, Any]) -> None:
        self._pipe = pipe
        self._own = self.name = name
        self._params = params

    @property
    def names(self) -> Sequence[str]:
        return (self._own, *(served.name for served in self._pipe.engine.adapters.all()))

    def stream(self, messages: Sequence[Message]) -> Iterator[Delta]:
        # Late, since it imports torch, which a server's client does not need.
        from vlm_serve.sampling_params import SamplingParams

        adapter = {} if self.name == self._own else {"lora": self.name}
        return self._pipe.stream(messages, SamplingParams(**self._params), **adapter)


class ServedModel:
    """Models of a server.

    Args:
        base_url: its address; `/v1` is added to one without a path.
        params: as for LocalModel.

    Raises VlmServeError for an address where no such server answers.
    """

    def __init__(self, base_url: str, api_key: str | None, params: Mapping[str, Any]) -> None:
        address = base_url if "://" in base_url else f"http://{base_url}"
        self._address = address.rstrip("/") + "/v1" * (urlsplit(address).path in ("", "/"))
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._params = {key: value for key, value in params.items() if value is not None}
        with self._opened("models") as answer:
            listed = _parsed(answer.read()).get("data") or ()
        self.names: Sequence[str] = [str(entry["id"]) for entry in listed]
        self.name = next(iter(self.names), "")

    def choose(self, name: str) -> None:
        """Have a model answer in place of the first one. Raises ModelNotFoundError."""
        if name not in self.names:
            raise ModelNotFoundError(
                f"{self._address} has no model {name!r}, but {', '.join(self.names)}"
            )
        self.name = name

    def stream(self, messages: Sequence[Message]) -> Iterator[Delta]:
        body = {
            "model": self.name,
            "messages": [_as_sent(message) for message in messages],
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._params,
        }
        reason: Any = None
        usage = Usage()
        with self._opened("chat/completions", body) as answer:
            for line in answer:
                if not line.startswith(b"data:") or b"[DONE]" in line:
                    continue
                event = _parsed(line[5:])
                if "error" in event:
                    raise VlmServeError(_complaint(event))
                usage = _usage(event.get("usage")) or usage
                for choice in event.get("choices") or ():
                    reason = choice.get("finish_reason") or reason
                    delta = choice.get("delta") or {}
                    thought = delta.get("reasoning") or delta.get("reasoning_content") or ""
                    yield Delta(0, delta.get("content") or "", reasoning=thought)
        yield Delta(0, finish_reason=reason, usage=usage)

    @contextlib.contextmanager
    def _opened(self, route: str, body: Mapping[str, Any] | None = None) -> Iterator[Any]:
        """Send a request and give its answer. Raises VlmServeError with the server's words."""
        url = f"{self._address}/{route}"
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(url, data, self._headers)
            with urllib.request.urlopen(request, timeout=_CONNECT_SECONDS) as answer:
                yield answer
        except urllib.error.HTTPError as error:
            with error:
                said = _complaint(_parsed(error.read()))
            raise VlmServeError(f"{url} answers {error.code}: {said}") from None
        except (OSError, ValueError) as error:
            raise VlmServeError(f"{url}: {getattr(error, 'reason', error)}") from None


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"error": data.decode(errors="replace")[:200]}


def _complaint(answer: Mapping[str, Any]) -> str:
    error = answer.get("error", answer)
    return str(error.get("message", error) if isinstance(error, Mapping) else error)


def _usage(given: Any) -> Usage | None:
    if not isinstance(given, Mapping):
        return None
    cached = (given.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    prompt, answer = given.get("prompt_tokens") or 0, given.get("completion_tokens") or 0
    return Usage(prompt, answer, cached)


def _as_sent(message: Message) -> Message:
    """Return a message with its media as a server takes them: files as data: URLs."""
    content = message["content"]
    if isinstance(content, str):
        return message
    return {**message, "content": [_part(part) for part in content]}


def _part(part: Mapping[str, Any]) -> Mapping[str, Any]:
    kind = part["type"]
    if kind == "text":
        return part
    source = part[kind]
    if isinstance(source, Path):
        guessed = mimetypes.guess_type(source.name)[0] or f"{kind}/*"
        source = f"data:{guessed};base64,{base64.b64encode(source.read_bytes()).decode()}"
    return {"type": f"{kind}_url", f"{kind}_url": {"url": source}}


def reuse_line(usage: Usage) -> str:
    """Return what one line says about an answer's tokens."""
    reused = f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens reused"
    return f"{reused}, {usage.completion_tokens} generated"
