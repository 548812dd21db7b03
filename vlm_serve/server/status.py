"""Routes about the server: models, health, readiness, load, version, metrics, options.

Some of them operators and routers know from vLLM and SGLang.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, Literal

from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.responses import Response

from vlm_serve.engine.requests.validation import with_token_limit
from vlm_serve.errors import FieldError, InvalidRequestError
from vlm_serve.options.declared import options_of
from vlm_serve.sampling_params import SamplingParams
from vlm_serve.server.api.shared.fields import ExactModel
from vlm_serve.server.api.shared.listing import ends_of
from vlm_serve.server.api.shared.request_body import read_optional
from vlm_serve.server.http.auth import refuse_tenants
from vlm_serve.server.http.browsers import refuse_foreign_scripts
from vlm_serve.server.http.errors import is_anthropic
from vlm_serve.server.service import Service
from vlm_serve.system.host_memory import free_bytes, resident_bytes
from vlm_serve.system.version import __version__

STATS_TIMEOUT_SECONDS = 1.0
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "vlm-serve"
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


def model_cards(service: Service) -> list[ModelCard]:
    """Return a card for each name of the model, and for each adapter."""
    state, length = service.state, service.engine.max_model_len
    first = state.model_names[0]
    cards = [
        ModelCard(id=name, created=state.created, root=first, max_model_len=length)
        for name in state.model_names
    ]
    for adapter in service.engine.adapters.all():
        name, created = adapter.name, adapter.loaded_at
        cards.append(
            ModelCard(id=name, created=created, root=name, parent=first, max_model_len=length)
        )
    return cards


async def list_models(service: Service, request: Request) -> Response:
    """GET /v1/models, in the form of the client's API."""
    cards = model_cards(service)
    if is_anthropic(request.scope):
        infos = [_info(card) for card in cards]
        return JSONResponse({"data": infos, **ends_of([card.id for card in cards], more=False)})
    return JSONResponse(ModelList(data=cards).model_dump())


async def get_model(service: Service, request: Request) -> Response:
    """GET /v1/models/{name}.

    Raises:
        ModelNotFoundError: the server has no model of that name, which may be empty.
    """
    name = request.path_params["name"]
    card = next((card for card in model_cards(service) if card.id == name), None)
    if card is None:
        raise service.state.unknown_model(name)
    return JSONResponse(_info(card) if is_anthropic(request.scope) else card.model_dump())


def _info(card: ModelCard) -> dict[str, Any]:
    """Return a card in the form of Anthropic's API."""
    return {
        "type": "model",
        "id": card.id,
        "display_name": card.id,
        "created_at": datetime.fromtimestamp(card.created, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": card.max_model_len - 1,
        "max_tokens": card.max_model_len - 1,
    }


def problem(service: Service) -> str | None:
    """Return why the server is unhealthy; None: it is healthy."""
    engine = service.engine
    if not engine.alive:
        return "the engine has stopped"
    if service.idle_check.failed:
        return "the cache violates an invariant"
    busy = engine.num_running + engine.num_waiting > 0 and not engine.rests - {"idle"}
    idle_seconds = time.monotonic() - max(engine.last_step_time, service.state.busy_since)
    if busy and idle_seconds > service.engine.config.stall_timeout:
        return f"there is work, but no step has ended for {idle_seconds:.0f} s"
    return None


async def health(service: Service, _: Request) -> Response:
    """GET /health: 200 while the engine makes progress or is idle, else 503. For SageMaker also
    GET and POST /ping. A degraded engine answers, slower than it could, and says why."""
    trouble = problem(service)
    if trouble is not None:
        return JSONResponse({"status": "unhealthy", "reason": trouble}, status_code=503)
    if service.engine.degraded:
        return JSONResponse({"status": "degraded", "reason": service.engine.degraded})
    return JSONResponse({"status": "ok"})


async def ready(service: Service, _: Request) -> Response:
    """GET /ready: 200 while new requests are admitted, else 503."""
    asleep = "asleep" in service.engine.rests
    if asleep or service.requests.draining or problem(service) is not None:
        return JSONResponse({"status": "not ready"}, status_code=503)
    return JSONResponse({"status": "ready"})


async def load(service: Service, _: Request) -> Response:
    """GET /load: open requests, and their tokens and memory."""
    return JSONResponse(
        {
            "server_load": service.requests.num_open,
            "num_requests_running": service.engine.num_running,
            "num_requests_waiting": service.engine.num_waiting,
            "open_prompt_tokens": service.admission.open_tokens,
            "request_memory_bytes": service.admission.memory.held,
        }
    )


async def show_version(_: Service, __: Request) -> Response:
    """GET /version."""
    return JSONResponse({"version": __version__})


async def metrics(service: Service, _: Request) -> Response:
    """GET /metrics, for Prometheus."""
    await service.state.refresh_engine_stats(STATS_TIMEOUT_SECONDS)
    return Response(service.state.metrics.render(), media_type=METRICS_TYPE)


_FLAGS = ("reset_running_requests", "reset_external")


class ResetRequest(ExactModel):
    """The optional body of a reset."""

    reset_running_requests: bool | None = None
    reset_external: bool | None = None


_SHOWN_DEFAULTS = ("temperature", "top_p", "top_k", "max_tokens")


async def model_info(service: Service, _: Request) -> Response:
    """GET /get_model_info and /model_info, as SGLang's routers read them; and for the page what
    holds where a request says nothing (`max_tokens` None: as much as the context leaves)."""
    name, engine = service.state.model_names[0], service.engine
    given = engine.spec.generation
    defaults = with_token_limit(SamplingParams().with_defaults(given), given, engine.max_model_len)
    sees = engine.preprocessor.takes_media
    return JSONResponse(
        {
            "model_path": name,
            "tokenizer_path": name,
            "served_model_name": name,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": engine.weight_version,
            "has_image_understanding": sees,
            "has_audio_understanding": False,
            "max_model_len": engine.max_model_len,
            "max_body_bytes": service.config.max_body_bytes,
            "sampling_defaults": {name: getattr(defaults, name) for name in _SHOWN_DEFAULTS},
        }
    )


async def server_info(service: Service, request: Request) -> Response:
    """GET /server_info and /get_server_info: version, sizes and the options that hold no secret."""
    refuse_tenants(request.scope)
    engine, name = service.engine.config, service.state.model_names[0]
    await service.state.refresh_engine_stats(STATS_TIMEOUT_SECONDS)
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
            "weights": weights_digest(service),
            "batch_invariant": asdict(service.engine.arithmetic.promise),
            "memory": {
                "resident_bytes": _resident(service.engine.pid),
                "allocator_free_bytes": free_bytes(),
                "held_bytes": service.state.metrics.engine_stats.held_bytes,
            },
            "engine": shown_options(engine),
            "server": shown_options(service.config),
        }
    )


def weights_digest(service: Service) -> str | None:
    """Return the digest of the weights that prompts get keys for, in hexadecimal."""
    weights = service.engine.preprocessor.weights
    return None if weights is None else weights.whole.hex()


def _resident(pid: int | None) -> int | None:
    """Return the resident memory of the server, and of its engine if that is another process."""
    own, other = resident_bytes(), 0 if pid is None else resident_bytes(pid)
    return None if own is None or other is None else own + other


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
    body = await read_optional(service, request, ResetRequest)
    _check_reset(body.model_dump(exclude_none=True))
    await service.flush()
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
