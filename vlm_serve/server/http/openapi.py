"""The OpenAPI document: FastAPI's, plus the bodies of requests."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from typing import Any

from fastapi import FastAPI, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

_REFERENCE = "#/components/schemas/{model}"


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

    async def _get_document(self) -> Response:
        document = self._document or await asyncio.to_thread(self._make_document)
        return Response(document, media_type="application/json")

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
