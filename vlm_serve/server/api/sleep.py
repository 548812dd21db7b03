"""Sleep and wake, as vLLM's and SGLang's clients ask for them: two names for one thing."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING

from fastapi import Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from vlm_serve.engine.features.sleep import PARTS, check_parts
from vlm_serve.server.api.pauses import VLLM_MODES, named, query_of
from vlm_serve.server.api.shared.fields import ExactModel
from vlm_serve.server.api.shared.request_body import read_optional
from vlm_serve.server.api.weights import check_operator
from vlm_serve.server.http.auth import refuse_tenants

if TYPE_CHECKING:
    from vlm_serve.server.service import Service

_LEVELS = {"1": ("kv_cache",), "2": PARTS}
_MODES = VLLM_MODES | {"keep": "retract"}


class SleepQuery(ExactModel):
    """The query of /sleep."""

    level: str = "1"
    mode: str = "abort"


class Tags(ExactModel):
    """The query of /wake_up, and the optional body of what SGLang's clients send; None: all."""

    tags: list[str] | None = Field(None, max_length=8)


async def sleep(service: Service, request: Request) -> Response:
    """POST /sleep (vLLM). Level 1 gives back the cache's memory, level 2 the weights' too.

    Raises:
        InvalidRequestError: there is no such level or mode, sleep is not allowed or not possible,
            or the weights could not be read again.
        PermissionDeniedError: the client may not.
    """
    check_operator(service, request)
    query = query_of(request, SleepQuery)
    parts, mode = named("level", query.level, _LEVELS), named("mode", query.mode, _MODES)
    return _told(await asyncio.to_thread(partial(service.engine.sleep, parts, mode=mode)))


async def wake_up(service: Service, request: Request) -> Response:
    """POST /wake_up (vLLM). Raise as `sleep` does."""
    check_operator(service, request)
    return await _wake_up(service, query_of(request, Tags))


async def is_sleeping(service: Service, request: Request) -> Response:
    """GET /is_sleeping (vLLM): also true if the server sleeps by itself."""
    refuse_tenants(request.scope)
    return JSONResponse({"is_sleeping": bool(service.engine.rests & {"asleep", "idle"})})


async def release_memory_occupation(service: Service, request: Request) -> Response:
    """POST /release_memory_occupation (SGLang). Requests in flight wait. Raise as `sleep` does."""
    check_operator(service, request)
    tags = (await read_optional(service, request, Tags)).tags
    parts = check_parts(PARTS if tags is None else tags)
    return _told(await asyncio.to_thread(service.engine.sleep, parts))


async def resume_memory_occupation(service: Service, request: Request) -> Response:
    """POST /resume_memory_occupation (SGLang). Raise as `sleep` does."""
    check_operator(service, request)
    return await _wake_up(service, await read_optional(service, request, Tags))


async def _wake_up(service: Service, wanted: Tags) -> Response:
    parts = None if wanted.tags is None else check_parts(wanted.tags)
    return _told(await asyncio.to_thread(service.engine.wake_up, parts))


def _told(parts: Collection[str]) -> Response:
    """Return an answer that says what is given back now."""
    return JSONResponse({"is_sleeping": bool(parts), "tags": sorted(parts)})
