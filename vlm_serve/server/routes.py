"""How a route is added, and the routes of other folders, mounted beside the server's own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from fastapi import Request
from starlette.responses import Response
from starlette.routing import compile_path
from starlette.types import ASGIApp

from vlm_serve.server.http.errors import error_for, public_error
from vlm_serve.server.http.openapi import DescribedApp
from vlm_serve.server.http.request_id import request_id_of
from vlm_serve.server.http.streaming import ClientGoneError

T = TypeVar("T")
Responses = dict[int | str, dict[str, Any]]

CLIENT_CLOSED_REQUEST = 499


class MountedRoutes(Protocol):
    """Routes of a folder above the server. The server calls all methods on its event loop.

    Attributes:
        streamed: paths whose routes read bodies as they arrive.
    """

    streamed: tuple[str, ...]

    def add_to(self, app: DescribedApp) -> None:
        """Add the routes."""

    def start(self, app: ASGIApp) -> None:
        """Take the whole application without authentication, for requests of its own."""

    def stop(self) -> None:
        """End what is not a client's open request, since the server waits for these."""

    async def close(self) -> None:
        """End everything, before the engine is closed."""


def add_route(
    app: DescribedApp,
    subject: T,
    path: str,
    handler: Callable[[T, Request], Awaitable[Response]],
    responses: Responses,
    *,
    method: str = "GET",
    name: str | None = None,
    described: dict[str, Any] | None = None,
    **settings: Any,
) -> None:
    """Add a route.

    Handlers read requests themselves, so FastAPI is told the path's parameters.

    Args:
        subject: the handler's first argument.
        described: further fields of the route's OpenAPI operation.
    """
    parameters = [
        {"name": each, "in": "path", "required": True, "schema": {"type": "string"}}
        for each in compile_path(path)[2]
    ]
    app.add_api_route(
        path,
        _route(subject, handler),
        methods=[method],
        name=name or handler.__name__,
        response_model=None,
        responses=responses,
        openapi_extra={**({"parameters": parameters} if parameters else {}), **(described or {})},
        **settings,
    )


def _route(
    subject: T, handler: Callable[[T, Request], Awaitable[Response]]
) -> Callable[[Request], Awaitable[Response]]:
    """Return the route of a handler; it turns every exception into an error response."""

    async def route(request: Request) -> Response:
        try:
            return await handler(subject, request)
        except ClientGoneError:
            return Response(status_code=CLIENT_CLOSED_REQUEST)  # for logs only
        except Exception as error:
            return error_for(request.scope, public_error(error, request_id_of(request.scope)))

    return route
