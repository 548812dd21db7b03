"""A server sleeps and wakes over HTTP, by the names of both vendors, or by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

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
    host_cache_memory="16MiB",
    stall_timeout=0.001,
    allow_weight_updates=True,
)
Start = Callable[[str, EngineConfig], Engine]
SLEEPS: tuple[tuple[str, Any, list[str], str, Any], ...] = (
    ("/sleep", None, ["kv_cache"], "/wake_up", None),
    ("/sleep?level=2&mode=keep", None, ["kv_cache", "weights"], "/wake_up", None),
    ("/release_memory_occupation", None, ["kv_cache", "weights"], "/resume_memory_occupation", {}),
    (
        "/release_memory_occupation",
        {"tags": ["weights"]},
        ["weights"],
        "/resume_memory_occupation",
        {"tags": ["weights"]},
    ),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("sleep") / "model", SPECS["text, tied"])


@pytest.fixture(scope="module", params=FORMS)
def start(request: pytest.FixtureRequest) -> Start:
    return cast("Start", request.param)


@pytest.fixture(scope="module")
def server(start: Start, model: Path) -> Iterator[RunningServer]:
    with running(start(str(model), CONFIG)) as made:
        yield made


def post(server: RunningServer, path: str, body: Any = None) -> dict[str, Any]:
    return ok(server.client.post(path, json=body))


def is_sleeping(server: RunningServer) -> bool:
    return bool(ok(server.client.get("/is_sleeping"))["is_sleeping"])


def ask(server: RunningServer) -> tuple[Any, int]:
    body = ok(server.chat("again " * 30, cache_report=True, max_tokens=8, temperature=0))
    return body["choices"][0]["message"], body["cache_report"]["boundary"]


@pytest.mark.parametrize(("sleep", "body", "tags", "wake", "wanted"), SLEEPS)
def test_it_refuses_requests_and_answers_again(
    server: RunningServer, sleep: str, body: Any, tags: list[str], wake: str, wanted: Any
) -> None:
    first, _ = ask(server)
    assert not is_sleeping(server)
    assert post(server, sleep, body) == {"is_sleeping": True, "tags": tags}
    assert is_sleeping(server)
    refused = server.chat("hello")
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "asleep"
    assert "the engine is asleep: wake it up first" in refused.text
    assert refused.headers["retry-after"]
    assert server.client.get("/health").status_code == 200
    assert server.client.get("/ready").status_code == 503
    awake = {"is_sleeping": False, "tags": []}
    assert post(server, wake, wanted) == awake == post(server, wake, wanted)
    again, boundary = ask(server)
    assert again == first and boundary > 0 and not is_sleeping(server)
    assert server.client.get("/ready").status_code == 200


def test_parts_wake_one_by_one(server: RunningServer) -> None:
    first, _ = ask(server)
    post(server, "/sleep?level=2")
    assert post(server, "/wake_up?tags=weights") == {"is_sleeping": True, "tags": ["kv_cache"]}
    assert server.chat("hello").status_code == 503
    assert post(server, "/wake_up?tags=kv_cache&tags=weights")["tags"] == []
    assert ask(server)[0] == first


def test_requests_in_flight_wait(server: RunningServer) -> None:
    steps = server.engine.num_steps
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(server.chat, "river", temperature=0, max_tokens=300, ignore_eos=True)
        wait_for(lambda: server.engine.num_steps > steps + 3)
        post(server, "/release_memory_occupation")
        assert not answer.done() and server.client.get("/health").status_code == 200
        post(server, "/resume_memory_occupation")
        assert answer.result(120).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "problem"),
    [
        ("/sleep?level=3", None, "level must be one of 1, 2"),
        ("/sleep?mode=in_place", None, "mode must be one of abort, wait, keep"),
        ("/sleep?tags=weights", None, "tags"),
        ("/wake_up?tags=cuda_graph", None, "tags must be some of weights, kv_cache"),
        ("/wake_up?level=1", None, "level"),
        ("/release_memory_occupation", {"tags": ["cuda_graph"]}, "tags must be some of"),
        ("/release_memory_occupation", {"tags": []}, "tags must be some of"),
        ("/resume_memory_occupation", {"tags": "weights"}, "tags"),
    ],
)
def test_bad_requests_change_nothing(
    server: RunningServer, path: str, body: Any, problem: str
) -> None:
    answer = server.client.post(path, json=body)
    assert answer.status_code == 400 and problem in answer.text
    assert not is_sleeping(server)


def test_who_may_not(model: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("tenant: salt\n")
    config = ServerConfig(port=0, api_key=("operator",), tenant_keys=str(keys))
    with running(Engine.from_checkpoint(str(model), CONFIG), config) as made:
        for key, status in (("tenant", 403), ("operator", 200), ("nobody", 401)):
            headers = {"authorization": f"Bearer {key}"}
            for path, _, _, wake, _ in SLEEPS:
                for each in (path, wake):
                    assert made.client.post(each, headers=headers).status_code == status
            assert made.client.get("/is_sleeping", headers=headers).status_code == status
    fixed = replace(CONFIG, allow_weight_updates=False)
    with running(Engine.from_checkpoint(str(model), fixed)) as made:
        for path, body, _, wake, _ in SLEEPS:
            for answer in (made.client.post(path, json=body), made.client.post(wake)):
                assert answer.status_code == 400 and "--allow-weight-updates" in answer.text
        assert not is_sleeping(made)


def test_it_sleeps_by_itself(start: Start, model: Path) -> None:
    fixed = replace(CONFIG, allow_weight_updates=False, idle_sleep=0.2)
    with running(start(str(model), fixed)) as made:
        first, _ = ask(made)
        for _ in range(2):
            wait_for(lambda: is_sleeping(made))
            assert made.client.get("/ready").status_code == 200
            again, boundary = ask(made)
            assert again == first and boundary > 0
        with made.client.stream("POST", "/v1/chat/completions", json=chat_body(stream=True)) as now:
            assert now.status_code == 200
