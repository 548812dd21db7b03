"""GET and DELETE /v1/responses/{id}, GET /v1/responses/{id}/input_items."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from operator import itemgetter
from typing import Any, Literal

from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.responses import Response

from vlm_serve.errors import FieldError
from vlm_serve.server.api.responses.new_turn import find_response
from vlm_serve.server.api.shared.listing import page_of
from vlm_serve.server.http.auth import Owner, owner_of
from vlm_serve.server.http.streaming import STREAM_HEADERS, EventStream, event
from vlm_serve.server.response_store import Turn
from vlm_serve.server.service import Service

DEFAULT_ITEMS = 20
MAX_ITEMS = 100
_TEXT_TYPES = {"user": "input_text", "assistant": "output_text"}


class Deleted(BaseModel):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


async def get_response(service: Service, request: Request) -> Response:
    """Return a stored response's body.

    Raises:
        NotFoundError: no such response is stored for this owner.
    """
    stream, after = (request.query_params.get(name) for name in ("stream", "starting_after"))
    answer = _turn(service, request).answer
    if stream in (None, "false"):
        return JSONResponse(answer)
    if stream != "true" or not (after or "0").isdecimal():
        raise FieldError("stream" if stream != "true" else "starting_after", "is invalid")
    numbered = list(enumerate(_events(answer)))[0 if after is None else int(after) + 1 :]
    told = (event(each | {"sequence_number": at}, each["type"]) for at, each in numbered)
    return Response(b"".join(told), media_type=EventStream.media_type, headers=STREAM_HEADERS)


def _events(answer: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the events of a stored response, each text in one piece."""
    begun = answer | {"status": "in_progress", "output": [], "usage": None}
    yield {"type": "response.created", "response": begun}
    for index, item in enumerate(answer["output"]):
        at = {"output_index": index}
        empty = item | {"status": "in_progress"} | ({"content": []} if "content" in item else {})
        yield {"type": "response.output_item.added", **at, "item": empty}
        for number, part in enumerate(item.get("content", ())):
            place = {"item_id": item["id"], **at, "content_index": number}
            yield {"type": "response.content_part.added", **place, "part": part | {"text": ""}}
            delta = {"delta": part["text"], "logprobs": []}
            yield {"type": f"response.{part['type']}.delta", **place, **delta}
            yield {"type": "response.content_part.done", **place, "part": part}
        yield {"type": "response.output_item.done", **at, "item": item}
    yield {"type": f"response.{answer['status']}", "response": answer}


async def delete_response(service: Service, request: Request) -> Response:
    """Delete a stored response. Later responses in its conversation keep its items.

    Raises:
        NotFoundError: no such response is stored for this owner.
    """
    _turn(service, request)
    assert service.state.responses is not None
    response_id = request.path_params["response_id"]
    service.state.responses.delete(_owner(request), response_id)
    return JSONResponse(Deleted(id=response_id).model_dump())


async def list_input_items(service: Service, request: Request) -> Response:
    """Return a page of the items from which a response was made.

    Raises:
        NotFoundError: no such response is stored for this owner.
        InvalidRequestError: `after`, `order` or `limit` is invalid.
    """
    turn, query = _turn(service, request), request.query_params

    def page() -> Response:  # It may be as long as the request was.
        return page_of(
            turn.past(),
            query,
            _with_defaults,
            default=DEFAULT_ITEMS,
            most=MAX_ITEMS,
            id_of=itemgetter("id"),
        )

    return await asyncio.to_thread(page)


def _owner(request: Request) -> Owner:
    return owner_of(request.scope, request.query_params.get("cache_salt"))


def _turn(service: Service, request: Request) -> Turn:
    return find_response(
        service.state.responses, _owner(request), request.path_params["response_id"]
    )


def _with_defaults(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item with defaults for the fields that a request may omit."""
    item = {"type": "message", "status": "completed"} | item
    if item["type"] != "message":
        return item
    kind = _TEXT_TYPES.get(item["role"], "input_text")
    content = item["content"]
    if isinstance(content, str):
        content = [{"type": kind, "text": content}]
    return item | {"content": [_part_with_defaults(part, kind) for part in content]}


def _part_with_defaults(part: dict[str, Any], kind: str) -> dict[str, Any]:
    if part["type"] in ("text", "input_text", "output_text"):
        if kind == "output_text":
            part = {"annotations": [], "logprobs": []} | part
        return part | {"type": kind}
    return {"detail": "auto"} | part if part["type"] == "input_image" else part
