"""Paths that nobody means, made from an application's routes, and what answers them wrongly."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from http.client import HTTPConnection, HTTPResponse
from typing import Any
from urllib.parse import unquote, urlsplit

from fastapi import FastAPI
from starlette.routing import Route, compile_path

METHODS = ("GET", "POST", "DELETE", "PUT", "PATCH", "HEAD", "OPTIONS", "TRACE", "ODD")
PARAMETERS = (
    *("", "/", "//", "%2F", "%2f%2F", "%5C", "%00", "a%00b", "%0A", "%0d%0aX-Y:%20z", "%20"),
    *(".", "..", "../..", "%2e%2e", "..%2f..", "~", "*", "-1", "0", "null", "{}", "%7Bx%7D"),
    *("a" * 9000, "%61" * 3000, "a/" * 2000, "%ff", "%C3%28", "%ED%A0%80", "%F0%9F%98%80"),
    *("x/", "x//", "//x", "x;y=1", "x:y", "x&y", "?x=1", "?", "0" * 64, "+" + "0" * 63),
    *("%", "%zz", "%7F", "x@y"),
)  # fmt: skip
ENDINGS = (
    "/",
    "//",
    "/%2F",
    "%2F",
    "/?x=1",
    "%00",
    "%0A",
    "/.",
    "/..",
    "/x",
    ";x",
    "%20",
    "%ff",
    "/" * 4000,
)


def odd_targets(app: FastAPI) -> Iterator[str]:
    """Targets of requests that name no route, or one with an odd parameter."""
    for route in app.routes:
        assert isinstance(route, Route), "other kinds of routes have no odd paths yet"
        _, template, converters = compile_path(route.path)
        for name in converters:
            others = {other: "x" for other in converters if other != name}
            for value in PARAMETERS:
                yield template.format(**{name: value, **others})
        plain = template.format(**dict.fromkeys(converters, "x"))
        for ending in ENDINGS:
            yield plain + ending
        yield from ("/" + plain, plain.replace("/", "//"), "http://[::1]" + plain)
    yield from ("*", "//", "/%2F", "/%00", "/.", "/..", "/%", "x", "?")


def wrong_answers(url: str, targets: Iterable[str]) -> list[str]:
    """Asks for every target by every method; returns what is answered wrongly."""
    address = urlsplit(url)
    connection = HTTPConnection(str(address.hostname), address.port, timeout=60)
    found = []
    for target in targets:
        for method in METHODS:
            for headers in ({}, {"anthropic-version": "2023-06-01"}):
                connection.putrequest(method, target)
                for name, value in headers.items():
                    connection.putheader(name, value)
                connection.putheader("Content-Length", "0")
                connection.endheaders()
                answer = connection.getresponse()
                problem = _problem(answer, answer.read(), method, target, anthropic=bool(headers))
                if problem:
                    found.append(f"{method} {target[:80]} {headers or ''}: {problem}")
    connection.close()
    return found


def _problem(
    answer: HTTPResponse, body: bytes, method: str, target: str, *, anthropic: bool
) -> str:
    if answer.status < 400:
        return ""
    if answer.status not in (400, 404, 405, 415):
        return f"status {answer.status}: {body[:200]!r}"
    kind = answer.headers["content-type"]
    if kind != "application/json" or not answer.headers["x-request-id"]:
        return f"headers {answer.headers.items()}: {body[:200]!r}"
    if method == "HEAD":
        return f"a body: {body!r}" if body else ""
    error: Any = json.loads(body)
    path = unquote(target.partition("?")[0])
    if path.startswith("/v1/messages/") or (anthropic and path.startswith("/v1/models/")):
        good = error["type"] == "error" and error["error"].keys() == {"type", "message"}
    else:
        good = error["error"].keys() == {"message", "type", "param", "code"}
    return "" if good and error["error"]["message"] else f"another form: {body[:200]!r}"
