"""Generation is paused over HTTP, by the names of both vendors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from engine_forms import FORMS
from families import SPECS
from make_checkpoint import make_checkpoint
from serving import RunningServer, chat_body, ok, running
from waiting import wait_for

from vlm_serve.engine.engine import Engine
from vlm_serve.options.config import EngineConfig
from vlm_serve.server.config import ServerConfig

CONFIG = EngineConfig(
    device="cpu",
    dtype="float32",
    block_size=16,
    cache_memory="16MiB",
    stall_timeout=0.001,
    allow_weight_updates=True,
    speculative="off",
)
# With drafts out of earlier answers they end in 20 steps, before a pause has come.
LONG = {"temperature": 0, "max_tokens": 300, "ignore_eos": True}
PAUSES = (
    ("/pause_generation", {"mode": "retract"}, "/continue_generation"),
    ("/pause_generation", {"mode": "in_place"}, "/continue_generation"),
    ("/pause?mode=keep", None, "/resume"),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("pauses") / "model", SPECS["text, tied"])


@pytest.fixture(scope="module", params=FORMS)
def server(request: pytest.FixtureRequest, model: Path) -> Iterator[RunningServer]:
    start = cast("Callable[[str, EngineConfig], Engine]", request.param)
    with running(start(str(model), CONFIG)) as made:
        yield made


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as made:
        yield made


def post(server: RunningServer, path: str, body: Any = None) -> dict[str, Any]:
    return ok(server.client.post(path, json=body) if body is not None else server.client.post(path))


def is_paused(server: RunningServer) -> bool:
    return bool(ok(server.client.get("/is_paused"))["is_paused"])


def begun(server: RunningServer, pool: ThreadPoolExecutor, **fields: Any) -> Future[httpx.Response]:
    """Return a long answer that has begun."""
    steps = server.engine.num_steps
    answer = pool.submit(server.chat, "Tell me about the river.", **LONG | fields)
    wait_for(lambda: server.engine.num_steps > steps + 3)
    return answer


@pytest.mark.parametrize(("pause", "body", "resume"), PAUSES)
def test_requests_wait_and_the_server_stays_healthy(
    server: RunningServer, pool: ThreadPoolExecutor, pause: str, body: Any, resume: str
) -> None:
    answer = begun(server, pool)
    post(server, pause, body)
    assert is_paused(server) and not answer.done()
    later = pool.submit(server.chat, "later", temperature=0, max_tokens=4)
    wait_for(lambda: server.engine.num_running + server.engine.num_waiting == 2)
    steps = server.engine.num_steps
    for path in ("/health", "/ready"):
        assert server.client.get(path).status_code == 200
    assert server.engine.num_steps == steps and not (answer.done() or later.done())
    with server.client.stream("POST", "/v1/chat/completions", json=chat_body(stream=True)):
        pass  # this client leaves
    wait_for(lambda: server.service.requests.num_open == 2)
    post(server, resume)
    assert not is_paused(server)
    for each in (answer, later):
        assert each.result(120).status_code == 200


def test_answers_of_both_names(server: RunningServer, pool: ThreadPoolExecutor) -> None:
    answer = begun(server, pool, max_tokens=8000)
    assert post(server, "/pause_generation")["status"] == "ok"
    assert answer.result(60).status_code == 503 and is_paused(server)
    assert post(server, "/continue_generation", {})["message"] == "generation goes on"
    assert post(server, "/continue_generation")["message"] == "generation was not paused"
    answer = begun(server, pool)
    assert post(server, "/pause?mode=wait&clear_cache=true") == {"status": "paused"}
    assert answer.result(60).status_code == 200
    assert post(server, "/pause?mode=wait&clear_cache=false") == {"status": "paused"}
    assert post(server, "/resume") == post(server, "/resume") == {"status": "resumed"}


@pytest.mark.parametrize(
    ("path", "body", "problem"),
    [
        ("/pause_generation", {"mode": "keep"}, "mode must be one of abort, retract, in_place"),
        ("/pause_generation", {"model": "x"}, "model"),
        ("/continue_generation", {"mode": "abort"}, "mode"),
        ("/pause?mode=retract", None, "mode must be one of abort, wait, keep"),
        ("/pause?clear_cache=perhaps", None, "clear_cache must be one of true"),
        ("/pause?level=1", None, "level"),
        ("/resume?mode=abort", None, "mode"),
    ],
)
def test_bad_requests_pause_nothing(
    server: RunningServer, path: str, body: Any, problem: str
) -> None:
    answer = server.client.post(path, json=body)
    assert answer.status_code == 400 and problem in answer.text
    assert not is_paused(server)


def test_the_cache_is_emptied_as_asked(server: RunningServer) -> None:
    def boundary() -> int:
        report = ok(server.chat("again " * 30, cache_report=True, max_tokens=2))["cache_report"]
        return int(report["boundary"])

    boundary()
    for query, hits in (("mode=keep", True), ("clear_cache=false", True), ("mode=wait", False)):
        post(server, f"/pause?{query}")
        post(server, "/resume")
        assert bool(boundary()) == hits, query


def test_those_who_wait_leave_threads_for_others(
    server: RunningServer, pool: ThreadPoolExecutor
) -> None:
    """A client that gave up and asks again leaves the thread behind that waits for it."""
    answer = begun(server, pool, max_tokens=8000)
    with ThreadPoolExecutor(40) as many:
        waiting = [many.submit(server.client.post, "/pause?mode=wait") for _ in range(40)]
        wait_for(lambda: sum(each.done() for each in waiting) == 38)
        refused = [each.result() for each in waiting if each.done()]
        assert all(each.status_code == 400 for each in refused)
        assert all("others wait for the requests in flight already" in e.text for e in refused)
        assert is_paused(server) and not answer.done()
        post(server, "/pause?mode=abort")
        assert sorted(each.result(60).status_code for each in waiting) == [200] * 2 + [400] * 38
    post(server, "/resume")
    assert answer.result(60).status_code == 503


def test_who_may_not(model: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("tenant: salt\n")
    config = ServerConfig(port=0, api_key=("operator",), tenant_keys=str(keys))
    with running(Engine.from_checkpoint(str(model), CONFIG), config) as made:
        for key, status in (("tenant", 403), ("operator", 200), ("nobody", 401)):
            headers = {"authorization": f"Bearer {key}"}
            for name, body, resume in PAUSES:
                for each in (name, resume):
                    sent = body if each == name else None
                    answer = made.client.post(each, json=sent, headers=headers)
                    assert answer.status_code == status, answer.text
            assert made.client.get("/is_paused", headers=headers).status_code == status
    fixed = replace(CONFIG, allow_weight_updates=False)
    with running(Engine.from_checkpoint(str(model), fixed)) as made:
        for name, body, resume in PAUSES:
            for answer in (made.client.post(name, json=body), made.client.post(resume)):
                assert answer.status_code == 400 and "--allow-weight-updates" in answer.text
        assert not is_paused(made)
