"""The gateway's own routes: they merge the replies of all replicas, and their metrics into one text
of Prometheus' exposition format."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from fastapi import Request
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope

from vlm_serve.deploy.orders import PAUSES, RESUMES, SLEEPS, UPDATES, Orders
from vlm_serve.deploy.replica_pool import (
    ReplicaCall,
    ReplicaPool,
    no_replica,
)
from vlm_serve.deploy.replies import Replies, forwarded_scope, replies_of
from vlm_serve.errors import OverloadedError
from vlm_serve.server.config import ServerConfig
from vlm_serve.server.http.admission import OpenRequests
from vlm_serve.server.http.body import read_body
from vlm_serve.server.http.request_memory import RequestMemory
from vlm_serve.system.version import __version__

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PINS = "/v1/cache/pins"
SECONDS = 2.0
"""Time limit for a replica's reply; a slower replica is left out."""


class GatewayState(Protocol):
    """The attributes of a `Gateway` read by these routes."""

    config: ServerConfig
    memory: RequestMemory
    num_lost: int
    orders: Orders
    pool: ReplicaPool
    requests: OpenRequests


async def response(gateway: GatewayState, scope: Scope, receive: Receive) -> Response | None:
    """Answer a request about the whole deployment; return None for all other requests.

    Raises VlmServeError.
    """
    method = "GET" if scope["method"] == "HEAD" else scope["method"]
    path = scope["path"]
    route = ROUTES.get((method, PINS if path.startswith(f"{PINS}/") else path))
    return None if route is None else await route(gateway, Request(scope, receive))


async def health(gateway: GatewayState, request: Request) -> Response:
    """Return 200 while any replica is healthy, else 503; what a degraded one says, or why one does
    not serve, if there is one."""
    replies = await ask_all(gateway, request)
    apart = "; ".join(f"replica {name}: {why}" for name, why in gateway.orders.apart.items())
    if well := [reply for reply in replies.values() if reply.status_code == 200]:
        degraded = (reply for reply in well if b'"degraded"' in reply.body)
        told = {"status": "degraded", "reason": apart} if apart else {"status": "ok"}
        return next(degraded, JSONResponse(told))
    if not replies:
        reason = apart or "no replica answers"
        return JSONResponse({"status": "unhealthy", "reason": reason}, 503)
    return next(iter(replies.values()))


async def ready(gateway: GatewayState, request: Request) -> Response:
    """Return 200 while new requests are accepted, else 503."""
    closed = gateway.requests.draining or gateway.orders.parts
    if closed or (await health(gateway, request)).status_code != 200:
        return JSONResponse({"status": "not ready"}, status_code=503)
    return JSONResponse({"status": "ready"})


async def show_version(gateway: GatewayState, request: Request) -> Response:
    return JSONResponse({"version": __version__})


async def load(gateway: GatewayState, request: Request) -> Response:
    """Sum the load of all replicas; open requests and their memory are the gateway's own."""
    bodies = [json.loads(bytes(reply.body)) for reply in (await ask_all(gateway, request)).values()]
    names = ("num_requests_running", "num_requests_waiting", "open_prompt_tokens")
    sums = {name: sum(body[name] for body in bodies) for name in names}
    counts = {"server_load": gateway.requests.num_open, "request_memory_bytes": gateway.memory.held}
    return JSONResponse(counts | sums | {"replicas": len(bodies)})


async def metrics(gateway: GatewayState, request: Request) -> Response:
    """Return all replicas' metrics, labelled by replica, and the gateway's own."""
    replies = await ask_all(gateway, request)
    texts = {name: bytes(reply.body).decode() for name, reply in replies.items()}
    text = own_metrics(len(gateway.pool.names), gateway.requests.num_open, gateway.num_lost)
    return Response(labelled(texts) + text, media_type=METRICS_TYPE)


async def stats(gateway: GatewayState, request: Request) -> Response:
    """Serve GET /v1/cache/stats or /v1/cache/pins: a list with one entry or page per replica."""
    replies = await ask_all(gateway, request)
    refusal = _refusal(replies)
    if refusal is not None:
        return refusal
    data = [{"replica": name, **json.loads(bytes(a.body))} for name, a in replies.items()]
    return JSONResponse({"object": "list", "data": data})


async def flush(gateway: GatewayState, request: Request) -> Response:
    """Serve POST /v1/cache/flush, or a route like it, on all replicas. Raise OverloadedError if one
    did not answer."""
    replies = await ask_all(gateway, request, seconds=None)
    refusal = _refusal(replies)
    if refusal is not None:
        return refusal
    if len(replies) < len(gateway.pool.names):
        raise OverloadedError("not all replicas have answered", code="replica_lost")
    return next(iter(replies.values()))


