"""Reading a request's JSON body into its model.

A request's affinity keys are set by a deployment's gateway, or computed from the parsed body.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from fastapi import Request
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.types import Scope

from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.identity.affinity import AffinityKey, affinity_keys
from vlm_serve.preprocess.reading.conversation import Conversation
from vlm_serve.preprocess.reading.reader import APIS, read_conversation
from vlm_serve.server.http.auth import salt_of
from vlm_serve.server.http.body import (
    SMALL_BYTES,
    count_json,
    max_cost,
    parse_counted,
    read_body,
    validate,
)
from vlm_serve.server.http.errors import MediaTypeError
from vlm_serve.server.http.request_memory import Share, current_share
from vlm_serve.server.http.streaming import until_disconnected

if TYPE_CHECKING:
    from vlm_serve.server.service import Service


M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")


async def read_json(service: Service, request: Request, model: type[M]) -> M:
    """Return the request's body as a validated model; it raises as `read_request` does."""
    return await read_request(service, request, model, lambda body: body)


async def read_optional(service: Service, request: Request, model: type[M]) -> M:
    """Return what `read_json` does, and the model's defaults for a request without a body."""
    headers = request.headers
    if headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers:
        return model()
    return await read_json(service, request, model)


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
    referred_bytes: Callable[[M], int] = lambda body: 0,
) -> T:
    """Return the result of `use` for the request's body and the conversation in it.

    Args:
        api: see `read_conversation`.
        completed: adds to the parsed JSON what the body only refers to.
        referred_bytes: returns the bytes of what the body refers to and `use` reads; the request
            counts as if its body had brought them.

    Raises:
        InvalidRequestError: see `read_value`, `read_conversation`.
    """

    def read(value: Any, body: M) -> T:
        value = value if completed is None else completed(body, value)
        salt, tells = getattr(body, "cache_salt", None), getattr(body, "tells_media", False)
        media = service.state.client_media(request.scope, salt, tells=tells)
        conversation = read_conversation(api, value, media)
        name = service.state.affinity_name(getattr(body, "model", None))
        note_affinity(request.scope, conversation, name)
        return use(body, conversation)

    def use_small(value: Any) -> Callable[[], T] | _Large[M]:
        body = validate(value, model)
        num_bytes = referred_bytes(body)
        if num_bytes > SMALL_BYTES:
            return _Large(value, body, num_bytes)
        result = read(value, body)
        return lambda: result

    outcome = await read_value(service, request, use_small)
    if not isinstance(outcome, _Large):
        return outcome()
    share = current_share()
    if share is not None:
        await _grow(request, share, share.size + outcome.num_bytes)
    return await service.workers.parse(partial(read, outcome.value, outcome.body))


@dataclass(frozen=True, slots=True)
class _Large(Generic[M]):
    """A body that refers to so much that it is read as a large one."""

    value: Any
    body: M
    num_bytes: int


async def _grow(request: Request, share: Share, size: int) -> None:
    """Wait until a request's share has that size, or its client is gone."""
    if not share.fits(size):
        await until_disconnected(request, share.grow(size))
    await share.grow(size)


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
        body = await read_body(request, service.max_body_bytes)
    except ClientDisconnect:
        raise InvalidRequestError("the client went away before its body was complete") from None
    limit = max_cost(service.engine.max_model_len)
    small = len(body) <= SMALL_BYTES
    count = partial(count_json, body, limit)
    cost = count() if small else await service.workers.parse(count)
    share = current_share()
    if share is not None:
        await _grow(request, share, cost.to_parse())

    def read() -> tuple[T, int]:
        value = parse_counted(body)
        return use(value), cost.when_parsed(value)

    if small:
        result, kept = read()
    else:
        result, kept = await service.workers.parse(read)
    if share is not None:
        share.shrink(kept)
    return result


AFFINITY = "vlm_serve.affinity"
"""Key of the ASGI scope, where no client can write."""


def note_affinity(scope: Scope, conversation: Conversation, model: str) -> None:
    """Store a conversation's affinity keys in the request's scope, unless it has some already.

    It takes time in proportion to the body.

    Args:
        scope: the request's ASGI scope.
        model: the canonical name of the model that answers, or its adapter's.
    """
    if AFFINITY in scope or scope.get("path", "") not in APIS:
        return
    salt = salt_of(scope, conversation.cache_salt)
    scope[AFFINITY] = affinity_keys(conversation, salt=salt, model=model)


def affinity_of(scope: Scope) -> tuple[AffinityKey, ...]:
    """Return the keys of a request, the longest prefix first."""
    keys: tuple[AffinityKey, ...] = scope.get(AFFINITY, ())
    return keys
