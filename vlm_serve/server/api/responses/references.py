"""References to items of stored responses, which clients send instead of the items."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.types import Scope

from vlm_serve.errors import UnsupportedFieldError
from vlm_serve.preprocess.reading.items import is_reference
from vlm_serve.server.api.responses.request import ResponsesRequest
from vlm_serve.server.http.errors import NotFoundError
from vlm_serve.server.http.tenants import owner_of
from vlm_serve.server.service import Service


def with_references(
    service: Service, scope: Scope, body: ResponsesRequest, value: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return a parsed request with the items to which it refers; `body` gets them, too.

    Raises:
        UnsupportedFieldError: there are references, but the server stores no responses.
        NotFoundError: the owner has no stored item of that id.
    """
    if isinstance(body.input, str):
        return value
    named = {item["id"]: at for at, item in enumerate(body.input) if is_reference(item)}
    if not named:
        return value
    responses = service.state.responses
    if responses is None:
        place = f"input[{next(iter(named.values()))}]"
        raise UnsupportedFieldError(
            f"{place}: item_reference needs a server that runs with --response-store",
            param=place,
            code="unsupported_field",
        )
    found = responses.find_items(owner_of(scope, body.cache_salt), named.keys())
    for item_id, at in named.items():
        if item_id not in found:
            raise NotFoundError(
                f"input[{at}]: there is no stored item {item_id[:128]!r}",
                param=f"input[{at}]",
                code="item_not_found",
            )
    body.input = [found[item["id"]] if is_reference(item) else item for item in body.input]
    return {**value, "input": body.input}
