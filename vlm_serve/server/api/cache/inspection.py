"""Routes under /v1/cache: inspect the prefix cache and flush it.

A tenant sees its own part of the cache, everybody else all of it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from vlm_serve.cache.listing import ListedNode
from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.reading.conversation import Conversation
from vlm_serve.server.api.shared.chat_request import PromptOrMessages
from vlm_serve.server.api.shared.conversation import prepare, prepare_tokens
from vlm_serve.server.api.shared.fields import (
    MAX_SALT_LENGTH,
    SALT_PATTERN,
    ExactModel,
    Tokens,
    cache_report_body,
)
from vlm_serve.server.api.shared.request_body import read_json, read_prompt
from vlm_serve.server.api.shared.unknown_fields import ignored_header
from vlm_serve.server.http.auth import is_tenant, refuse_tenants, salt_of
from vlm_serve.server.http.errors import NotFoundError
from vlm_serve.server.http.tenants import tenant_of
from vlm_serve.server.service import Preparation, Service

DEFAULT_TREE_NODES = 100
_NUMBER_DIGITS = 12
"""Hexadecimal digits of a tenant's block numbers, which every JSON reader holds exactly."""

NodeKey = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class CachePrompt(PromptOrMessages):
    """A prompt to look up or pin. Unknown fields are refused: if one that shapes the prompt were
    ignored, the result would be wrong."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    prompt: str | Tokens | None = None
    cache_salt: str | None = Field(None, max_length=MAX_SALT_LENGTH, pattern=SALT_PATTERN)


class ProbeRequest(CachePrompt):
    tells_media: ClassVar[bool] = True


class FlushRequest(ExactModel):
    pass


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
    preparation, headers = await read_prompt(
        service, request, "chat", ProbeRequest, partial(preparation_of, service, request)
    )
    with service.admission.admitted(tenant_of(request.scope)):
        prompt = await service.prepare(preparation)
        report = cache_report_body(await asyncio.to_thread(service.engine.probe, prompt))
    assert report is not None
    return JSONResponse(report.model_dump(), headers=headers)


async def flush(service: Service, request: Request) -> Response:
    """Evict everything that no running request holds, and delete stored responses: POST
    /v1/cache/flush."""
    refuse_tenants(request.scope)
    await read_json(service, request, FlushRequest)
    await service.flush()
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
    offset, limit = page_of(request.query_params)
    visible = VisibleRoots(service, request).refresh()
    entries = visible.below(service.engine.mirror.listing().entries)
    page = await asyncio.to_thread(service.engine.page, entries, offset, limit)
    body = dataclasses.asdict(page)
    if is_tenant(request.scope):
        body["nodes"] = [with_own_number(node) for node in body["nodes"]]
    return JSONResponse(CacheTree(**body).model_dump())


async def node(service: Service, request: Request) -> Response:
    """Return the details of one node: GET /v1/cache/nodes/{key}.

    Raises:
        NotFoundError: the client may see no node with this key.
    """
    refuse_unknown(request.query_params, ())
    entry = find_node(service, request, request.path_params["key"])
    token_ids = None
    if not is_tenant(request.scope):
        token_ids = list(struct.unpack(f"<{entry.node.num_tokens}I", entry.node.packed_tokens))
    page = await asyncio.to_thread(service.engine.page, [entry], 0, 1)
    body = dataclasses.asdict(page.nodes[0])
    if is_tenant(request.scope):
        body = with_own_number(body)
    return JSONResponse(CacheNodeDetails(**body, token_ids=token_ids).model_dump())


def with_own_number(node: dict[str, Any]) -> dict[str, Any]:
    """Return a node's body as a tenant sees it: its block's number follows from its key alone.

    The physical one would tell how many blocks others have taken.
    """
    return node | {"block": int(node["key"][:_NUMBER_DIGITS], 16)}


def find_node(service: Service, request: Request, key: str) -> ListedNode:
    """Return the node with a hexadecimal key.

    Raises:
        NotFoundError: there is none, or the client may not see it.
    """
    try:
        entry = service.engine.mirror.find(bytes.fromhex(key))
    except ValueError:
        entry = None
    if entry is None or entry.root not in VisibleRoots(service, request).refresh():
        raise NotFoundError(
            "the cache has no node with that key", param="key", code="node_not_found"
        )
    return entry


def preparation_of(
    service: Service, request: Request, body: CachePrompt, conversation: Conversation
) -> tuple[Callable[[], Preparation], Mapping[str, str]]:
    """Return a function that makes the body's prompt, and headers for the response.

    Call the function on a preparation thread. The headers name ignored places of the conversation.

    Raises:
        InvalidRequestError: the prompt is invalid. The returned function may raise it, too.
    """
    service.state.resolve_model(body.model)
    scope = service.state.key_scope(request.scope, body.model, body.cache_salt)
    body.check_alternatives(body.prompt)
    if body.prompt is None:
        return partial(prepare, service, conversation, scope), ignored_header(conversation.ignored)
    if not body.prompt:
        raise InvalidRequestError("prompt must not be empty", param="prompt")
    return partial(prepare_tokens, service, body.prompt, scope), {}


def refuse_unknown(query: Mapping[str, str], known: tuple[str, ...]) -> None:
    for name in query:
        if name not in known:
            raise InvalidRequestError(f"unknown query parameter {name[:64]!r}", param=name[:64])


def page_of(query: Mapping[str, str]) -> tuple[int, int]:
    """Return the offset and the limit of a query.

    Raises:
        InvalidRequestError: a query parameter is no number or unknown.
    """
    refuse_unknown(query, ("offset", "limit"))
    return _number(query, "offset", 0), _number(query, "limit", DEFAULT_TREE_NODES)


def _number(query: Mapping[str, str], name: str, default: int) -> int:
    text = query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise InvalidRequestError(f"{name} must be a number, got {text[:64]!r}", param=name)
    return int(text)


class VisibleRoots:
    """Root keys below which a client sees the cache: of its salt, without an adapter and with each
    served one. Adapters that leave and weights that change while this lives stay visible, as their
    nodes do.

    Attributes:
        everything: the client sees all nodes.
        owner: the key of its tenant, which owns the client's pins; None: those of all.
    """

    def __init__(self, service: Service, request: Request) -> None:
        self.everything = not is_tenant(request.scope)
        self.owner: bytes | None = None
        self._adapters = service.engine.adapters
        self._preprocessor = service.engine.preprocessor
        self._known: dict[tuple[object, str], bytes] = {}
        if not self.everything:
            self._salt = salt_of(request.scope, None)
            self.owner = self._preprocessor.owner_key(self._salt)
            self._add("")

    def __contains__(self, root: object) -> bool:
        return self.everything or root in self._known.values()

    def refresh(self) -> VisibleRoots:
        """Add the roots of adapters that were loaded since, and of weights that came since."""
        if not self.everything:
            for digest in ("", *(served.identity.whole for served in self._adapters.all())):
                self._add(digest)
        return self

    def _add(self, digest: str) -> None:
        name = self._preprocessor.weights, digest
        if name not in self._known:
            self._known[name] = self._preprocessor.root_key(self._salt, digest)

    def below(self, entries: Sequence[ListedNode]) -> Sequence[ListedNode]:
        """Return the visible ones of some nodes."""
        if self.everything:
            return entries
        roots = frozenset(self._known.values())
        return [entry for entry in entries if entry.root in roots]
