"""Routes under /v1/cache: look into the prefix cache, hold on to a part of it, empty it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from vlm_serve.errors import InvalidRequestError
from vlm_serve.server.api.conversation import prepare
from vlm_serve.server.api.fields import MAX_SALT_LENGTH, SALT_PATTERN, RequestModel, Tokens
from vlm_serve.server.api.prompts import EitherPrompt, prepare_tokens
from vlm_serve.server.api.reports import cache_report_body
from vlm_serve.server.body import read_json, read_request
from vlm_serve.server.service import Preparation, Service
from vlm_serve.server.tenants import refuse_tenants, salt_of

DEFAULT_TREE_NODES = 100


class CachePrompt(EitherPrompt):
    """Unknown fields are refused: one that was meant to change the prompt would otherwise make the
    answer wrong."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    prompt: str | Tokens | None = None
    cache_salt: str | None = Field(None, max_length=MAX_SALT_LENGTH, pattern=SALT_PATTERN)


class ProbeRequest(CachePrompt):
    pass


class PinRequest(CachePrompt):
    ttl_seconds: float


class FlushRequest(RequestModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Pinned(BaseModel):
    object: Literal["cache.pin"] = "cache.pin"
    prompt_tokens: int
    pinned_tokens: int


class Flushed(BaseModel):
    object: Literal["cache.flush"] = "cache.flush"


class CacheNode(BaseModel):
    key: str
    parent: str
    start: int
    end: int
    tail: bool
    block: int
    pins: int
    hits: int
    exact: bool
    media: bool
    snapshot: str | None
    snapshot_hits: int
    num_bytes: int


class CacheTree(BaseModel):
    object: Literal["cache.tree"] = "cache.tree"
    total: int
    offset: int
    nodes: list[CacheNode]


async def probe(service: Service, request: Request) -> Response:
    """POST /v1/cache/probe: what a request would find. Nothing runs. Raises InvalidRequestError."""
    asked = await read_request(service, request, ProbeRequest, partial(_asked, service, request))
    with service.admitted():
        prompt = await service.prepared(asked)
        report = cache_report_body(await asyncio.to_thread(service.engine.probe, prompt))
    assert report is not None
    return JSONResponse(report.model_dump())


async def pin(service: Service, request: Request) -> Response:
    """POST /v1/cache/pin: keeps a prompt's KV and state for a while. Raises InvalidRequestError."""
    body, asked = await read_request(
        service, request, PinRequest, lambda body: (body, _asked(service, request, body))
    )
    with service.admitted():
        prompt = await service.prepared(asked)
        pinned = await asyncio.to_thread(service.engine.pin, prompt, body.ttl_seconds)
    answer = Pinned(prompt_tokens=len(prompt), pinned_tokens=pinned)
    return JSONResponse(answer.model_dump())


async def flush(service: Service, request: Request) -> Response:
    """POST /v1/cache/flush: forgets everything that no running request holds, and the stored
    responses."""
    refuse_tenants(request.scope)
    await read_json(service, request, FlushRequest)
    await asyncio.to_thread(service.engine.flush)
    if service.responses is not None:
        service.responses.clear()
    return JSONResponse(Flushed().model_dump())


async def stats(service: Service, request: Request) -> Response:
    """GET /v1/cache/stats: the engine's counters and gauges."""
    refuse_tenants(request.scope)
    _refuse_unknown(request.query_params, ())
    return JSONResponse(await asyncio.to_thread(service.engine.stats))


async def tree(service: Service, request: Request) -> Response:
    """GET /v1/cache/tree?offset=0&limit=100: a page of nodes. Raises InvalidRequestError."""
    refuse_tenants(request.scope)
    query = request.query_params
    _refuse_unknown(query, ("offset", "limit"))
    offset = _number(query, "offset", 0)
    limit = _number(query, "limit", DEFAULT_TREE_NODES)
    page = await asyncio.to_thread(service.engine.tree, offset, limit)
    return JSONResponse(CacheTree(**dataclasses.asdict(page)).model_dump())


def _asked(service: Service, request: Request, body: CachePrompt) -> Callable[[], Preparation]:
    """What makes the prompt that the body describes; to be called on a preparation thread.

    Raises InvalidRequestError, here or there.
    """
    service.resolve_model(body.model)
    salt = salt_of(request.scope, body.cache_salt)
    chat = body.chat_or_none(body.prompt)
    if chat is not None:
        return partial(prepare, service, chat, salt)
    if not body.prompt:
        raise InvalidRequestError("prompt must not be empty", param="prompt")
    return partial(prepare_tokens, service, body.prompt, salt)


def _refuse_unknown(query: Mapping[str, str], known: tuple[str, ...]) -> None:
    for name in query:
        if name not in known:
            raise InvalidRequestError(f"unknown query parameter {name[:64]!r}", param=name[:64])


def _number(query: Mapping[str, str], name: str, default: int) -> int:
    text = query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise InvalidRequestError(f"{name} must be a number, got {text[:64]!r}", param=name)
    return int(text)