async def follow(gateway: GatewayState, request: Request) -> Response:
    """Have all replicas follow the operator's order, or none; see `Orders.follow`."""
    return await gateway.orders.follow(request)


async def agreed(gateway: GatewayState, request: Request) -> Response:
    """Serve GET /is_paused or /is_sleeping: true if all replicas say so."""
    replies = await ask_all(gateway, request)
    refusal = _refusal(replies)
    if refusal is not None:
        return refusal
    bodies = [json.loads(bytes(reply.body)) for reply in replies.values()]
    return JSONResponse({name: all(body[name] for body in bodies) for name in bodies[0]})


async def lift_pins(gateway: GatewayState, request: Request) -> Response:
    """Serve DELETE /v1/cache/pins, with or without a key, on all replicas.

    Raises OverloadedError if one did not answer.
    """
    replies = await ask_all(gateway, request, seconds=None)
    if len(replies) < len(gateway.pool.names) or not replies:
        raise OverloadedError("not all replicas have answered", code="replica_lost")
    done = [json.loads(bytes(reply.body)) for reply in replies.values() if reply.status_code == 200]
    if not done:
        return next(iter(replies.values()))
    return JSONResponse(done[0] | {"lifted": sum(body["lifted"] for body in done)})


def _refusal(replies: Replies) -> Response | None:
    """Return the first error reply, if any."""
    if not replies:
        raise no_replica()
    return next((reply for reply in replies.values() if reply.status_code != 200), None)


async def ask_all(
    gateway: GatewayState, request: Request, seconds: float | None = SECONDS
) -> Replies:
    """Send a request to all replicas; lost and slow ones are left out."""
    body = await read_body(request, gateway.config.max_body_bytes)
    scope = forwarded_scope(request.scope)
    call = ReplicaCall({**scope, "method": request.method}, body)
    return await replies_of(gateway.pool, call, gateway.pool.names, seconds)


ROUTES: Mapping[tuple[str, str], Callable[[GatewayState, Request], Awaitable[Response]]] = {
    ("GET", "/health"): health,
    ("GET", "/ping"): health,
    ("POST", "/ping"): health,
    ("GET", "/ready"): ready,
    ("GET", "/version"): show_version,
    ("GET", "/load"): load,
    ("GET", "/metrics"): metrics,
    ("GET", "/v1/cache/stats"): stats,
    ("GET", PINS): stats,
    ("DELETE", PINS): lift_pins,
    ("POST", "/v1/cache/flush"): flush,
    ("POST", "/reset_prefix_cache"): flush,
    ("POST", "/flush_cache"): flush,
    ("GET", "/is_paused"): agreed,
    ("GET", "/is_sleeping"): agreed,
    **{("POST", path): follow for path in (*UPDATES, *PAUSES, *RESUMES, *SLEEPS)},
}


_SAMPLE = re.compile(r"([A-Za-z_:][A-Za-z0-9_:]*)(\{)?")


def labelled(texts: Mapping[str, str]) -> str:
    """Merge texts into one, with a label `replica` on every sample. Families stay together.

    Args:
        texts: exposition texts by replica name.
    """
    families: dict[str, tuple[list[str], list[str]]] = {}
    for name, text in texts.items():
        headers, samples = families.setdefault("", ([], []))
        for line in text.splitlines():
            if line.startswith("# HELP "):
                family = line.split(" ", 3)[2]
                headers, samples = families.setdefault(family, ([], []))
                if not samples:
                    headers[:] = [line]
            elif line.startswith("#"):
                if line not in headers:
                    headers.append(line)
            elif line:
                samples.append(_with_label(line, name))
    lines = [line for headers, samples in families.values() for line in (*headers, *samples)]
    return "".join(f"{line}\n" for line in lines)


def _with_label(line: str, replica: str) -> str:
    match = _SAMPLE.match(line)
    assert match is not None, line
    rest = line[match.end() :]
    label = f'replica="{replica}"'
    return f"{match[1]}{{{label},{rest}" if match[2] else f"{match[1]}{{{label}}}{rest}"


def own_metrics(replicas: int, num_open: int, num_lost: int) -> str:
    """Return the gateway's own metrics."""
    lost = "Requests that moved to another replica because theirs was lost"
    registry = CollectorRegistry()
    registry.register(
        _Families(
            GaugeMetricFamily("vlm_serve:replicas", "Replicas that are reachable", replicas),
            GaugeMetricFamily(
                "vlm_serve:front_open_requests", "Requests that the gateway has open", num_open
            ),
            CounterMetricFamily("vlm_serve:failovers", lost, num_lost),
        )
    )
    return generate_latest(registry).decode()


class _Families(Collector):
    """A collector of given families."""

    def __init__(self, *families: Metric) -> None:
        self._families = families

    def collect(self) -> tuple[Metric, ...]:
        return self._families
