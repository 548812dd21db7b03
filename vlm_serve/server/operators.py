"""Routes that operators and routers know from vLLM and SGLang."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic import ConfigDict
from starlette.responses import Response

from vlm_serve.errors import FieldError, InvalidRequestError
from vlm_serve.options.declared import options_of
from vlm_serve.server.api.fields import RequestModel
from vlm_serve.server.api.request_body import read_json
from vlm_serve.server.http.browsers import refuse_foreign_scripts
from vlm_serve.server.http.tenants import refuse_tenants
from vlm_serve.server.service import Service
from vlm_serve.server.status import health
from vlm_serve.system.version import __version__

_FLAGS = ("reset_running_requests", "reset_external")


class ResetRequest(RequestModel):
    """The optional body of a reset."""

    model_config = ConfigDict(extra="forbid", strict=True)

    reset_running_requests: bool | None = None
    reset_external: bool | None = None


async def ping(service: Service, request: Request) -> Response:
    """GET and POST /ping: as /health, for SageMaker."""
    return await health(service, request)


async def model_info(service: Service, _: Request) -> Response:
    """GET /get_model_info and /model_info, as SGLang's routers read them."""
    name = service.state.model_names[0]
    sees = service.engine.preprocessor.takes_media
    return JSONResponse(
        {
            "model_path": name,
            "tokenizer_path": name,
            "served_model_name": name,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": "default",
            "has_image_understanding": sees,
            "has_audio_understanding": False,
            "max_model_len": service.engine.max_model_len,
            "max_body_bytes": service.config.max_body_bytes,
        }
    )


async def server_info(service: Service, request: Request) -> Response:
    """GET /server_info and /get_server_info: version, sizes and the options that hold no secret."""
    refuse_tenants(request.scope)
    engine, name = service.engine.config, service.state.model_names[0]
    return JSONResponse(
        {
            "version": __version__,
            "model_path": name,
            "tokenizer_path": name,
            "served_model_name": name,
            "context_length": service.engine.max_model_len,
            "tp_size": engine.tensor_parallel_size,
            "dp_size": 1,
            "max_running_requests": engine.max_num_seqs,
            "max_queued_requests": service.config.max_queued_requests,
            "batch_invariant": asdict(service.engine.arithmetic.promise),
            "engine": shown_options(engine),
            "server": shown_options(service.config),
        }
    )


def shown_options(config: object) -> dict[str, Any]:
    """Return the options of a config that hold no secret, no path and no address."""
    return {
        item.name: getattr(config, item.name)
        for item in options_of(config)
        if item.choices or item.kind not in ("text", "list")
    }


async def reset_prefix_cache(service: Service, request: Request) -> Response:
    """POST /reset_prefix_cache (vLLM) and /flush_cache (SGLang): what /v1/cache/flush does.

    Raises:
        InvalidRequestError: what a query or a body asks for is not supported.
    """
    refuse_tenants(request.scope)
    refuse_foreign_scripts(request.scope, service.config)
    _check_reset({name: _flag(name, value) for name, value in request.query_params.items()})
    if request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers:
        body = await read_json(service, request, ResetRequest)
        _check_reset(body.model_dump(exclude_none=True))
    await asyncio.to_thread(service.engine.flush)
    if service.state.responses is not None:
        service.state.responses.clear()
    return JSONResponse({"success": True, "message": "the cache is empty"})


def _flag(name: str, text: str) -> bool:
    if name not in _FLAGS:
        raise InvalidRequestError(f"unknown query parameter {name[:64]!r}", param=name[:64])
    word = text.lower()
    if word not in ("true", "false", "1", "0"):
        raise FieldError(name, "must be true or false")
    return word in ("true", "1")


def _check_reset(given: Mapping[str, bool]) -> None:
    if given.get("reset_running_requests"):
        raise FieldError(
            "reset_running_requests", "is not supported: running requests keep what they hold"
        )
    if given.get("reset_external") is False:
        raise FieldError("reset_external", "cannot be false: all tiers are emptied")
