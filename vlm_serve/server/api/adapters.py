"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM's clients ask for them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import Request
from pydantic import BaseModel, Field
from starlette.responses import JSONResponse, Response

from vlm_serve.engine.features.adapters.options import LoRA
from vlm_serve.errors import CheckpointError, ConfigError, InvalidRequestError, ModelNotFoundError
from vlm_serve.server.api.shared.fields import ExactModel
from vlm_serve.server.api.shared.request_body import read_json
from vlm_serve.server.http.auth import refuse_tenants
from vlm_serve.server.http.browsers import refuse_foreign_scripts

if TYPE_CHECKING:
    from vlm_serve.server.service import Service

MAX_PATH = 4096


class UnloadAdapter(ExactModel):
    """The body of a request to unload an adapter."""

    lora_name: str = Field(min_length=1, max_length=128)


class LoadAdapter(UnloadAdapter):
    """The body of a request to load an adapter."""

    lora_path: str = Field(min_length=1, max_length=MAX_PATH)


class AdapterChanged(BaseModel):
    """The response body."""

    success: bool = True
    message: str


async def load_lora_adapter(service: Service, request: Request) -> Response:
    """Load an adapter and offer it under its name. Other requests go on meanwhile.

    Raises:
        InvalidRequestError: loading is not allowed, the path lies elsewhere, or the folder holds no
            adapter of this model; the message says what.
    """
    allowed = _allowed(service, request)
    body = await read_json(service, request, LoadAdapter)
    root, path = folder_below(allowed, body.lora_path, "lora_path", "allowed_lora_path")
    names = service.state.model_names
    wanted = LoRA(body.lora_name, path)
    try:
        await asyncio.to_thread(service.engine.adapters.load, wanted, taken=names, below=root)
    except (CheckpointError, ConfigError, ModelNotFoundError) as error:
        raise InvalidRequestError(error.message, param="lora_path") from error
    return _answer(f"the adapter {body.lora_name!r} is loaded")


async def unload_lora_adapter(service: Service, request: Request) -> Response:
    """Offer an adapter no longer, and free it when the last request with it has ended.

    Raises:
        ModelNotFoundError: there is none of that name.
        InvalidRequestError: unloading is not allowed.
    """
    _allowed(service, request)
    body = await read_json(service, request, UnloadAdapter)
    await asyncio.to_thread(service.engine.adapters.unload, body.lora_name, 0)
    return _answer(f"the adapter {body.lora_name!r} is unloaded")


def _allowed(service: Service, request: Request) -> Path:
    """Return the folder below which adapters may lie."""
    refuse_tenants(request.scope)
    refuse_foreign_scripts(request.scope, service.config)
    folder = service.config.allowed_lora_path
    if not service.config.allow_runtime_lora or folder is None:
        raise InvalidRequestError(
            "this server's adapters cannot be changed: start it with --allow-runtime-lora and "
            "--allowed-lora-path"
        )
    return Path(folder)


def folder_below(allowed: Path, name: str, field: str, option: str) -> tuple[Path, Path]:
    """Return the allowed folder and the one that a field of the body names, with links resolved.

    Raises InvalidRequestError if that is no folder below the one that an option allows.
    """
    problem = InvalidRequestError(
        f"{field} must name a folder below the server's {option}", param=field
    )
    try:
        root = allowed.resolve(strict=True)
        path = (root / name).resolve(strict=True)
    except (OSError, ValueError, RuntimeError):
        raise problem from None
    if root not in path.parents or not path.is_dir():
        raise problem
    return root, path


def _answer(message: str) -> Response:
    return JSONResponse(AdapterChanged(message=message).model_dump())
