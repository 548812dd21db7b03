"""The OpenAPI document: FastAPI describes responses, the bodies that routes read themselves are
added here."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

_REFERENCE = "#/components/schemas/{model}"


class DescribedApp(FastAPI):
    """A FastAPI application whose document also contains the models given to `body_of`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._bodies: list[type[BaseModel]] = []

    def body_of(self, model: type[BaseModel]) -> dict[str, Any]:
        """`openapi_extra` of a route that reads a JSON body of this model."""
        self._bodies.append(model)
        schema = {"$ref": _REFERENCE.format(model=model.__name__)}
        return {
            "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}
        }

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            document = super().openapi()
            _, definitions = models_json_schema(
                [(model, "validation") for model in self._bodies], ref_template=_REFERENCE
            )
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            schemas.update(definitions.get("$defs", {}))
            self.openapi_schema = document
        return self.openapi_schema
