"""POST /update_weights_from_disk, as trainers ask SGLang's servers for it."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import Request
from pydantic import BaseModel, Field
from starlette.responses import JSONResponse, Response

from vlm_serve.errors import FieldError, InvalidRequestError
from vlm_serve.server.api.adapters import MAX_PATH, folder_below
from vlm_serve.server.api.shared.fields import ExactModel
from vlm_serve.server.api.shared.request_body import read_json
from vlm_serve.server.http.auth import refuse_tenants
from vlm_serve.server.http.browsers import is_loopback, refuse_foreign_scripts
from vlm_serve.server.http.errors import PermissionDeniedError

if TYPE_CHECKING:
    from vlm_serve.server.service import Service

_FORMATS = (None, "auto", "safetensors")


class UpdateWeights(ExactModel):
    """The body of a request to change the weights."""

    model_path: str = Field(min_length=1, max_length=MAX_PATH)
    load_format: str | None = None
    abort_all_requests: bool = False
    flush_cache: bool = False
    weight_version: str | None = Field(None, min_length=1, max_length=128)


class WeightsUpdated(BaseModel):
    """The response body. `weights`: their digest, in hexadecimal."""

    success: bool = True
    message: str
    weights: str
    weight_version: str


async def update_weights_from_disk(service: Service, request: Request) -> Response:
    """Change the weights to those of a folder. Other requests go on meanwhile.

    Raises:
        InvalidRequestError: updates are not allowed, the path lies elsewhere, or the folder holds
            no weights of this model; the message says what. Nothing has changed then.
        PermissionDeniedError: the client may not.
    """
    allowed = _allowed(service, request)
    body = await read_json(service, request, UpdateWeights)
    if body.load_format not in _FORMATS:
        raise FieldError("load_format", "must be auto or safetensors")
    root, path = folder_below(allowed, body.model_path, "model_path", "allowed_weights_path")
    update = partial(
        service.engine.update_weights,
        path,
        version=body.weight_version,
        abort=body.abort_all_requests,
        flush=body.flush_cache,
        below=root,
    )
    identity = await asyncio.to_thread(update)
    answer = WeightsUpdated(
        message=f"the weights are those of {body.model_path!r}",
        weights=identity.whole.hex(),
        weight_version=service.engine.weight_version,
    )
    return JSONResponse(answer.model_dump())


def _allowed(service: Service, request: Request) -> Path:
    """Return the folder below which weights may lie."""
    check_operator(service, request)
    if (folder := service.config.allowed_weights_path) is None:
        raise InvalidRequestError(
            "this server takes no weights from folders: start it with --allowed-weights-path"
        )
    return Path(folder)


def check_operator(service: Service, request: Request) -> None:
    """Refuse whoever may not change the weights of this server, pause it or send it to sleep."""
    refuse_tenants(request.scope)
    refuse_foreign_scripts(request.scope, service.config)
    if not service.engine.config.allow_weight_updates:
        raise InvalidRequestError(
            "this server's weights cannot be changed: start it with --allow-weight-updates"
        )
    if not (service.config.api_key or _is_local(request.scope.get("client"))):
        raise PermissionDeniedError(
            "without an API key, that is for clients on this machine only", code="not_local"
        )


def _is_local(client: Any) -> bool:
    """Return True for a client on this machine's loopback or on a Unix socket."""
    return not client or not client[0] or is_loopback(client[0])
