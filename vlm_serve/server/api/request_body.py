"""Reading a request's JSON body into its model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import Request
from pydantic import BaseModel
from starlette.requests import ClientDisconnect

from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.reading.conversation import Conversation
from vlm_serve.preprocess.reading.reader import read_conversation
from vlm_serve.server.api.request_affinity import note_affinity
from vlm_serve.server.http.body import read_body
from vlm_serve.server.http.errors import MediaTypeError
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


async def read_json(service: Service, request: Request, model: type[M]) -> M:
    """Return the request's body as a validated model; it raises as `read_request` does."""
    return await read_request(service, request, model, lambda body: body)


async def read_request(
    service: Service, request: Request, model: type[M], use: Callable[[M], T]
) -> T:
    """Return the result of `use` for the request's body; it raises as `read_value` does."""
    return await read_value(service, request, lambda value: use(validate(value, model)))


async def read_prompt(
    service: Service,
    request: Request,
    api: str,
    model: type[M],
    use: Callable[[M, Conversation], T],
    completed: Callable[[M, Any], Any] | None = None,
) -> T:
    """Return the result of `use` for the request's body and the conversation in it.

    Args:
        api: see `read_conversation`.
        completed: adds to the parsed JSON what the body only refers to.

    Raises:
        InvalidRequestError: see `read_value`, `read_conversation`.
    """

    def read(value: Any) -> T:
        body = validate(value, model)
        value = value if completed is None else completed(body, value)
        conversation = read_conversation(api, value)
        note_affinity(request.scope, conversation, service.state.model_names[0])
        return use(body, conversation)

    return await read_value(service, request, read)


async def read_value(service: Service, request: Request, use: Callable[[Any], T]) -> T:
    """Parse the request's body and return the result of `use` for it.

    Args:
        use: may take time in proportion to the body. Like parsing, it runs on the event loop only
            if the body is small.

    Raises:
        MediaTypeError: the body is not declared as JSON. A browser asks for permission before it
            sends that type to another site's server; other types it would just send.
        BodyTooLargeError: the body is over the size limit.
        InvalidRequestError: the body is not JSON in UTF-8, too deep, has too many values, or does
            not fit the model; the message names the field. `use` may raise it, too.
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
    count = partial(count_json, body, limit)
    cost = count() if small else await service.workers.parse(count)
    share = current_share()
    if share is not None:
        needed = cost.to_parse()
        if not share.fits(needed):
            await until_disconnected(request, share.grow(needed))
        await share.grow(needed)

    def read() -> tuple[T, int]:
        value = parse_counted(body)
        return use(value), cost.when_parsed(value)

    if small:
        made, kept = read()
    else:
        made, kept = await service.workers.parse(read)
    if share is not None:
        share.shrink(kept)
    return made
