"""Routes that the front answers itself: about the deployment, and from what all replicas say."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from fastapi import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope

from vlm_serve.deploy.fleet import BrokenAnswerError, Call, ReplicaLostError, no_replica
from vlm_serve.deploy.metrics import labelled, own_metrics
from vlm_serve.errors import OverloadedError, VlmServeError
from vlm_serve.own_version import own_version
from vlm_serve.server.http.body import read_body

if TYPE_CHECKING:
    from vlm_serve.deploy.front import Front

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = 2.0
"""That a replica has to say something of itself; after that it is left out."""

Answers = Mapping[str, Response]
"""Of the replicas that answered in time, by name."""


async def response(front: Front, scope: Scope, receive: Receive) -> Response | None:
    """The response to a request that no single replica can answer, else None.

    Raises VlmServeError.
    """
    method = "GET" if scope["method"] == "HEAD" else scope["method"]
    route = _ROUTES.get((method, scope["path"]))
    return None if route is None else await route(front, Request(scope, receive))


async def health(front: Front, request: Request) -> Response:
    """200 while a replica is healthy, else 503."""
    answers = await ask(front, request)
    if any(each.status_code == 200 for each in answers.values()):
        return JSONResponse({"status": "ok"})
    if not answers:
        return JSONResponse({"status": "unhealthy", "reason": "no replica answers"}, 503)
    return next(iter(answers.values()))


async def ready(front: Front, request: Request) -> Response:
    """200 while new requests are taken, else 503."""
    if front.requests.draining or (await health(front, request)).status_code != 200:
        return JSONResponse({"status": "not ready"}, status_code=503)
    return JSONResponse({"status": "ready"})


async def show_version(front: Front, request: Request) -> Response:
    return JSONResponse({"version": own_version()})


async def load(front: Front, request: Request) -> Response:
    """The sums over all replicas; what is open and held is the front's own."""
    bodies = [json.loads(bytes(each.body)) for each in (await ask(front, request)).values()]
    names = ("num_requests_running", "num_requests_waiting", "open_prompt_tokens")
    sums = {name: sum(body[name] for body in bodies) for name in names}
    own = {"server_load": front.requests.num_open, "request_memory_bytes": front.memory.held}
    return JSONResponse(own | sums | {"replicas": len(bodies)})


async def metrics(front: Front, request: Request) -> Response:
    """What a Prometheus server scrapes: every sample says of which replica it is."""
    texts = {name: bytes(a.body).decode() for name, a in (await ask(front, request)).items()}
    text = labelled(texts) + own_metrics(
        len(front.fleet.names), front.requests.num_open, front.num_lost
    )
    return Response(text, media_type=METRICS_TYPE)


async def stats(front: Front, request: Request) -> Response:
    """GET /v1/cache/stats: a list, one entry for each replica."""
    answers = await ask(front, request)
    refusal = _refusal(answers)
    if refusal is not None:
        return refusal
    data = [{"replica": name, **json.loads(bytes(a.body))} for name, a in answers.items()]
    return JSONResponse({"object": "list", "data": data})


async def flush(front: Front, request: Request) -> Response:
    """POST /v1/cache/flush, to all replicas. Raises OverloadedError if one did not answer."""
    answers = await ask(front, request, seconds=None)
    refusal = _refusal(answers)
    if refusal is not None:
        return refusal
    if len(answers) < len(front.fleet.names):
        raise OverloadedError("not all replicas have answered", code="replica_lost")
    return next(iter(answers.values()))


def _refusal(answers: Answers) -> Response | None:
    """What went wrong, if anything did."""
    if not answers:
        raise no_replica()
    return next((each for each in answers.values() if each.status_code != 200), None)


async def ask(front: Front, request: Request, seconds: float | None = SECONDS) -> Answers:
    """What all replicas answer to a request, without those that are lost or do not in time."""
    from vlm_serve.deploy.front import plain

    body = await read_body(request, front.config.max_body_bytes)
    scope = plain(request.scope)

    async def one(name: str) -> tuple[str, Response] | None:
        try:
            async with asyncio.timeout(seconds):
                call = Call({**scope, "method": request.method}, body, replica=name)
                return name, response_of([each async for each in front.fleet.answers(call)])
        except (TimeoutError, ReplicaLostError, BrokenAnswerError, VlmServeError):
            return None

    answers = await asyncio.gather(*map(one, front.fleet.names))
    return dict(each for each in answers if each is not None)


def response_of(messages: list[Message]) -> Response:
    """A whole answer as a response."""
    head, *rest = messages
    body = b"".join(message.get("body", b"") for message in rest)
    answer = Response(body, head["status"])
    answer.raw_headers = list(head.get("headers", ()))
    return answer


_ROUTES: Mapping[tuple[str, str], Callable[[Front, Request], Awaitable[Response]]] = {
    ("GET", "/health"): health,
    ("GET", "/ready"): ready,
    ("GET", "/version"): show_version,
    ("GET", "/load"): load,
    ("GET", "/metrics"): metrics,
    ("GET", "/v1/cache/stats"): stats,
    ("POST", "/v1/cache/flush"): flush,
}
