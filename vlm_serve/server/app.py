"""The ASGI application: all routes and the layers around them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import chain
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from vlm_serve.server import status
from vlm_serve.server.api.adapters import (
    AdapterChanged,
    LoadAdapter,
    UnloadAdapter,
    load_lora_adapter,
    unload_lora_adapter,
)
from vlm_serve.server.api.cache import inspection as cache
from vlm_serve.server.api.cache import pins as cache_pins
from vlm_serve.server.api.cache.events import cache_events
from vlm_serve.server.api.chat import ChatCompletion, chat_completions
from vlm_serve.server.api.chat_render import Rendered, render_chat
from vlm_serve.server.api.completions import Completion, CompletionRequest, completions
from vlm_serve.server.api.decisions import (
    Decision,
    DecisionsRequest,
    SystemOne,
    SystemOneRequest,
    decisions,
    systemone,
)
from vlm_serve.server.api.generate import Generated, GenerateRequest, generate
from vlm_serve.server.api.messages import (
    CountedTokens,
    MessageBody,
    MessagesErrorBody,
    MessagesPrompt,
    MessagesRequest,
    count_message_tokens,
    create_message,
)
from vlm_serve.server.api.pauses import (
    continue_generation,
    is_paused,
    pause,
    pause_generation,
    resume,
)
from vlm_serve.server.api.pooling import (
    ClassifyRequest,
    Embeddings,
    EmbeddingsRequest,
    Labels,
    Reranked,
    RerankRequest,
    ScoreRequest,
    Scores,
    classify,
    embeddings,
    rerank,
    score,
)
from vlm_serve.server.api.responses.request import ResponsesRequest
from vlm_serve.server.api.responses.route import (
    InputTokens,
    ResponseBody,
    count_input_tokens,
    create_response,
)
from vlm_serve.server.api.responses.stored import (
    Deleted,
    delete_response,
    get_response,
    list_input_items,
)
from vlm_serve.server.api.shared.chat_request import ChatCompletionRequest
from vlm_serve.server.api.shared.fields import (
    ERRORS,
    CacheReportBody,
    ErrorBody,
    RequestModel,
    errors_of,
)
from vlm_serve.server.api.shared.listing import Page
from vlm_serve.server.api.sleep import (
    is_sleeping,
    release_memory_occupation,
    resume_memory_occupation,
    sleep,
    wake_up,
)
from vlm_serve.server.api.tokenization import (
    Detokenized,
    DetokenizeRequest,
    TokenizeRequest,
    Tokens,
    detokenize,
    tokenize,
)
from vlm_serve.server.api.weights import (
    UpdateFromTensors,
    UpdateWeights,
    WeightsUpdated,
    update_weights_from_disk,
    update_weights_from_tensor,
)
from vlm_serve.server.http.auth import guarded
from vlm_serve.server.http.errors import (
    MESSAGES_PATH,
    MODELS_PATH,
    on_http_exception,
)
from vlm_serve.server.http.request_memory import Intake
from vlm_serve.server.routes import DescribedApp, Responses, add_route
from vlm_serve.server.service import Service
from vlm_serve.server.status import ModelCard, ModelList
from vlm_serve.system.version import __version__

Handler = Callable[[Service, Request], Awaitable[Response]]
Row = tuple[str, str, Handler, Responses, dict[str, Any]]
"""A route: method and path, handler, responses, and further settings of `add_route`."""

WHOLE = (
    *(InputTokens, CountedTokens, Rendered, Decision, SystemOne),
    *(Embeddings, Reranked, Scores, Labels),
)
"""Responses that are never streams."""
MESSAGES_ERRORS = errors_of(MessagesErrorBody)
EVENT_STREAM: dict[str, Any] = {
    "text/event-stream": {
        "schema": {  # one event
            "type": "object",
            "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
            "required": ["data"],
        }
    }
}


def create_app(service: Service) -> ASGIApp:
    """Return the ASGI application of one server; it closes the service at shutdown."""
    return guarded(create_routes(service), service.config)


def create_routes(service: Service) -> ASGIApp:
    """Return the routes without authentication, for callers with their own."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        try:
            yield
        finally:
            await service.close()

    app = routed(service, lifespan=lifespan)
    routes = Intake(
        _head_as_get(app),
        service.admission.memory,
        service.max_body_bytes,
        streamed=tuple(path for routes in service.mounted for path in routes.streamed),
    )
    for mounted in service.mounted:
        mounted.start(routes)
    return routes


