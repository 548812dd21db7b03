"""Routes under /v1/cache: inspect the prefix cache, pin parts of it, flush it."""

from __future__ import annotations

import asyncio
import dataclasses
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from vlm_serve.cache.listing import ListedNode
from vlm_serve.errors import InvalidRequestError, VlmServeError
from vlm_serve.preprocess.reading.conversation import Conversation
from vlm_serve.preprocess.reading.reader import read_conversation
from vlm_serve.server.api.conversation import prepare
from vlm_serve.server.api.fields import MAX_SALT_LENGTH, SALT_PATTERN, RequestModel, Tokens
from vlm_serve.server.api.prompts import PromptOrMessages, prepare_tokens
from vlm_serve.server.api.reports import cache_report_body
from vlm_serve.server.api.request_body import read_json, read_prompt, read_value
from vlm_serve.server.http.json_body import validate
from vlm_serve.server.http.tenants import is_tenant, refuse_tenants, salt_of
from vlm_serve.server.service import Preparation, Service

DEFAULT_TREE_NODES = 100

NodeKey = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class NodeNotFoundError(VlmServeError):
    """The cache has no node with this key, or the client may not see it: HTTP 404."""

    status = 404
    type = "invalid_request_error"


class CachePrompt(PromptOrMessages):
    """A prompt to look up or pin. Unknown fields are refused: if one that shapes the prompt were
    ignored, the result would be wrong."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    prompt: str | Tokens | None = None
    cache_salt: str | None = Field(None, max_length=MAX_SALT_LENGTH, pattern=SALT_PATTERN)


class ProbeRequest(CachePrompt):
    pass


class PinRequest(CachePrompt):
    ttl_seconds: float
    key: NodeKey | None = None


class FlushRequest(RequestModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Pinned(BaseModel):
    object: Literal["cache.pin"] = "cache.pin"
    prompt_tokens: int
    pinned_tokens: int


class Flushed(BaseModel):
    object: Literal["cache.flush"] = "cache.flush"


class MediaBody(BaseModel):
    offset: int
    length: int
    kind: str
    hash: str


class AffinityEntry(BaseModel):
    key: str
    tokens: int


class Affinity(BaseModel):
    object: Literal["cache.affinity"] = "cache.affinity"
    version: int
    entries: list[AffinityEntry]


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
    media: list[MediaBody]
    snapshot: str | None
    snapshot_hits: int
    tier: str
    num_bytes: int


class CacheNodeDetails(CacheNode):
    """A node; `token_ids` is null for tenants."""

    token_ids: list[int] | None


class CacheTree(BaseModel):
    object: Literal["cache.tree"] = "cache.tree"
    total: int
    offset: int
    nodes: list[CacheNode]


async def probe(service: Service, request: Request) -> Response:
    """Report how much of a request the cache would serve: POST /v1/cache/probe. Nothing runs.

    Raises:
        VlmServeError: the request is invalid, or the server does not admit it.
    """
    preparation = await read_prompt(
        service, request, "chat", ProbeRequest, partial(_preparation, service, request)
    )
    with service.admission.admitted():
        prompt = await service.prepare(preparation)
        report = cache_report_body(await asyncio.to_thread(service.engine.probe, prompt))
    assert report is not None
    return JSONResponse(report.model_dump())


async def pin(service: Service, request: Request) -> Response:
    """Pin a prompt's KV and state, or those of a node and its ancestors: POST /v1/cache/pin.

    Raises:
        NodeNotFoundError: the cache has no node with this key that the client may see.
        VlmServeError: the request is invalid, or the server does not admit it.
    """
    body, preparation = await read_value(service, request, partial(_pin_target, service, request))
    with service.admission.admitted():
        if isinstance(preparation, ListedNode):
            length, key = preparation.node.end, preparation.node.key
            pinned = await asyncio.to_thread(service.engine.pin_node, key, body.ttl_seconds)
        else:
            prompt = await service.prepare(preparation)
            length = len(prompt)
            pinned = await asyncio.to_thread(service.engine.pin, prompt, body.ttl_seconds)
    return JSONResponse(Pinned(prompt_tokens=length, pinned_tokens=pinned).model_dump())


async def flush(service: Service, request: Request) -> Response:
    """Evict everything that no running request holds, and delete stored responses: POST
    /v1/cache/flush."""
    refuse_tenants(request.scope)
    await read_json(service, request, FlushRequest)
    await asyncio.to_thread(service.engine.flush)
    if service.state.responses is not None:
        service.state.responses.clear()
    return JSONResponse(Flushed().model_dump())


async def stats(service: Service, request: Request) -> Response:
    """Return the engine's counters and gauges: GET /v1/cache/stats."""
    refuse_tenants(request.scope)
    refuse_unknown(request.query_params, ())
    return JSONResponse(await asyncio.to_thread(service.engine.stats))


