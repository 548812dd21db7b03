"""Errors as responses: one envelope, `{"error": {message, type, param, code}}`, for all."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Scope

from vlm_serve.errors import (
    ContextLengthError,
    FieldError,
    InvalidRequestError,
    OverloadedError,
    VlmServeError,
)
from vlm_serve.server.http.request_id import request_id_of

_log = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = 1
_BELOW_V1 = {
    *("/batches", "/chat/completions", "/completions", "/embeddings", "/files", "/messages"),
    *("/models", "/responses"),
}
_NO_SUCH_MODEL = {
    "/v1/audio": "this server neither hears nor speaks: it has no audio",
    "/v1/images": "this server makes no pictures: it only reads them, as parts of messages",
    "/v1/moderations": "this server has no model for moderation",
}


class AuthenticationError(VlmServeError):
    """The API key is missing or unknown: HTTP 401."""

    status = 401
    type = "authentication_error"


class PermissionDeniedError(VlmServeError):
    """Such a client may not do this, whatever its request says: HTTP 403."""

    status = 403
    type = "permission_error"


class NotFoundError(InvalidRequestError):
    """There is no such thing, or the client may not see it: HTTP 404."""

    status = 404


class BodyTooLargeError(InvalidRequestError):
    """The request body is over the server's limit: HTTP 413."""

    status = 413


class MediaTypeError(InvalidRequestError):
    """The request body is not declared as JSON: HTTP 415."""

    status = 415


class RequestTimeoutError(VlmServeError):
    """The request took longer than the operator permits: HTTP 504."""

    status = 504
    type = "timeout_error"


class DrainingError(OverloadedError):
    """The server is shutting down and takes no new work: HTTP 503 with Retry-After."""


@contextmanager
def renamed_params(names: Mapping[str, str]) -> Iterator[None]:
    """Rename the field of an error raised in the block to the client's name for it.

    Args:
        names: {internal field name: the client's name}.
    """
    try:
        yield
    except InvalidRequestError as error:
        client_name = names.get(error.param or "")
        if client_name is None:
            raise
        if isinstance(error, FieldError):
            raise error.under(client_name) from None
        error.param = client_name
        raise


def envelope(error: VlmServeError) -> dict[str, Any]:
    """Return the JSON body of an error."""
    return {
        "error": {
            "message": error.message,
            "type": error.type,
            "param": error.param,
            "code": error.code,
        }
    }


MESSAGES_PATH = "/v1/messages"
"""The route whose errors have Anthropic's form; so do those of all routes below it."""

MODELS_PATH = "/v1/models"
RESPONSES_PATH = "/v1/responses"

ANTHROPIC_HEADER = b"anthropic-version"
"""Header of Anthropic's clients; routes shared by several APIs then answer in their form."""

_MESSAGES_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def messages_envelope(error: VlmServeError, request_id: str) -> dict[str, Any]:
    """Return the JSON body of an error for a client of /v1/messages."""
    kind = _MESSAGES_TYPES.get(error.status, "invalid_request_error")
    message = error.message
    if isinstance(error, ContextLengthError) and error.room:  # what its clients parse
        message = f"prompt is too long: {error.prompt} tokens > {error.room} maximum"
    return {
        "type": "error",
        "error": {"type": kind, "message": message},
        "request_id": request_id,
    }


def is_anthropic(scope: Scope) -> bool:
    """Return True if the request is one of Anthropic's API."""
    path: str = scope.get("path", "")
    if path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/"):
        return True
    shared = path == MODELS_PATH or path.startswith(f"{MODELS_PATH}/")
    return shared and any(name == ANTHROPIC_HEADER for name, _ in scope.get("headers", ()))


def envelope_for(scope: Scope, error: VlmServeError) -> dict[str, Any]:
    """Return the JSON body of an error in the form of the request's route."""
    if is_anthropic(scope):
        return messages_envelope(error, request_id_of(scope))
    return envelope(error)


def error_event(scope: Scope, error: VlmServeError) -> dict[str, Any]:
    """Return the event that reports an error of a request in a stream of its route's API.

    If it has a `type`, that is its name, too.
    """
    if scope.get("path") != RESPONSES_PATH:
        return envelope_for(scope, error)
    about = {"code": error.code, "message": error.message, "param": error.param}
    return {"type": "error", **about, "sequence_number": 0}


def error_for(scope: Scope, error: VlmServeError) -> JSONResponse:
    """Return the response of an error in the form of the request's route; overload adds
    Retry-After."""
    headers = {}
    if error.status in (429, 503):
        headers["Retry-After"] = str(RETRY_AFTER_SECONDS)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(envelope_for(scope, error), status_code=error.status, headers=headers)


def public_error(error: BaseException, request_id: str) -> VlmServeError:
    """Return the error for the client; an unexpected one is logged under the request id, and the
    client gets only that id."""
    if isinstance(error, VlmServeError):
        return error
    _log.error("request %s failed", request_id, exc_info=error)
    return VlmServeError(
        f"internal error; the server's log has the details under request id {request_id}",
        code="internal_error",
    )


def _meant(path: str) -> str | None:
    """Return the route meant by a path without /v1, with two of them, or with a slash behind."""
    name = path.rstrip("/").removeprefix("/v1").removeprefix("/v1")
    return f"/v1{name}" if name in _BELOW_V1 and path != f"/v1{name}" else None


async def on_http_exception(request: Request, error: Exception) -> JSONResponse:
    """Respond to errors of Starlette itself: unknown routes and methods."""
    assert isinstance(error, HTTPException)
    told = {404: "there is no such route", 405: "this route has no such method"}
    path = str(request.scope.get("path", ""))
    if request.method == "POST" and request.path_params:  # a route that others have, no thing's id
        error = HTTPException(404)
    absent = (text for begin, text in _NO_SUCH_MODEL.items() if f"{path}/".startswith(f"{begin}/"))
    told[404] += "".join(f": {text}" for text in absent)
    if error.status_code == 404 and (meant := _meant(path)) is not None:
        told[404] += f": did you mean {meant}?"
    if error.status_code == 405 and (methods := (error.headers or {}).get("Allow")):
        told[405] += f": it takes {methods}"
    refusal = InvalidRequestError(told.get(error.status_code, "the request was refused"))
    refusal.status = error.status_code
    answer = error_for(request.scope, refusal)
    answer.headers.update(error.headers or {})
    return answer