def routed(service: Service, **settings: Any) -> DescribedApp:
    """Return the routing application: every handler of the server at its path.

    Args:
        service: what answers.
        settings: further settings of FastAPI.
    """
    app = DescribedApp(
        title="vlm-serve",
        version=__version__,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
        **settings,
    )
    app.add_exception_handler(HTTPException, on_http_exception)
    tables = (_posts(app), _cache(), _about(), _for_operators(), _stored_responses())
    for method, path, handler, responses, settings in chain.from_iterable(tables):
        add_route(app, service, path, handler, responses, method=method, **settings)
    for mounted in service.mounted:
        mounted.add_to(app)
    return app


def _head_as_get(app: ASGIApp) -> ASGIApp:
    """Answer HEAD as GET; the HTTP protocol drops the body.

    Endless streams check `is_head` in the scope.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET", "is_head": True}
        await app(scope, receive, send)

    return answer


def _posts(app: DescribedApp) -> Iterator[Row]:
    """Yield routes with a JSON body. They read it themselves; FastAPI only describes it."""
    posts: list[tuple[str, Handler, type[RequestModel], type[Any]]] = [
        ("/v1/chat/completions", chat_completions, ChatCompletionRequest, ChatCompletion),
        ("/v1/chat/completions/render", render_chat, ChatCompletionRequest, Rendered),
        ("/v1/completions", completions, CompletionRequest, Completion),
        ("/v1/responses", create_response, ResponsesRequest, ResponseBody),
        ("/v1/responses/input_tokens", count_input_tokens, ResponsesRequest, InputTokens),
        (MESSAGES_PATH, create_message, MessagesRequest, MessageBody),
        (f"{MESSAGES_PATH}/count_tokens", count_message_tokens, MessagesPrompt, CountedTokens),
        ("/inference/v1/generate", generate, GenerateRequest, Generated),
        ("/v1/decisions", decisions, DecisionsRequest, Decision),
        ("/v1/systemone", systemone, SystemOneRequest, SystemOne),
        ("/v1/embeddings", embeddings, EmbeddingsRequest, Embeddings),
        *((path + "/rerank", rerank, RerankRequest, Reranked) for path in ("/v1", "", "/v2")),
        *((path + "/score", score, ScoreRequest, Scores) for path in ("/v1", "")),
        ("/classify", classify, ClassifyRequest, Labels),
        ("/tokenize", tokenize, TokenizeRequest, Tokens),
        ("/detokenize", detokenize, DetokenizeRequest, Detokenized),
        ("/v1/cache/probe", cache.probe, cache.ProbeRequest, CacheReportBody),
        ("/v1/cache/pin", cache_pins.pin, cache_pins.PinRequest, cache_pins.Pinned),
        ("/v1/cache/flush", cache.flush, cache.FlushRequest, cache.Flushed),
        ("/v1/load_lora_adapter", load_lora_adapter, LoadAdapter, AdapterChanged),
        ("/v1/unload_lora_adapter", unload_lora_adapter, UnloadAdapter, AdapterChanged),
        ("/update_weights_from_disk", update_weights_from_disk, UpdateWeights, WeightsUpdated),
        (
            "/update_weights_from_tensor",
            update_weights_from_tensor,
            UpdateFromTensors,
            WeightsUpdated,
        ),
    ]
    for path, handler, body, answer in posts:
        can_stream = "stream" in body.model_fields and answer not in WHOLE
        streams = {"content": EVENT_STREAM} if can_stream else {}
        errors = MESSAGES_ERRORS if path.startswith(MESSAGES_PATH) else ERRORS
        alias = handler in (rerank, score) and not path.startswith("/v1/")
        operation = handler.__name__ + path.replace("/", "_") * alias
        settings = {"described": app.body_of(body), "operation_id": operation}
        yield "POST", path, handler, {200: {"model": answer, **streams}, **errors}, settings


def _cache() -> Iterator[Row]:
    """Yield routes for reading the cache, and for its pins."""
    lifted: dict[str, Any] = {"model": cache_pins.PinsLifted}
    stream: dict[str, Any] = {"content": EVENT_STREAM, "description": "Server-sent events"}
    routes: list[tuple[str, str, Handler, dict[str, Any]]] = [
        ("GET", "stats", cache.stats, {"model": dict[str, Any]}),
        ("GET", "affinity", cache.affinity, {"model": cache.Affinity}),
        ("GET", "tree", cache.tree, {"model": cache.CacheTree}),
        ("GET", "nodes/{key}", cache.node, {"model": cache.CacheNodeDetails}),
        ("GET", "events", cache_events, stream),
        ("GET", "pins", cache_pins.list_pins, {"model": cache_pins.PinList}),
        ("DELETE", "pins", cache_pins.lift_pins, lifted),
        ("DELETE", "pins/{key}", cache_pins.lift_pin, lifted),
    ]
    for method, path, handler, answer in routes:
        name = "cache_" + path.split("/")[0] if method == "GET" else handler.__name__
        yield method, f"/v1/cache/{path}", handler, {200: answer, **ERRORS}, {"name": name}


def _about() -> Iterator[Row]:
    """Yield routes about the server. A model's name may contain slashes."""
    card: Responses = {200: {"model": ModelCard}, 404: {"model": ErrorBody}}
    yield "GET", MODELS_PATH, status.list_models, {200: {"model": ModelList}}, {}
    yield "GET", MODELS_PATH + "/{name:path}", status.get_model, card, {}
    yield "GET", "/health", status.health, {}, {}
    yield "GET", "/ready", status.ready, {}, {}
    yield "GET", "/load", status.load, {}, {}
    yield "GET", "/version", status.show_version, {}, {}
    yield "GET", "/metrics", status.metrics, {}, {"response_class": PlainTextResponse}


