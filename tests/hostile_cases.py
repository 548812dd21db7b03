"""Requests of clients that mean harm, each made from a seed alone."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

from hostile_case import CONDUCTS, WATCHES, Case, Conduct, head_of
from hostile_media import part
from hostile_shares import CONDUCTS as CONDUCTS_OF_GROUPS
from hostile_shares import GROUPS, HOSTILE, HOSTILE_GROUPS
from hostile_values import raw_json, schema, size, text, value

MAX_BODY_BYTES = 80 << 20
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
GENERATE = "/inference/v1/generate"
JSON_ROUTES = (
    CHAT,
    COMPLETIONS,
    RESPONSES,
    MESSAGES,
    "/tokenize",
    "/detokenize",
    "/v1/cache/probe",
    "/v1/cache/pin",
    "/v1/responses/input_tokens",
    "/v1/messages/count_tokens",
    GENERATE,
)
GETS = (
    "/health",
    "/metrics",
    "/v1/models",
    "/v1/models/" + "x" * 3000,
    "/v1/cache/tree?limit=-1",
    "/v1/cache/tree?offset=" + "9" * 18,
    "/v1/cache/stats?x=1",
    "/%00",
    "/v1/chat/completions",
    "/v1/models/%ff%fe",
    "/..%2f..%2fetc/passwd",
    "//",
    "/health/",
    "/openapi.json",
    "/load?" + "a" * 9000,
    "/v1/cache/nodes/" + "0" * 64,
    "/v1/cache/nodes/%00",
    "/v1/cache/nodes/" + "f" * 5000,
    "/v1/cache/tree?limit=100000&offset=0&root=x",
    "/v1/cache/events?since=-1",
    "/v1/responses/resp_" + "0" * 32,
    "/v1/responses/..%2f/input_items",
    "/",
    "/?x=" + "y" * 3000,
    "/live/tree.js",
    "/live/../main.js",
    "/live/%2e%2e/%2e%2e/app.py",
    "/shared",
    "/vendor/" + "a/" * 500,
    "/main.js%00.css",
)
EVENTS = "/v1/cache/events"


def _sampling(rng: random.Random) -> dict[str, Any]:
    """Options that are taken, mostly."""
    fields: dict[str, Any] = {"max_tokens": size(rng, 64), "stream": rng.random() < 0.5}
    for name, options in (
        ("temperature", (0, 1, 2)),
        ("n", (1, 2, 4)),
        ("ignore_eos", (True,)),
        ("prompt_logprobs", (0, 20)),
        ("cache_report", (True,)),
        ("seed", (0, 2**62)),
        ("repetition_penalty", (0.01, 2)),
        ("return_token_ids", (True,)),
        ("stop", ("a", ["e", "t"], [""] * 3)),
        ("logit_bias", ({"5": 100}, {str(n): -100 for n in range(300)})),
        ("bad_words", (["a"], ["word"] * 200)),
        ("min_tokens", (1, 60)),
    ):
        if rng.random() < 0.1:
            fields[name] = rng.choice(options)
    return fields


def _messages(rng: random.Random) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text(rng)}]


def _media_messages(rng: random.Random) -> list[dict[str, Any]]:
    parts = [part(rng) for _ in range(size(rng, 4))]
    if rng.random() < 0.05:
        parts = [parts[0]] * size(rng, 600)
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}]


def _valid(rng: random.Random, path: str) -> dict[str, Any]:
    """A body that the route takes."""
    if path == "/detokenize":
        return {"tokens": [rng.randrange(300) for _ in range(size(rng, 1000))]}
    sampling = _sampling(rng)
    if path == COMPLETIONS:
        return {"prompt": text(rng), **sampling}
    if path == RESPONSES:
        return {"input": text(rng), "max_output_tokens": 8, "stream": sampling["stream"]}
    if path == MESSAGES:
        return {"messages": _messages(rng), "max_tokens": 8, "stream": sampling["stream"]}
    if path == CHAT:
        return {"messages": _messages(rng), **sampling}
    if path == GENERATE:
        tokens = [rng.randrange(300) for _ in range(size(rng, 3000) or 1)]
        return {"token_ids": tokens, "sampling_params": {"max_tokens": sampling["max_tokens"]}}
    if path.endswith("input_tokens"):
        return {"input": text(rng)}
    extra = {"ttl_seconds": 1} if path.endswith("pin") else {}
    return {"messages": _messages(rng), **extra} if rng.random() < 0.5 else {"prompt": "x", **extra}


FIELDS = (
    "messages",
    "prompt",
    "input",
    "model",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "n",
    "stop",
    "stop_token_ids",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "tools",
    "metadata",
    "tool_choice",
    "response_format",
    "structured_outputs",
    "stream_options",
    "stream",
    "seed",
    "chat_template_kwargs",
    "mm_processor_kwargs",
    "media_io_kwargs",
    "cache_salt",
    "request_id",
    "priority",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "system",
    "instructions",
    "thinking",
    "reasoning",
    "text",
    "include",
    "truncation",
    "verbosity",
    "previous_response_id",
    "store",
    "output_config",
    "x",
    "",
    "__proto__",
    "tokens",
    "ttl_seconds",
    "min_p",
    "user",
    "echo",
    "prediction",
    "token_ids",
    "sampling_params",
    "features",
)


def _fields(rng: random.Random) -> tuple[str, Any]:
    path = rng.choice(JSON_ROUTES)
    body = _valid(rng, path)
    for _ in range(rng.randint(1, 3)):
        body[rng.choice(FIELDS)] = value(rng)
    return path, body


def _conversation(rng: random.Random) -> tuple[str, Any]:
    """Messages that are odd in their shape or in a field."""
    messages: list[Any] = _messages(rng)
    message = {"role": rng.choice(("assistant", "tool", "system", "developer", "user", "x"))}
    for name in ("content", "reasoning_content", "tool_calls", "tool_call_id", "name", "refusal"):
        if rng.random() < 0.4:
            message[name] = rng.choice((text, value))(rng)
    messages += [message] * rng.choice((1, 1, 1, size(rng, 5000)))
    return rng.choice((CHAT, MESSAGES, "/tokenize")), {"messages": messages, "max_tokens": 4}


def _parts(rng: random.Random) -> tuple[str, Any]:
    """Content parts of odd types."""
    kind: Any = rng.choice(("text", "image_url", "video_url", [], {}, None, 5, "input_text", "x"))
    odd = {"type": kind, "text": value(rng, 1000), str(kind): value(rng, 1000)}
    content = [odd] * rng.choice((1, 1, size(rng, 200_000)))
    path = rng.choice((CHAT, MESSAGES, RESPONSES))
    name = "input" if path == RESPONSES else "messages"
    return path, {name: [{"role": "user", "content": content}], "max_tokens": 4}


def _tools(rng: random.Random) -> tuple[str, Any]:
    function: dict[str, Any] = {"name": rng.choice(("f", text(rng, 200)))}
    if rng.random() < 0.5:
        function["description"] = text(rng)
    function["parameters"] = schema(rng)
    tools = [{"type": "function", "function": function}] * rng.choice((1, 1, size(rng, 300)))
    choice = rng.choice(
        ("auto", "none", "required", {"type": "function", "function": {"name": "f"}})
    )
    body = {"messages": _messages(rng), "tools": tools, "tool_choice": choice, "max_tokens": 8}
    return CHAT, body


REGEXES = ("(a|aa)+$", "(" * 500, "[a-z]{1,9999}")
GRAMMARS = ("root ::= root", "root ::= (")


def _forms(rng: random.Random) -> tuple[str, Any]:
    form: dict[str, Any] = rng.choice(
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": schema(rng)},
                }
            },
            {"response_format": {"type": "json_object"}},
            {"structured_outputs": {"json": schema(rng)}},
            {"structured_outputs": {"regex": rng.choice((*REGEXES, text(rng, 1000)))}},
            {"structured_outputs": {"choice": [text(rng, 1000) for _ in range(size(rng, 500))]}},
            {"structured_outputs": {"grammar": rng.choice((*GRAMMARS, text(rng, 10_000)))}},
        )
    )
    return rng.choice((CHAT, COMPLETIONS)), {
        "messages": [{"role": "user", "content": "x"}],
        "prompt": "x",
        "max_tokens": 8,
        **form,
    }


def _predictions(rng: random.Random) -> tuple[str, Any]:
    """What the answer is said to be: much, odd or wrong."""
    content: Any = rng.choice((text, value))(rng, 200_000)
    if rng.random() < 0.4:
        part = {"type": rng.choice(("text", "x", None)), "text": content}
        content = [part] * rng.choice((1, 1, size(rng, 5000)))
    prediction = {"type": rng.choice(("content", "content", "x")), "content": content}
    return CHAT, {"messages": _messages(rng), "prediction": prediction} | _sampling(rng)


def _media(rng: random.Random) -> tuple[str, Any]:
    return CHAT, {"messages": _media_messages(rng), "max_tokens": size(rng, 8)}


def _text(rng: random.Random) -> tuple[str, Any]:
    path = rng.choice(JSON_ROUTES)
    return path, _valid(rng, path)


def _sizes(rng: random.Random) -> tuple[str, Any]:
    """Much of something harmless, up to more than a body may have."""
    return rng.choice(JSON_ROUTES), {"prompt": "x", "metadata": {"x": "y" * size(rng, 20_000_000)}}


def _raw(rng: random.Random) -> tuple[str, bytes]:
    return rng.choice(JSON_ROUTES), raw_json(rng)


BODIES: dict[Callable[[random.Random], tuple[str, Any]], int] = {
    _fields: 20,
    _media: 24,
    _raw: 12,
    _text: 10,
    _conversation: 6,
    _parts: 6,
    _tools: 6,
    _forms: 6,
    _sizes: 3,
    _predictions: 4,
}

CHUNKED = b"POST /tokenize HTTP/1.1\r\nHost: [::1]\r\nTransfer-Encoding: chunked"
BAD_HEADS = (
    b"GET / HTTP/9.9\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET /\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"\r\n" * 1000,
    b"\x00" * 500,
    b"GET /health HTTP/1.1\r\nHost: [::1]\r\nHost: y\r\n\r\n",
    b"GET  /  HTTP/1.1\r\nHost: [::1]\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: [::1]\r\nContent-Length: -1\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: [::1]\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcd",
    b"POST /tokenize HTTP/1.1\r\nHost: [::1]\r\nContent-Length: " + b"9" * 400 + b"\r\n\r\n",
    CHUNKED + b"\r\n\r\nzz\r\n",
    CHUNKED + b"\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
    CHUNKED + b"\r\n\r\nffffffffffffffff\r\nabc",
    b"POST /tokenize HTTP/1.1\r\nHost: [::1]\r\nTransfer-Encoding: gzip\r\n\r\nabc",
    b"GET /health HTTP/1.1\r\nHost: [::1]\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: [::1]\r\n" + b"X: y\r\n" * 5000 + b"\r\n",
    b"GET /health HTTP/1.1\r\nHost: [::1]\r\nX: \xff\xfe\x00\r\n\r\n",
    b"GET /\xff\xfe HTTP/1.1\r\nHost: [::1]\r\n\r\n",
    b"GET http://x:99999/ HTTP/1.1\r\nHost: [::1]\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: [::1]\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: [::1]\r\nExpect: 100-continue\r\nContent-Length: 9\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: [::1]\r\n folded: y\r\n\r\n",
    b"CONNECT x:80 HTTP/1.1\r\nHost: [::1]\r\n\r\n",
)


def as_json(value: Any) -> bytes:
    """Cut where it becomes much longer than any body that a server reads."""
    return _json_of(value)[:MAX_BODY_BYTES].encode()


def _json_of(value: Any) -> str:
    """Encode one value. What a list repeats is encoded once: a case took ten minutes to be made."""
    if isinstance(value, dict):
        fields = (f"{json.dumps(key)}: {_json_of(each)}" for key, each in value.items())
        return "{" + ", ".join(fields) + "}"
    if not isinstance(value, list):
        return json.dumps(value)
    parts: list[str] = []
    length, last, piece = 0, object(), ""
    for each in value:
        if each is not last:
            last, piece = each, _json_of(each)
        parts.append(piece)
        length += len(piece) + 2
        if length > MAX_BODY_BYTES:
            break
    return "[" + ", ".join(parts) + "]"


SHARED = 0.15
"""Share of the cases of `hostile_shares`."""


def make_case(seed: int, groups: Sequence[str] = ()) -> Case:
    """The case of a seed.

    Args:
        groups: of `hostile_shares`, by one key alone; none: everything, by two keys.
    """
    drawn = random.Random(f"{seed} shared")
    if groups:
        return _shared(seed, drawn, groups, HOSTILE[0])
    if drawn.random() < SHARED:
        return _shared(seed, drawn, HOSTILE_GROUPS, "")
    rng = random.Random(seed)
    conduct = rng.choices(list(CONDUCTS), list(CONDUCTS.values()))[0]
    kind = rng.random()
    if kind < 0.06:
        data = rng.choice(BAD_HEADS)
        if rng.random() < 0.3:
            data = rng.randbytes(size(rng, 100_000))
        return Case(seed, "bad head", "whole", data, valid=False)
    if kind < 0.07:
        head = head_of(rng, "GET", EVENTS, None)
        return Case(seed, "events", rng.choice(WATCHES), head, shared=True)
    if kind < 0.11:
        method = rng.choice(("GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "BREW"))
        head = head_of(rng, method, rng.choice(GETS), None)
        return Case(seed, "odd route", conduct, head)
    make = rng.choices(list(BODIES), list(BODIES.values()))[0]
    path, body = make(rng)
    data = body if isinstance(body, bytes) else as_json(body)
    name = make.__name__.strip("_")
    return Case(seed, name, conduct, head_of(rng, "POST", path, len(data)), data)


def _shared(seed: int, rng: random.Random, groups: Sequence[str], key: str) -> Case:
    group = rng.choice(groups)
    method, path, body = GROUPS[group](rng)
    data = b"" if body is None else json.dumps(body).encode()
    conduct: Conduct = CONDUCTS_OF_GROUPS.get(group, "whole")
    head = head_of(rng, method, path, None if body is None else len(data), key)
    return Case(seed, group, conduct, head, data, shared=True)
