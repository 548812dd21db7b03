"""A batch whose engine ends: what has a reply keeps it, nothing else gets one."""

from __future__ import annotations

import asyncio
import json

import pytest

from vlm_serve.batch.asgi import HttpReply
from vlm_serve.batch.order import ReuseKey
from vlm_serve.batch.runner import BatchJob, serve_jobs
from vlm_serve.errors import EngineClosedError
from vlm_serve.options.config import EngineConfig
from vlm_serve.server.config import ServerConfig

PATH = "/v1/completions"


def job(number: int) -> BatchJob:
    """Make a job; the last one has the longest answer."""
    body = {"model": "demo", "prompt": f"{number}", "max_tokens": 4 ** (number + 1)}
    text = json.dumps(body | {"ignore_eos": True}).encode()
    return BatchJob(str(number), PATH, lambda: text, ReuseKey())


def test_requests_that_run_get_no_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lose the card in the middle: another run is to ask them again, not to keep an error."""
    from parity import executor_of

    from vlm_serve.engine.steps import local_executor
    from vlm_serve.pipeline.pipeline import Pipeline

    config = EngineConfig(cache_memory="16MiB", block_size=16, threads=1)
    replies: dict[str, int] = {}
    with Pipeline("demo", config) as pipe:

        def lost(plan: object) -> object:
            raise RuntimeError("a step")

        def reply(done: BatchJob, answer: HttpReply) -> None:
            replies[done.id] = answer.status
            if len(replies) == 2:
                monkeypatch.setattr(executor_of(pipe.engine), "_compute", lost)
                ended = "cuda:0 can compute nothing more"
                monkeypatch.setattr(local_executor, "after_failure", lambda *_: ended)

        jobs = [job(number) for number in range(4)]
        with pytest.raises(EngineClosedError, match="run again to continue"):
            asyncio.run(serve_jobs(pipe.engine, ServerConfig(), "demo", jobs, reply, 4))
    assert set(replies.values()) == {200}
    assert 2 <= len(replies) < 4
