"""POST /update_weights_from_disk and /update_weights_from_tensor, as SGLang's servers have them."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import Request
from pydantic import BaseModel, Field
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from vlm_serve.errors import FieldError, InvalidRequestError
from vlm_serve.server.api.adapters import MAX_PATH, folder_below
from vlm_serve.server.api.shared.fields import ExactModel
from vlm_serve.server.api.shared.request_body import read_json
from vlm_serve.server.http.auth import refuse_tenants
from vlm_serve.server.http.browsers import refuse_foreign_scripts
from vlm_serve.server.http.errors import PermissionDeniedError, renamed_params
from vlm_serve.system.hosts import is_loopback
from vlm_serve.system.private_files import is_own

if TYPE_CHECKING:
    from vlm_serve.server.config import ServerConfig
    from vlm_serve.server.service import Service

_FORMATS = (None, "auto", "safetensors")
_SHARED_MEMORY = Path("/dev/shm")
"""Where Linux has the segments of POSIX shared memory, by their names."""
READY = "vlm_serve.ready"
"""Key of an ASGI scope, which no client can write: a function that is called on a thread with the
digest of new weights before they take the place of the old ones. What it raises drops them."""
_PICKLES = (
    "holds pickles, which run code when they are read: write the tensors as safetensors into "
    "shared memory, and name that in shared_memory"
)


class _Update(ExactModel):
    load_format: str | None = None
    abort_all_requests: bool = False
    flush_cache: bool = False
    weight_version: str | None = Field(None, min_length=1, max_length=128)


class UpdateWeights(_Update):
    """The body of a request to take the weights of a folder."""

    model_path: str = Field(min_length=1, max_length=MAX_PATH)


class UpdateFromTensors(_Update):
    """The body of a request to take tensors from shared memory."""

    shared_memory: str = Field("", max_length=256)
    serialized_named_tensors: Any = None


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
    root, path = folder_below(allowed, body.model_path, "model_path", "allowed_weights_path")
    return await _updated(
        service, request, body, path, f"the weights are those of {body.model_path!r}", root
    )


async def update_weights_from_tensor(service: Service, request: Request) -> Response:
    """Put tensors of another process of this machine into the place of those of the same names.

    They are an image of a safetensors file in a segment of POSIX shared memory, which is copied:
    the other process may remove it after the answer.

    Raises:
        InvalidRequestError: updates are not allowed, there is no such segment, it belongs to
            another user, or it holds no tensors of this model; the message says what. Nothing has
            changed then.
        PermissionDeniedError: the client may not.
    """
    check_operator(service, request)
    body = await read_json(service, request, UpdateFromTensors)
    if body.serialized_named_tensors is not None:
        raise FieldError("serialized_named_tensors", _PICKLES)
    path = _segment(body.shared_memory.removeprefix("/"))
    with renamed_params({"model_path": "shared_memory"}):
        return await _updated(service, request, body, path, f"tensors came from {path.name!r}")


def _segment(name: str) -> Path:
    """Return the file of a segment of shared memory that this user or root has made.

    Nobody else can put another one in its place, because /dev/shm is sticky.
    """
    path = _SHARED_MEMORY / name
    try:
        status = path.lstat() if path.name == name else None
    except (OSError, ValueError):
        status = None
    if status is None or not stat.S_ISREG(status.st_mode):
        raise FieldError("shared_memory", f"names no segment in {_SHARED_MEMORY} of this machine")
    if status.st_uid and not is_own(status):
        raise FieldError("shared_memory", "names a segment of another user")
    return path


async def _updated(
    service: Service,
    request: Request,
    body: _Update,
    path: Path,
    message: str,
    below: Path | None = None,
) -> Response:
    """Update the weights from a path, and answer so."""
    if body.load_format not in _FORMATS:
        raise FieldError("load_format", "must be auto or safetensors")
    update = partial(
        service.engine.update_weights,
        path,
        version=body.weight_version,
        abort=body.abort_all_requests,
        flush=body.flush_cache,
        below=below,
        **_together(request),
    )
    identity = await asyncio.to_thread(update)
    answer = WeightsUpdated(
        message=message,
        weights=identity.whole.hex(),
        weight_version=service.engine.weight_version,
    )
    return JSONResponse(answer.model_dump())


def _together(request: Request) -> dict[str, Any]:
    """Return the option of an engine that swaps its weights together with others."""
    ready: Callable[[str], object] | None = request.scope.get(READY)
    return {} if ready is None else {"ready": lambda identity: ready(identity.whole.hex())}


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
    check_authority(
        request.scope, service.config, allowed=service.engine.config.allow_weight_updates
    )


def check_authority(scope: Scope, config: ServerConfig, *, allowed: bool) -> None:
    """Refuse as `check_operator` does.

    Args:
        config: of the server.
        allowed: weights may be changed at all.
    """
    refuse_tenants(scope)
    refuse_foreign_scripts(scope, config)
    if not allowed:
        raise InvalidRequestError(
            "this server's weights cannot be changed: start it with --allow-weight-updates"
        )
    if not (config.api_key or _is_local(scope.get("client"))):
        raise PermissionDeniedError(
            "without an API key, that is for clients on this machine only", code="not_local"
        )


def _is_local(client: Any) -> bool:
    """Return True for a client on this machine's loopback or on a Unix socket."""
    return not client or not client[0] or is_loopback(client[0])
