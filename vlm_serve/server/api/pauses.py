"""Pausing generation, as vLLM's and SGLang's clients ask for it: two names for one thing."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import Request
from starlette.responses import JSONResponse, Response

from vlm_serve.errors import FieldError
from vlm_serve.server.api.shared.fields import ExactModel
from vlm_serve.server.api.shared.request_body import read_optional
from vlm_serve.server.api.weights import check_operator
from vlm_serve.server.http.auth import refuse_tenants
from vlm_serve.server.http.body import validate

if TYPE_CHECKING:
    from vlm_serve.server.service import Service

_MODES = {"abort": "abort", "retract": "retract", "in_place": "in_place"}
VLLM_MODES = {"abort": "abort", "wait": "wait", "keep": "in_place"}
_FLAGS = {"true": True, "1": True, "false": False, "0": False}
T = TypeVar("T")
Q = TypeVar("Q", bound=ExactModel)


class PauseGeneration(ExactModel):
    """The optional body of /pause_generation."""

    mode: str = "abort"


class Nothing(ExactModel):
    """A body without fields."""


class PauseQuery(ExactModel):
    """The query of /pause."""

    mode: str = "abort"
    clear_cache: str = "true"


async def pause_generation(service: Service, request: Request) -> Response:
    """POST /pause_generation (SGLang).

    Raises:
        InvalidRequestError: there is no such mode, or pausing is not allowed.
        PermissionDeniedError: the client may not.
    """
    check_operator(service, request)
    body = await read_optional(service, request, PauseGeneration)
    await asyncio.to_thread(service.engine.pause, named("mode", body.mode, _MODES))
    return JSONResponse({"status": "ok", "message": "generation is paused"})


async def continue_generation(service: Service, request: Request) -> Response:
    """POST /continue_generation (SGLang). Raise as `pause_generation` does."""
    check_operator(service, request)
    await read_optional(service, request, Nothing)
    was = await _resume(service)
    message = "generation goes on" if was else "generation was not paused"
    return JSONResponse({"status": "ok", "message": message})


async def pause(service: Service, request: Request) -> Response:
    """POST /pause (vLLM). The cache of a server that keeps what is in flight is not emptied. Raise
    as `pause_generation` does."""
    check_operator(service, request)
    query = query_of(request, PauseQuery)
    mode = named("mode", query.mode, VLLM_MODES)
    flush = named("clear_cache", query.clear_cache.lower(), _FLAGS) and mode != "in_place"
    await asyncio.to_thread(service.engine.pause, mode)
    if flush:
        await service.flush()
    return JSONResponse({"status": "paused"})


async def resume(service: Service, request: Request) -> Response:
    """POST /resume (vLLM). Raise as `pause_generation` does."""
    check_operator(service, request)
    query_of(request, Nothing)
    await _resume(service)
    return JSONResponse({"status": "resumed"})


async def is_paused(service: Service, request: Request) -> Response:
    """GET /is_paused (vLLM)."""
    refuse_tenants(request.scope)
    return JSONResponse({"is_paused": "paused" in service.engine.rests})


async def _resume(service: Service) -> bool:
    """Have generation go on; return False if it was not paused."""
    was = "paused" in service.engine.rests
    await asyncio.to_thread(service.engine.resume)
    return was


def query_of(request: Request, model: type[Q]) -> Q:
    """Return the query of a request; `tags` may come repeatedly. Raise InvalidRequestError for
    unknown parameters."""
    given, query = request.query_params, dict[str, Any](request.query_params.items())
    if "tags" in query:
        query["tags"] = given.getlist("tags")
    return validate(query, model)


def named(field: str, value: str, known: dict[str, T]) -> T:
    """Return what a field's value stands for. Raise InvalidRequestError if that is nothing."""
    if value not in known:
        raise FieldError(field, f"must be one of {', '.join(known)}")
    return known[value]
