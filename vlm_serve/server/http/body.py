"""Reading a JSON body of bounded size."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from fastapi import Request
from pydantic import BaseModel
from starlette.requests import ClientDisconnect

from vlm_serve.errors import InvalidRequestError
from vlm_serve.server.api.request_affinity import note_affinity
from vlm_serve.server.http.errors import BodyTooLargeError, MediaTypeError
from vlm_serve.server.http.json_body import (
    SMALL_BYTES,
    count_json,
    max_cost,
    parse_counted,
    validate,
)
from vlm_serve.server.http.request_memory import current_share
from vlm_serve.server.http.streaming import until_disconnected

if TYPE_CHECKING:
    from vlm_serve.server.service import Service

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The request's body. Raises BodyTooLargeError as soon as it is known to be too large."""
    too_large = BodyTooLargeError(
        f"the request body is larger than {max_bytes} bytes", code="body_too_large"
    )
    declared = request.headers.get("content-length", "0")
    if declared.isascii() and declared.isdigit() and int(declared[:19]) > max_bytes:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise too_large
    return bytes(body)


async def read_json(service: Service, request: Request, model: type[M]) -> M:
    """The request's body as a validated model. Raises as `read_request`."""
    return await read_request(service, request, model, lambda body: body)


async def read_request(
    service: Service, request: Request, model: type[M], use: Callable[[M], T]
) -> T:
    """What `use` makes of the request's body, once that is a validated model.

    Args:
        use: may take as long as the body is long: like parsing, it is not called on the event loop
            unless the body is small.

    Raises what `use` raises, and:
        MediaTypeError: the body is not declared as JSON. (A browser asks for permission before it
            sends that type to another site's server; other types it would just send.)
        BodyTooLargeError: over the size limit.
        InvalidRequestError: not JSON in UTF-8, too deep, too many values, or not what the model
            describes; the message names the field.
    """
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        raise MediaTypeError("the body must be sent with Content-Type: application/json")
    try:
        body = await read_body(request, service.config.max_body_bytes)
    except ClientDisconnect:
        raise InvalidRequestError("the client went away before its body was complete") from None
    limit = max_cost(service.engine.max_model_len)
    small = len(body) <= SMALL_BYTES
    counted = partial(count_json, body, limit)
    cost = counted() if small else await service.parsing(counted)
    share = current_share()
    if share is not None:
        needed = cost.to_parse()
        if not share.fits(needed):
            await until_disconnected(request, share.cover(needed))
        await share.cover(needed)

    def read() -> tuple[T, int]:
        value = parse_counted(body)
        note_affinity(request.scope, value, service.model_names[0])
        return use(validate(value, model)), cost.when_parsed(value)

    if small:
        made, kept = read()
    else:
        made, kept = await service.parsing(read)
    if share is not None:
        share.shrink(kept)
    return made
