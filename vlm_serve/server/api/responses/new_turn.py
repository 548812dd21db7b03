"""The turn of a response request in a stored conversation, and storing its answer.

Clients may send references to items of stored responses instead of the items.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.types import Scope

from vlm_serve.errors import FieldError, InvalidRequestError, UnsupportedFieldError
from vlm_serve.preprocess.reading.items import is_reference
from vlm_serve.server.api.responses.request import ResponsesRequest
from vlm_serve.server.failover.attempt import Attempt, attempt_of, new_token
from vlm_serve.server.http.auth import Owner, owner_of
from vlm_serve.server.http.errors import NotFoundError
from vlm_serve.server.response_store import (
    ResponseStore,
    Turn,
    memory_of,
    new_response_id,
    parts_of,
)
from vlm_serve.server.service import Service

_ID_PREFIXES = {
    "custom_tool_call": "ctc_",
    "custom_tool_call_output": "ctco_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "reasoning": "rs_",
}


@dataclass(frozen=True, slots=True)
class NewTurn:
    """A turn without an answer yet.

    Attributes:
        past: the items before it.
        response_id: the id for its stored answer; None: the answer is not stored.
    """

    past: list[dict[str, Any]]
    parent: Turn | None
    given: list[dict[str, Any]]
    num_bytes: int
    owner: Owner
    responses: ResponseStore | None
    response_id: str | None

    def store(self, answer: dict[str, Any]) -> None:
        """Store the answer, unless it should not be stored."""
        if self.responses is None or self.response_id is None:
            return
        num_bytes = self.num_bytes + memory_of(answer)
        turn = Turn(self.parent, self.given, answer, num_bytes)
        self.responses.put(self.owner, self.response_id, turn)


def new_turn(service: Service, scope: Scope, body: ResponsesRequest) -> NewTurn:
    """Return the turn of a request.

    Raises:
        UnsupportedFieldError: it continues a response, but the server stores none.
        NotFoundError: it continues an unknown response.
        InvalidRequestError: it must be stored, but its conversation is too large, or it has an
            infinite number.
    """
    responses, owner = service.state.responses, owner_of(scope, body.cache_salt)
    parent = parent_of(service, owner, body.previous_response_id)
    past = items_until(parent)
    if responses is None or body.store is False:
        return NewTurn(past, parent, [], 0, owner, responses, None)
    attempt = attempt_of(scope)
    given = [_with_id(item, attempt, index) for index, item in enumerate(body.items())]
    if any(isinstance(part, float) and not math.isfinite(part) for part in parts_of(given)):
        # The stored items could not be listed, since JSON has no infinity.
        raise FieldError("input", "has a number that is too large")
    num_bytes = memory_of(given)
    held = 0 if parent is None else parent.total_bytes
    fits = held + num_bytes <= responses.max_bytes
    if not fits and body.store:
        raise InvalidRequestError(
            "store: the request and the conversation it continues exceed the "
            f"{responses.max_bytes} bytes of the response store",
            param="store",
        )
    response_id = new_response_id(attempt) if fits else None
    return NewTurn(past, parent, given, num_bytes, owner, responses, response_id)


def parent_of(service: Service, owner: Owner, previous: str | None) -> Turn | None:
    """Return the turn of the previous response; None if the request names none.

    It raises as `new_turn` does.
    """
    if previous is None:
        return None
    if service.state.responses is None:
        raise UnsupportedFieldError(
            "previous_response_id needs a server that runs with --response-store",
            param="previous_response_id",
            code="unsupported_field",
        )
    return find_response(service.state.responses, owner, previous, "previous_response_id")


def bytes_of_past(service: Service, scope: Scope, body: ResponsesRequest) -> int:
    """Return the memory of the stored turns that a request continues, 0 if it continues none."""
    if body.previous_response_id is None or service.state.responses is None:
        return 0
    owner = owner_of(scope, body.cache_salt)
    turn = service.state.responses.find(owner, body.previous_response_id)
    return 0 if turn is None else turn.total_bytes


def items_until(turn: Turn | None) -> list[dict[str, Any]]:
    """Return a conversation's items up to the turn's answer."""
    return [] if turn is None else turn.past() + turn.answer["output"]


def find_response(
    responses: ResponseStore | None, owner: Owner, response_id: str, param: str | None = None
) -> Turn:
    """Return a stored response.

    Raises:
        NotFoundError: there is none, or it belongs to another owner.
    """
    turn = None if responses is None else responses.find(owner, response_id)
    if turn is None:
        raise NotFoundError(
            f"there is no response {response_id[:128]!r}", param=param, code="response_not_found"
        )
    return turn


def _with_id(item: dict[str, Any], attempt: Attempt | None, index: int) -> dict[str, Any]:
    if isinstance(item.get("id"), str):
        return item
    prefix = _ID_PREFIXES.get(str(item.get("type")), "msg_")
    return item | {"id": prefix + new_token(attempt, "item", index)}


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
    stored = responses.find_items(owner_of(scope, body.cache_salt), named.keys())
    for item_id, at in named.items():
        if item_id not in stored:
            raise NotFoundError(
                f"input[{at}]: there is no stored item {item_id[:128]!r}",
                param=f"input[{at}]",
                code="item_not_found",
            )
    body.input = [stored[item["id"]] if is_reference(item) else item for item in body.input]
    return {**value, "input": body.input}
