"""Routes about the server: models, health, readiness, load, version, metrics."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any, Literal

from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.responses import Response

from vlm_serve.server.api.listing import ends_of
from vlm_serve.server.http.errors import is_anthropic
from vlm_serve.server.service import Service
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
    cards = [
        ModelCard(
            id=name,
            created=service.state.created,
            root=service.state.model_names[0],
            max_model_len=service.engine.max_model_len,
        )
        for name in service.state.model_names
    ]
    for each in service.engine.adapters.all():
        card = ModelCard(
            id=each.name,
            created=each.loaded_at,
            root=each.name,
            parent=service.state.model_names[0],
            max_model_len=service.engine.max_model_len,
        )
        cards.append(card)
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
    busy = engine.num_running + engine.num_waiting > 0
    idle_seconds = time.monotonic() - max(engine.last_step_time, service.state.busy_since)
    if busy and idle_seconds > service.engine.config.stall_timeout:
        return f"there is work, but no step has ended for {idle_seconds:.0f} s"
    return None


async def health(service: Service, _: Request) -> Response:
    """GET /health: 200 while the engine makes progress or is idle, else 503."""
    trouble = problem(service)
    if trouble is not None:
        return JSONResponse({"status": "unhealthy", "reason": trouble}, status_code=503)
    return JSONResponse({"status": "ok"})


async def ready(service: Service, _: Request) -> Response:
    """GET /ready: 200 while new requests are admitted, else 503."""
    if service.requests.draining or problem(service) is not None:
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
