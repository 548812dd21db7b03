"""Attempts at random requests, broken off anywhere and resumed by another real application."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message

from vlm_serve.engine.engine import Engine
from vlm_serve.server.app import create_app
from vlm_serve.server.config import ServerConfig
from vlm_serve.server.failover.attempt import ATTEMPT, Attempt, Delivery
from vlm_serve.server.failover.resuming import Resuming
from vlm_serve.server.http.errors import error_for
from vlm_serve.server.service import Service

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"word": {"type": "string", "maxLength": 12}, "good": {"type": "boolean"}},
    "required": ["word", "good"],
    "additionalProperties": False,
}
WORDS = ["what", "where", "why", "red", "blue", "house", "river", "seven", "stop", "end", "a"]
_DRAFT_COUNTS = re.compile(rb'"(accepted|rejected)_prediction_tokens":\d+')
_CACHED = re.compile(rb'"(cached_tokens|cache_\w+_tokens|(ephemeral_5m_)?input_tokens)":\d+')
_RESUMED = re.compile(rb',"resumed":1')


@dataclass(frozen=True)
class Asked:
    """A request: its path and its body."""

    path: str
    body: dict[str, Any]


class Replica:
    """An application over an engine of its own; all replicas run on one event loop."""

    def __init__(self, engine: Engine, **options: Any) -> None:
        config = ServerConfig(idle_check=False, stream_silence=0.0, **options)
        self.engine = engine
        self.service = Service(engine, config, ("test-model",))
        self.app: ASGIApp = Resuming(create_app(self.service), error_for)

    async def answer(
        self,
        asked: Asked,
        attempt: Attempt | None,
        headers: Sequence[tuple[bytes, bytes]] = (),
        *,
        until: int | None = None,
    ) -> list[Message]:
        """The messages of a whole answer, or of its beginning: then the client goes after so many.

        Args:
            attempt: in the scope; None: there is none.
            headers: further ones of the client.
        """
        body, gone = json.dumps(asked.body).encode(), asyncio.Event()
        messages: list[Message] = []
        given = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if given:
                return given.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            messages.append(message)
            if until is not None and len(messages) >= until:
                gone.set()

        length = str(len(body)).encode()
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": asked.path,
            "raw_path": asked.path.encode(),
            "query_string": b"",
            "headers": [
                (b"content-type", b"application/json"),
                (b"content-length", length),
                *headers,
            ],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        if attempt is not None:
            scope[ATTEMPT] = attempt
        await self.app(scope, receive, send)
        return messages


def bytes_of(messages: Sequence[Message]) -> bytes:
    return b"".join(message.get("body", b"") for message in messages)


def random_request(rng: random.Random) -> Asked:
    """For any of the four APIs, with or without a stream, of any kind."""
    path = rng.choice(PATHS)
    text = " ".join(rng.choice(WORDS) for _ in range(rng.randint(3, 40)))
    body = {
        "/v1/chat/completions": _chat,
        "/v1/completions": _completion,
        "/v1/responses": _response,
        "/v1/messages": _message,
    }[path](rng, text)
    body["stream"] = rng.random() < 0.8
    body["temperature"] = rng.choice([0.0, 0.7, 1.0])
    if rng.random() < 0.2:
        body["seed"] = rng.randrange(1000)
    if rng.random() < 0.3:
        body["cache_report"] = True
    if body["stream"] and path in PATHS[:2] and rng.random() < 0.5:
        body["stream_options"] = {
            "include_usage": True,
            "continuous_usage_stats": rng.random() < 0.5,
        }
    return Asked(path, body)


def _sampling(rng: random.Random) -> dict[str, Any]:
    kinds: list[dict[str, Any]] = [
        {},
        {"stop": ["e", "zq"], "min_tokens": 3},
        {"presence_penalty": 1.0, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
        {"bad_words": ["a", "the"]},
        {"logit_bias": {"7": 5.0, "9": -100.0}},
        {"structured_outputs": {"regex": "([ab]{3}c){5}"}},
        {"return_token_ids": True},
    ]
    return {
        "n": rng.choice([1, 1, 2, 3]),
        "max_tokens": rng.randint(3, 40),
        **rng.choice(kinds),
    }


def _chat(rng: random.Random, text: str) -> dict[str, Any]:
    body = _sampling(rng) | {"messages": [{"role": "user", "content": text}]}
    if "structured_outputs" not in body and rng.random() < 0.4:
        function = {"name": "look", "description": "Looks.", "parameters": SCHEMA}
        body["tools"] = [{"type": "function", "function": function}]
        body["tool_choice"] = rng.choice(["required", "auto"])
        body["max_tokens"] = 60
    elif "structured_outputs" not in body and rng.random() < 0.3:
        form = {"type": "json_schema", "json_schema": {"name": "word", "schema": SCHEMA}}
        body["response_format"] = form
    if rng.random() < 0.3:
        body |= {"logprobs": True, "top_logprobs": rng.randint(0, 3)}
    return body


def _completion(rng: random.Random, text: str) -> dict[str, Any]:
    prompts = rng.choice([text, [text, "Once upon a time", text]])
    body = _sampling(rng) | {"prompt": prompts, "echo": rng.random() < 0.3}
    if rng.random() < 0.3:
        body["logprobs"] = rng.randint(0, 3)
    return body


def _response(rng: random.Random, text: str) -> dict[str, Any]:
    body: dict[str, Any] = {"input": text, "max_output_tokens": rng.randint(1, 40)}
    kind = rng.choice(["plain", "tools", "form", "logprobs"])
    if kind == "tools":
        body["tools"] = [{"type": "function", "name": "look", "parameters": SCHEMA}]
        body |= {"tool_choice": "required", "max_output_tokens": 60}
    elif kind == "form":
        body["text"] = {"format": {"type": "json_schema", "name": "word", "schema": SCHEMA}}
    elif kind == "logprobs":
        body |= {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    return body


def _message(rng: random.Random, text: str) -> dict[str, Any]:
    body: dict[str, Any] = {"max_tokens": rng.randint(1, 40)}
    body["messages"] = [{"role": "user", "content": text}]
    kind = rng.choice(["plain", "tools", "form", "stop"])
    if kind == "tools":
        body["tools"] = [{"name": "look", "input_schema": SCHEMA}]
        body |= {"tool_choice": {"type": "any"}, "max_tokens": 60}
    elif kind == "form":
        body["output_config"] = {"format": {"type": "json_schema", "schema": SCHEMA}}
    elif kind == "stop":
        body["stop_sequences"] = ["e", "zq"]
    return body


def broken_off(
    messages: Sequence[Message], attempt: Attempt, rng: random.Random
) -> tuple[bytes, Attempt]:
    """What has been delivered of an answer that broke off anywhere, also within a message, and the
    attempt that goes on with it."""
    delivery, count = Delivery(attempt), rng.randint(0, len(messages))
    for message in messages[:count]:
        delivery.passed(message)
    delivered = bytes_of(messages[:count])
    if count < len(messages) and messages[count].get("body") and rng.random() < 0.5:
        body = messages[count]["body"]
        body = body[: rng.randint(1, len(body))]
        delivery.passed({**messages[count], "body": body})
        delivered += body
    return delivered, delivery.next


@dataclass(frozen=True)
class Case:
    """A request that was answered undisturbed, and its answer."""

    asked: Asked
    attempt: Attempt
    messages: list[Message]

    @property
    def whole(self) -> bytes:
        return bytes_of(self.messages)


async def undisturbed(replica: Replica, asked: Asked, seed: int) -> Case:
    attempt = Attempt(random.Random(seed).getrandbits(62), f"request-{seed}", 1_700_000_000)
    messages = await replica.answer(asked, attempt)
    assert messages[0]["status"] == 200, bytes_of(messages)
    return Case(asked, attempt, messages)


async def difference(
    case: Case, replica: Replica, rng: random.Random, *, drafts: bool = False
) -> str | None:
    """Breaks an answer off and has another replica go on with it. Says what is wrong with it.

    Args:
        drafts: there are some: how many of them held may be told otherwise.
    """
    delivered, attempt = broken_off(case.messages, case.attempt, rng)
    messages = await replica.answer(case.asked, attempt)
    started = [message for message in messages if message["type"] == "http.response.start"]
    if [message["status"] for message in started] != [200] * (not attempt.started):
        return f"the response started again with {started}"
    own = bytes_of(messages)
    expected, found = case.whole, delivered + own
    if attempt.usage is None:  # how much this replica found in its cache is what it says
        masked = (_CACHED.sub(b"", each) for each in (expected, found))
        expected, found = masked
        if case.asked.body.get("cache_report"):
            expected, found = (
                expected.split(b'"cache_report"')[0],
                found.split(b'"cache_report"')[0],
            )
    if drafts:
        expected, found = (_DRAFT_COUNTS.sub(b"", each) for each in (expected, found))
    if case.asked.body.get("cache_report"):
        found = _RESUMED.sub(b"", found)
    if found == expected:
        return None
    places = enumerate(zip(found, expected, strict=False))
    same = next((place for place, (one, other) in places if one != other), len(expected))
    parts = [each[max(0, same - 60) : same + 80] for each in (expected, found)]
    return f"{parts[0]!r} became {parts[1]!r}, delivered {len(delivered)} of {len(case.whole)}"
