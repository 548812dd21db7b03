"""Pages of lists, as OpenAI's clients ask for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

from vlm_serve.errors import InvalidRequestError


class Listed(Protocol):
    """An element of a list."""

    @property
    def id(self) -> str: ...


T = TypeVar("T", bound=Listed)


def page_of(
    items: Sequence[T], query: Mapping[str, str], *, default: int, most: int
) -> tuple[list[T], bool]:
    """Return a page of a list, and whether there are more items behind it.

    Args:
        items: the oldest first.
        query: may have `limit`, `after` (an id) and `order` (`desc`, the default, or `asc`).
        default, most: the limit that applies if none is given, and the largest one.

    Raises:
        InvalidRequestError: a parameter is invalid.
    """
    order, limit = query.get("order", "desc"), query.get("limit", str(default))
    if order not in ("asc", "desc"):
        raise InvalidRequestError("order must be asc or desc", param="order")
    if not (limit.isascii() and limit.isdigit() and 0 < int(limit[:9]) <= most):
        raise InvalidRequestError(f"limit must be from 1 to {most}", param="limit")
    found = list(items) if order == "asc" else list(items)[::-1]
    if "after" in query:
        ids = [item.id for item in found]
        if query["after"] not in ids:
            raise InvalidRequestError("after must be the id of one of the items", param="after")
        found = found[ids.index(query["after"]) + 1 :]
    return found[: int(limit)], len(found) > int(limit)
