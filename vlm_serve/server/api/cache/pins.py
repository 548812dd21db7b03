"""Routes of pins: make them, list them, lift them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.responses import Response

from vlm_serve.cache.listing import ListedNode
from vlm_serve.cache.matching import key_at
from vlm_serve.engine.requests.validation import check_page
from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.reading.reader import read_conversation
from vlm_serve.server.api.cache.inspection import (
    CachePrompt,
    NodeKey,
    VisibleRoots,
    find_node,
    page_of,
    preparation_of,
    refuse_unknown,
)
from vlm_serve.server.api.shared.request_body import read_value
from vlm_serve.server.http.auth import salt_of
from vlm_serve.server.http.body import validate
from vlm_serve.server.http.errors import NotFoundError
from vlm_serve.server.http.tenants import tenant_of
from vlm_serve.server.service import Preparation, Service


class PinRequest(CachePrompt):
    ttl_seconds: float
    key: NodeKey | None = None


class Pinned(BaseModel):
    """What was pinned; `key` names the pin, None if nothing was pinned."""

    object: Literal["cache.pin"] = "cache.pin"
    prompt_tokens: int
    pinned_tokens: int
    key: str | None


class PinBody(BaseModel):
    key: str
    tokens: int
    blocks: int
    state: bool
    expires_in_seconds: float


class PinList(BaseModel):
    object: Literal["cache.pins"] = "cache.pins"
    total: int
    offset: int
    pins: list[PinBody]


class PinsLifted(BaseModel):
    object: Literal["cache.pins.lifted"] = "cache.pins.lifted"
    lifted: int


async def pin(service: Service, request: Request) -> Response:
    """Pin a prompt's KV and state, or those of a node and its ancestors: POST /v1/cache/pin.

    Raises:
        NotFoundError: the client may see no node with this key.
        VlmServeError: the request is invalid, or the server does not admit it.
    """
    body, target, headers = await read_value(service, request, partial(_target, service, request))
    pins = service.engine.pins
    with service.admission.admitted(tenant_of(request.scope)):
        if isinstance(target, ListedNode):
            length, key = target.node.end, target.node.key
            owner = VisibleRoots(service, request).owner
            pinned = await asyncio.to_thread(pins.add_node, key, body.ttl_seconds, owner)
        else:
            prompt = await service.prepare(target)
            length = len(prompt)
            owner = service.engine.preprocessor.owner_key(salt_of(request.scope, body.cache_salt))
            pinned = await asyncio.to_thread(pins.add, prompt, body.ttl_seconds, owner)
            key = key_at(prompt.keys, pinned) if pinned else b""
    answer = Pinned(prompt_tokens=length, pinned_tokens=pinned, key=key.hex() if pinned else None)
    return JSONResponse(answer.model_dump(), headers=headers)


async def list_pins(service: Service, request: Request) -> Response:
    """Return a page of the pins that the client may see, earliest expiry first: GET
    /v1/cache/pins?offset=0&limit=100.

    Raises:
        InvalidRequestError: a query parameter is invalid or unknown.
    """
    offset, limit = page_of(request.query_params)
    check_page(offset, limit)
    owner = VisibleRoots(service, request).owner
    pins = await asyncio.to_thread(service.engine.pins.listed, owner)
    shown = [PinBody(**dataclasses.asdict(pin)) for pin in pins[offset : offset + limit]]
    return JSONResponse(PinList(total=len(pins), offset=offset, pins=shown).model_dump())


async def lift_pin(service: Service, request: Request) -> Response:
    """Lift one pin: DELETE /v1/cache/pins/{key}. What it held may be evicted from now on.

    Raises:
        NotFoundError: the client may see no such pin.
    """
    refuse_unknown(request.query_params, ())
    try:
        key = bytes.fromhex(request.path_params["key"])
    except ValueError:
        key = b""
    lifted = await _lift(service, request, key)
    if not lifted:
        raise NotFoundError("there is no pin with that key", param="key", code="pin_not_found")
    return JSONResponse(PinsLifted(lifted=lifted).model_dump())


async def lift_pins(service: Service, request: Request) -> Response:
    """Lift all pins of the client: DELETE /v1/cache/pins."""
    refuse_unknown(request.query_params, ())
    lifted = await _lift(service, request, None)
    return JSONResponse(PinsLifted(lifted=lifted).model_dump())


async def _lift(service: Service, request: Request, key: bytes | None) -> int:
    owner = VisibleRoots(service, request).owner
    return await asyncio.to_thread(service.engine.pins.lift, owner, key)


def _target(
    service: Service, request: Request, value: Mapping[str, Any]
) -> tuple[PinRequest, ListedNode | Callable[[], Preparation], Mapping[str, str]]:
    """Return the body, its node or a function that makes its prompt, and headers."""
    body = validate(value, PinRequest)
    if body.key is None:
        media = service.state.client_media(request.scope, body.cache_salt)
        conversation = read_conversation("chat", value, media)
        return body, *preparation_of(service, request, body, conversation)
    given = {name for name, field in value.items() if field is not None}
    if given - {"key", "ttl_seconds", "model"}:
        raise InvalidRequestError("key must come without a prompt", param="key")
    service.state.resolve_model(body.model)
    return body, find_node(service, request, body.key), {}