def _for_operators() -> Iterator[Row]:
    """Yield routes that vLLM and SGLang have."""
    routes: list[tuple[str, str, Handler]] = [
        ("GET", "/ping", status.health),
        ("POST", "/ping", status.health),
        ("GET", "/get_model_info", status.model_info),
        ("GET", "/model_info", status.model_info),
        ("GET", "/server_info", status.server_info),
        ("GET", "/get_server_info", status.server_info),
        ("POST", "/reset_prefix_cache", status.reset_prefix_cache),
        ("POST", "/flush_cache", status.reset_prefix_cache),
        ("POST", "/pause_generation", pause_generation),
        ("POST", "/continue_generation", continue_generation),
        ("POST", "/pause", pause),
        ("POST", "/resume", resume),
        ("GET", "/is_paused", is_paused),
        ("POST", "/sleep", sleep),
        ("POST", "/wake_up", wake_up),
        ("GET", "/is_sleeping", is_sleeping),
        ("POST", "/release_memory_occupation", release_memory_occupation),
        ("POST", "/resume_memory_occupation", resume_memory_occupation),
    ]
    for method, path, handler in routes:
        yield method, path, handler, ERRORS, {"name": f"{method.lower()}_{path[1:]}"}


def _stored_responses() -> Iterator[Row]:
    """Yield routes for stored responses."""
    routes: list[tuple[str, str, Handler, type[Any]]] = [
        ("GET", "", get_response, ResponseBody),
        ("DELETE", "", delete_response, Deleted),
        ("GET", "/input_items", list_input_items, Page[dict[str, Any]]),
    ]
    for method, path, handler, answer in routes:
        responses: Responses = {200: {"model": answer}, "4XX": {"model": ErrorBody}}
        settings = {"operation_id": handler.__name__}
        yield method, "/v1/responses/{response_id}" + path, handler, responses, settings
