"""Pages of lists, as OpenAI's clients ask for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel
from starlette.responses import JSONResponse

from vlm_serve.errors import InvalidRequestError

B = TypeVar("B")
T = TypeVar("T")


class Page(BaseModel, Generic[B]):
    object: Literal["list"] = "list"
    data: list[B]
    first_id: str | None
    last_id: str | None
    has_more: bool


def page_of(
    items: Sequence[T],
    query: Mapping[str, str],
    body_of: Callable[[T], Any],
    *,
    default: int,
    most: int,
    id_of: Callable[[T], str] = attrgetter("id"),
) -> JSONResponse:
    """Return a page of a list.

    Args:
        items: the oldest first.
        query: may have `limit`, `after` (an id) and `order` (`desc`, the default, or `asc`).
        body_of: describes an item to its client.
        default, most: the limit that applies if none is given, and the largest one.

    Raises:
        InvalidRequestError: a parameter is invalid.
    """
    order, limit = query.get("order", "desc"), query.get("limit", str(default))
    if order not in ("asc", "desc"):
        raise InvalidRequestError("order must be asc or desc", param="order")
    if not (limit.isascii() and limit.isdigit() and 0 < int(limit[:9]) <= most):
        raise InvalidRequestError(f"limit must be from 1 to {most}", param="limit")
    listed = list(items) if order == "asc" else list(items)[::-1]
    ids = list(map(id_of, listed))
    if "after" in query:
        if query["after"] not in ids:
            raise InvalidRequestError("after must be the id of one of the items", param="after")
        behind = ids.index(query["after"]) + 1
        listed, ids = listed[behind:], ids[behind:]
    data = list(map(body_of, listed[: int(limit)]))
    return JSONResponse(
        Page[Any](data=data, **ends_of(ids[: len(data)], more=len(data) < len(ids))).model_dump()
    )


def ends_of(ids: Sequence[str], *, more: bool) -> dict[str, Any]:
    """Return the fields of a page beside its data.

    Args:
        more: there are items behind the page.
    """
    first, last = (ids[0], ids[-1]) if ids else (None, None)
    return {"first_id": first, "last_id": last, "has_more": more}
