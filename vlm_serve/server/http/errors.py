"""Exceptions on their way out: one envelope, `{"error": {message, type, param, code}}`, for all."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Scope

from vlm_serve.errors import FieldError, InvalidRequestError, OverloadedError, VlmServeError
from vlm_serve.server.http.request_id import request_id_of

_log = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = 1


class AuthenticationError(VlmServeError):
    """No API key, or one that the server does not know: HTTP 401."""

    status = 401
    type = "authentication_error"


class BodyTooLargeError(InvalidRequestError):
    """The request body is over the server's limit: HTTP 413."""

    status = 413


class MediaTypeError(InvalidRequestError):
    """The request body does not say that it is JSON: HTTP 415."""

    status = 415


class UnsupportedFieldError(InvalidRequestError):
    """A known field that would change the answer, but which this server does not implement."""


class RequestTimeoutError(VlmServeError):
    """The request took longer than the operator allows: HTTP 504."""

    status = 504
    type = "timeout_error"


class DrainingError(OverloadedError):
    """The server has been told to stop and takes no new work: HTTP 503 with Retry-After."""


@contextmanager
def told_as(names: Mapping[str, str]) -> Iterator[None]:
    """Errors about a field name the field of the client's request that it was made from."""
    try:
        yield
    except InvalidRequestError as error:
        own = names.get(error.param or "")
        if own is None:
            raise
        if isinstance(error, FieldError):
            raise error.under(own) from None
        error.param = own
        raise


def envelope(error: VlmServeError) -> dict[str, Any]:
    """The JSON body that describes an error."""
    return {
        "error": {
            "message": error.message,
            "type": error.type,
            "param": error.param,
            "code": error.code,
        }
    }


MESSAGES_PATH = "/v1/messages"
"""The route whose errors, and those of all below it, have Anthropic's form."""

MODELS_PATH = "/v1/models"

ANTHROPIC_HEADER = b"anthropic-version"
"""What its clients send with every request; routes that several APIs have answer in their form."""

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
    """The JSON body that describes an error to a client of /v1/messages."""
    kind = _MESSAGES_TYPES.get(error.status, "invalid_request_error")
    return {
        "type": "error",
        "error": {"type": kind, "message": error.message},
        "request_id": request_id,
    }


def is_anthropic(scope: Scope) -> bool:
    """True if the request is one of Anthropic's API."""
    path: str = scope.get("path", "")
    if path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/"):
        return True
    shared = path == MODELS_PATH or path.startswith(f"{MODELS_PATH}/")
    return shared and any(name == ANTHROPIC_HEADER for name, _ in scope.get("headers", ()))


def error_for(scope: Scope, error: VlmServeError) -> JSONResponse:
    """The whole response, in the form of the route that was asked."""
    if is_anthropic(scope):
        return error_response(error, messages_envelope(error, request_id_of(scope)))
    return error_response(error)


def error_response(error: VlmServeError, body: dict[str, Any] | None = None) -> JSONResponse:
    """The whole response; overload says when to come back."""
    headers = {}
    if error.status in (429, 503):
        headers["Retry-After"] = str(RETRY_AFTER_SECONDS)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(body or envelope(error), status_code=error.status, headers=headers)


def internal_error(error: BaseException, request_id: str) -> VlmServeError:
    """Hides an unexpected exception behind an id and logs it under that id."""
    _log.error("request %s failed", request_id, exc_info=error)
    return VlmServeError(
        f"internal error; the server's log has the details under request id {request_id}",
        code="internal_error",
    )


def public_error(error: BaseException, request_id: str) -> VlmServeError:
    """The error as a client may see it; one that is no VlmServeError is hidden and logged."""
    return error if isinstance(error, VlmServeError) else internal_error(error, request_id)


async def on_http_exception(request: Request, error: Exception) -> JSONResponse:
    """Starlette's own refusals: unknown routes and methods."""
    assert isinstance(error, HTTPException)
    refusal = InvalidRequestError(
        {404: "there is no such route", 405: "this route has no such method"}.get(
            error.status_code, "the request was refused"
        )
    )
    refusal.status = error.status_code
    answer = error_for(request.scope, refusal)
    answer.headers.update(error.headers or {})
    return answer
