"""How a route is added and described, and the routes of other folders, mounted beside the server's
own."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import Response
from starlette.routing import compile_path
from starlette.types import ASGIApp

from vlm_serve.server.http import api_page
from vlm_serve.server.http.errors import error_for, public_error
from vlm_serve.server.http.request_id import request_id_of
from vlm_serve.server.http.streaming import ClientGoneError

T = TypeVar("T")
Responses = dict[int | str, dict[str, Any]]

CLIENT_CLOSED_REQUEST = 499

_REFERENCE = "#/components/schemas/{model}"


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
        {"name": parameter, "in": "path", "required": True, "schema": {"type": "string"}}
        for parameter in compile_path(path)[2]
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


class ExactRoute(APIRoute):
    """A route with an exactly matching path; Starlette's own pattern accepts a final line break."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.path_regex = re.compile(self.path_regex.pattern.removesuffix("$") + r"\Z")


class DescribedApp(FastAPI):
    """A FastAPI application with the models given to `body_of` in its document.

    The document is made on the first request for it, off the event loop: it takes 0.1 s.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(openapi_url=None, **settings)
        self._bodies: list[type[BaseModel]] = []
        self._making = threading.Lock()
        self._document = b""
        self.router.route_class = ExactRoute
        self.add_api_route("/openapi.json", self._get_document, include_in_schema=False)
        self.add_api_route("/docs", self._get_page, include_in_schema=False)

    async def _get_document(self) -> Response:
        document = self._document or await asyncio.to_thread(self._make_document)
        return Response(document, media_type="application/json")

    async def _get_page(self) -> Response:
        document = self._document or await asyncio.to_thread(self._make_document)
        page = api_page.render(json.loads(document))
        return Response(page, media_type="text/html", headers=api_page.HEADERS)

    def _make_document(self) -> bytes:
        with self._making:
            self._document = self._document or json.dumps(self.openapi()).encode()
            return self._document

    def body_of(self, model: type[BaseModel]) -> dict[str, Any]:
        """Return `openapi_extra` of a route with a JSON body of this model."""
        self._bodies.append(model)
        schema = {"$ref": _REFERENCE.format(model=model.__name__)}
        return {
            "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}
        }

    def openapi(self) -> dict[str, Any]:
        """Return the document."""
        if self.openapi_schema is None:
            document = super().openapi()
            _, definitions = models_json_schema(
                [(model, "validation") for model in self._bodies], ref_template=_REFERENCE
            )
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            schemas.update(definitions.get("$defs", {}))
            self.openapi_schema = document
        return self.openapi_schema
