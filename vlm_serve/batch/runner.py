"""Runs jobs on the server's routes: bounded in number, in the order of a `ReuseQueue`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp

from vlm_serve.batch.asgi import Reply, post
from vlm_serve.batch.order import ReuseKey, ReuseQueue
from vlm_serve.config import EngineConfig
from vlm_serve.errors import EngineClosedError
from vlm_serve.server.config import ServerConfig

if TYPE_CHECKING:
    from vlm_serve.engine.engine import Engine

RETRY_SECONDS = 0.2
_STOPPED = ("engine_stopped", "shutting_down", "aborted")


@dataclass(frozen=True, slots=True)
class BatchJob:
    """A request of a batch.

    Attributes:
        id: identifies its output line; the same in every run over the same input.
        path: the route.
        body: builds the request's JSON when the job starts.
        reuse_key: decides its place in the order.
    """

    id: str
    path: str
    body: Callable[[], bytes]
    reuse_key: ReuseKey


OnReply = Callable[[BatchJob, Reply], None]


def run_jobs(
    model: str,
    engine_config: EngineConfig,
    server_config: ServerConfig,
    jobs: Sequence[BatchJob],
    on_reply: OnReply,
    concurrency: int | None,
) -> None:
    """Load the model and answer all jobs, calling `on_reply` as each one ends.

    Raises:
        CheckpointError, ConfigError: the model cannot be loaded.
        EngineClosedError: the engine stopped; the remaining jobs have no reply.
    """
    if not jobs:
        return
    from vlm_serve.engine.engine import Engine

    # The server's queue must hold all concurrent jobs.
    width = concurrency or 2 * engine_config.max_num_seqs
    server_config = replace(
        server_config, max_queued_requests=max(server_config.max_queued_requests, width)
    )
    engine = Engine.from_checkpoint(model, engine_config)
    try:
        asyncio.run(serve_jobs(engine, server_config, model, jobs, on_reply, width))
    finally:
        engine.close()


async def serve_jobs(
    engine: Engine,
    config: ServerConfig,
    model: str,
    jobs: Sequence[BatchJob],
    on_reply: OnReply,
    width: int,
) -> None:
    """Answer all jobs with an engine, at most `width` at a time, and close it."""
    from vlm_serve.server.app import create_app
    from vlm_serve.server.service import Service

    service = Service(engine, config, config.served_model_name or (model,))
    app = create_app(service)
    headers = [(b"authorization", b"Bearer " + key.encode()) for key in config.api_key[:1]]
    queue = ReuseQueue([job.reuse_key for job in jobs])
    running: dict[asyncio.Task[Reply], int] = {}
    try:
        while True:
            while len(running) < width and (index := queue.take()) is not None:
                job = jobs[index]
                running[asyncio.ensure_future(_answer(app, job, headers))] = index
            if not running:
                return
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = running.pop(task)
                on_reply(jobs[index], task.result())
                queue.ended(index)
    finally:
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        await service.close()


async def _answer(app: ASGIApp, job: BatchJob, headers: Sequence[tuple[bytes, bytes]]) -> Reply:
    """Answer a job, retrying while the server's queue is full.

    Raises EngineClosedError if the engine has stopped.
    """
    body = job.body()
    while True:
        reply = await post(app, job.path, body, headers)
        code = error_code(reply)
        if code in _STOPPED:
            raise EngineClosedError("the engine has stopped; run again to continue", code=code)
        if code != "queue_full":
            return reply
        await asyncio.sleep(RETRY_SECONDS)


def reply_json(reply: Reply) -> Any:
    """Parse the reply's body as JSON; None if it is not JSON."""
    try:
        return json.loads(reply.body)
    except ValueError:
        return None


def error_code(reply: Reply) -> str | None:
    """Return the code of an error reply, None for an answer."""
    if reply.status < 400:
        return None
    body = reply_json(reply)
    error = body.get("error") if isinstance(body, dict) else None
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, str) else "error"


def usage_of(body: Any) -> tuple[int, int]:
    """Return the prompt tokens of an answer, and how many of them were cached."""
    usage = body.get("usage") if isinstance(body, dict) else None
    if not isinstance(usage, dict):
        return 0, 0
    prompt = usage.get("prompt_tokens", usage.get("input_tokens", 0))
    details = usage.get("prompt_tokens_details", usage.get("input_tokens_details")) or {}
    cached = details.get("cached_tokens", usage.get("cache_read_input_tokens", 0))
    return prompt or 0, cached or 0