async def affinity(service: Service, request: Request) -> Response:
    """Return the affinity keys of cached prefixes, for routers: GET /v1/cache/affinity."""
    refuse_tenants(request.scope)
    refuse_unknown(request.query_params, ())
    digest = await asyncio.to_thread(service.engine.affinity_digest)
    entries = [AffinityEntry(key=key.hex(), tokens=tokens) for key, tokens in digest.entries]
    return JSONResponse(Affinity(version=digest.version, entries=entries).model_dump())


async def tree(service: Service, request: Request) -> Response:
    """Return a page of the nodes that the client may see: GET /v1/cache/tree?offset=0&limit=100.

    Raises:
        InvalidRequestError: a query parameter is invalid or unknown.
    """
    query = request.query_params
    refuse_unknown(query, ("offset", "limit"))
    offset = _number(query, "offset", 0)
    limit = _number(query, "limit", DEFAULT_TREE_NODES)
    entries = entries_below(visible_root(service, request), service.engine.mirror.listing().entries)
    page = service.engine.page(entries, offset, limit)
    return JSONResponse(CacheTree(**dataclasses.asdict(page)).model_dump())


async def node(service: Service, request: Request) -> Response:
    """Return the details of one node: GET /v1/cache/nodes/{key}.

    Raises:
        NodeNotFoundError: the cache has no node with this key that the client may see.
    """
    refuse_unknown(request.query_params, ())
    entry = _find(service, request, request.path_params["key"])
    token_ids = None
    if not is_tenant(request.scope):
        token_ids = list(struct.unpack(f"<{entry.node.num_tokens}I", entry.node.packed_tokens))
    body = dataclasses.asdict(service.engine.describe(entry))
    return JSONResponse(CacheNodeDetails(**body, token_ids=token_ids).model_dump())


def visible_root(service: Service, request: Request) -> bytes | None:
    """Return the root key below which the client sees the cache; None: it sees everything."""
    if not is_tenant(request.scope):
        return None
    root: bytes = service.engine.preprocessor.root_key(salt_of(request.scope, None))
    return root


def entries_below(root: bytes | None, entries: Sequence[ListedNode]) -> Sequence[ListedNode]:
    """Return the nodes below a root; None: all nodes."""
    return entries if root is None else [entry for entry in entries if entry.root == root]


def _find(service: Service, request: Request, key: str) -> ListedNode:
    """Return the node with a hexadecimal key.

    Raises:
        NodeNotFoundError: there is none, or the client may not see it.
    """
    root = visible_root(service, request)
    try:
        entry = service.engine.mirror.find(bytes.fromhex(key))
    except ValueError:
        entry = None
    if entry is None or root not in (None, entry.root):
        raise NodeNotFoundError(
            "the cache has no node with that key", param="key", code="node_not_found"
        )
    return entry


def _pin_target(
    service: Service, request: Request, value: Mapping[str, Any]
) -> tuple[PinRequest, ListedNode | Callable[[], Preparation]]:
    """Return the body with the node that it names, or with a function that makes its prompt."""
    body = validate(value, PinRequest)
    if body.key is None:
        return body, _preparation(service, request, body, read_conversation("chat", value))
    given = {name for name, each in value.items() if each is not None}
    if given - {"key", "ttl_seconds", "model"}:
        raise InvalidRequestError("key must come without a prompt", param="key")
    service.state.resolve_model(body.model)
    return body, _find(service, request, body.key)


def _preparation(
    service: Service, request: Request, body: CachePrompt, conversation: Conversation
) -> Callable[[], Preparation]:
    """Return a function that makes the body's prompt; call it on a preparation thread.

    Raises:
        InvalidRequestError: the prompt is invalid. The returned function may raise it, too.
    """
    service.state.resolve_model(body.model)
    salt = salt_of(request.scope, body.cache_salt)
    body.check_alternatives(body.prompt)
    if body.prompt is None:
        return partial(prepare, service, conversation, salt)
    if not body.prompt:
        raise InvalidRequestError("prompt must not be empty", param="prompt")
    return partial(prepare_tokens, service, body.prompt, salt)


def refuse_unknown(query: Mapping[str, str], known: tuple[str, ...]) -> None:
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
