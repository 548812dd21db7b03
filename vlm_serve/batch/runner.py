"""Loads a model and runs jobs on the server's routes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vlm_serve.batch.asgi import HttpReply
from vlm_serve.batch.order import ReuseKey, ReuseQueue
from vlm_serve.batch.pool import answer_all, post_patiently
from vlm_serve.options.config import EngineConfig
from vlm_serve.server.config import ServerConfig

if TYPE_CHECKING:
    from vlm_serve.engine.engine import Engine


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


OnReply = Callable[[BatchJob, HttpReply], None]


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
    from vlm_serve.server.main import start_engine

    engine = start_engine(model, engine_config, server_config)
    width = concurrency or 2 * engine.config.max_num_seqs
    # The server's queue must hold all concurrent jobs.
    server_config = replace(
        server_config,
        max_queued_requests=max(server_config.max_queued_requests, width),
        batch_store=None,  # no route for files is asked
    )
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

    async def answer(index: int) -> HttpReply:
        return await post_patiently(app, jobs[index].path, jobs[index].body(), headers)

    try:
        await answer_all(queue, width, answer, lambda index, reply: on_reply(jobs[index], reply))
    finally:
        await service.close()
