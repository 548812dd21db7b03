"""`vlm-serve deploy` with real replicas whose weights change, that pause and sleep: all or none."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import httpx
import pytest
from families import SPECS
from make_checkpoint import make_checkpoint
from process_tree import replica_pids
from safetensors.torch import load_file, save, save_file
from server_process import ServerProcess, server_process
from serving import wait_for

pytestmark = pytest.mark.ray

SECONDS = 120.0
SMALL = (
    *("--device", "cpu", "--dtype", "float32", "--cache-memory", "16MiB", "--threads", "1"),
    *("--speculative", "off", "--silence-timeout", "60", "--shutdown-timeout", "1"),
)
UPDATE, FROM_TENSOR = "/update_weights_from_disk", "/update_weights_from_tensor"
KEY, TENANT = "open", "tenant-key"
SPEC = SPECS["text, tied"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, and two others that may be taken; one folder that holds too little."""
    root = tmp_path_factory.mktemp("orders")
    make_checkpoint(root / "model", SPEC)
    for number, name in enumerate(("second", "third")):
        make_checkpoint(root / "allowed" / name, replace(SPEC, seed=105 + number))
        for file in (root / "model").iterdir():
            if file.suffix != ".safetensors":
                shutil.copy(file, root / "allowed" / name)
    shutil.copytree(root / "model", root / "allowed" / "first")
    short = root / "allowed" / "short"
    shutil.copytree(root / "model", short)
    (file,) = short.glob("*.safetensors")
    tensors = load_file(file)
    del tensors[sorted(tensors)[-1]]
    save_file(tensors, file)
    (root / "keys.yaml").write_text(f"{TENANT}: mine\n")
    return root


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[ServerProcess]:
    options = ("--allow-weight-updates", "--allowed-weights-path", str(place / "allowed"))
    keys = ("--api-key", KEY, "--tenant-keys", str(place / "keys.yaml"))
    with (
        (place / "log").open("w") as log,
        server_process(
            str(place / "model"), *SMALL, *options, *keys, command="deploy", log=log
        ) as made,
    ):
        yield made


def client_of(server: ServerProcess, key: str = KEY) -> httpx.Client:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.Client(base_url=server.url, timeout=SECONDS, trust_env=False, headers=headers)


def names(client: httpx.Client) -> list[str]:
    return [each["replica"] for each in client.get("/v1/cache/stats").json().get("data", ())]


@pytest.fixture
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    """Return a client of a server whose replicas both serve."""
    with client_of(server) as client:
        wait_for(lambda: len(names(client)) == 2, SECONDS)
        yield client


def chat(text: str = "Tell me about the river.", **fields: Any) -> dict[str, Any]:
    body = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "cache_report": True, **fields}
    return {"messages": [{"role": "user", "content": text}], **body}


def weights_now(client: httpx.Client, asked: int = 8) -> set[str]:
    """The weights of some answers at a time, which both replicas give."""

    def one(number: int) -> str:
        answer = client.post("/v1/chat/completions", json=chat(f"{number} boats"))
        assert answer.status_code == 200, answer.text
        return str(answer.json()["cache_report"]["weights"])

    with ThreadPoolExecutor(asked) as pool:
        return set(pool.map(one, range(asked)))


def update(client: httpx.Client, name: str) -> str:
    answer = client.post(UPDATE, json={"model_path": name, "weight_version": name})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["weights"])


def test_all_replicas_take_other_weights_and_go_back(client: httpx.Client) -> None:
    (first,) = weights_now(client)
    second = update(client, "second")
    assert second != first and weights_now(client) == {second}
    assert client.get("/model_info").json()["weight_version"] == "second"
    assert update(client, "first") == first and weights_now(client) == {first}


def test_what_one_refuses_changes_nowhere(client: httpx.Client) -> None:
    before = weights_now(client)
    refused = client.post(UPDATE, json={"model_path": "short"})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("replica ")
    assert weights_now(client) == before and len(names(client)) == 2


def test_only_the_operator_gives_orders(server: ServerProcess, client: httpx.Client) -> None:
    with client_of(server, TENANT) as tenant:
        for path in (UPDATE, "/pause", "/sleep", "/continue_generation", "/wake_up"):
            refused = tenant.post(path, json={"model_path": "second"})
            assert refused.status_code == 403, path
    ordered = {"vlm_serve.order": "x", "vlm_serve.ready": "x", "order": "x"}
    assert client.post("/is_paused", headers=ordered).status_code == 405
    assert not client.get("/is_paused").json()["is_paused"]


def test_a_replica_that_dies_comes_back_with_the_weights_of_now(
    server: ServerProcess, client: httpx.Client
) -> None:
    """The replica starts with those of the command line, and serves once it has these."""
    second, before = update(client, "second"), set(names(client))
    assert client.post("/pause", params={"mode": "keep"}).status_code == 200
    os.kill(replica_pids(server.process.pid)[0], signal.SIGKILL)
    wait_for(lambda: len(set(names(client)) - before) == 1, SECONDS)
    assert client.get("/is_paused").json() == {"is_paused": True}
    assert client.post("/resume").status_code == 200
    assert weights_now(client) == {second}


def test_a_replica_killed_while_it_reads_leaves_the_others_unchanged(
    server: ServerProcess, client: httpx.Client
) -> None:
    """Stopped, so that it has surely not read everything when it dies."""
    (before,) = weights_now(client)
    victim = replica_pids(server.process.pid)[0]
    os.kill(victim, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        updating = pool.submit(client.post, UPDATE, json={"model_path": "third"})
        time.sleep(2)
        assert not updating.done(), "nobody swaps before all have read"
        with client_of(server) as other:
            assert other.get("/load").status_code == 200
        os.kill(victim, signal.SIGKILL)
        answer = updating.result(SECONDS)
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "replica_lost"
    assert weights_now(client) == {before}
    wait_for(lambda: len(names(client)) == 2, SECONDS)
    assert weights_now(client) == {before}


def test_updates_while_answers_run(client: httpx.Client, server: ServerProcess) -> None:
    """Every answer names its weights, and where others took over."""
    ended = threading.Event()

    def one(number: int) -> list[dict[str, Any]]:
        reports = []
        with client_of(server) as own:
            while not ended.is_set():
                answer = own.post("/v1/chat/completions", json=chat(f"{number}", max_tokens=60))
                assert answer.status_code == 200, answer.text
                reports.append(answer.json()["cache_report"])
        return reports

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(one, number) for number in range(4)]
        digests = [update(client, name) for name in ("third", "second", "first", "second")]
        ended.set()
        told = [report for each in asking for report in each.result(SECONDS)]
    known = {report["weights"] for report in told}
    known |= {change["weights"] for report in told for change in report.get("weight_changes", ())}
    assert known <= set(digests) and weights_now(client) == {digests[-1]}


def test_all_pause_and_go_on(client: httpx.Client, server: ServerProcess) -> None:
    assert client.post("/pause_generation", json={"mode": "retract"}).status_code == 200
    assert client.get("/is_paused").json() == {"is_paused": True}
    assert client.get("/health").status_code == client.get("/ready").status_code == 200
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(client.post, "/v1/chat/completions", json=chat()) for _ in range(4)]
        time.sleep(1)
        assert not any(each.done() for each in waiting)
        assert client.post("/continue_generation").json()["message"] == "generation goes on"
        assert {each.result(SECONDS).status_code for each in waiting} == {200}
    assert client.post("/pause", params={"mode": "sideways"}).status_code == 400
    assert client.get("/is_paused").json() == {"is_paused": False}


def test_going_on_ends_a_pause_that_waits(client: httpx.Client, server: ServerProcess) -> None:
    def wait() -> httpx.Response:
        with client_of(server) as own:
            return own.post("/pause", params={"mode": "wait"})

    with ThreadPoolExecutor(2) as pool, client_of(server) as own:
        body = chat(max_tokens=8000, n=8, stream=True)
        with own.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = answer.iter_lines()
            assert all("error" not in next(lines) for _ in range(40)), "it runs"
            pausing = pool.submit(wait)
            wait_for(lambda: client.get("/is_paused").json()["is_paused"], SECONDS)
            assert not pausing.done(), pausing.result().text
            assert client.post("/resume").status_code == 200
        assert pausing.result(SECONDS).status_code == 400
    assert client.get("/is_paused").json() == {"is_paused": False}
    weights_now(client)


def test_all_sleep_and_wake(client: httpx.Client) -> None:
    slept = client.post("/release_memory_occupation")
    assert slept.json() == {"is_sleeping": True, "tags": ["kv_cache", "weights"]}, slept.text
    assert client.get("/is_sleeping").json() == {"is_sleeping": True}
    assert client.get("/ready").status_code == 503 and client.get("/health").status_code == 200
    assert client.post("/v1/chat/completions", json=chat()).json()["error"]["code"] == "asleep"
    third = update(client, "third")
    assert client.post("/wake_up").json() == {"is_sleeping": False, "tags": []}
    assert client.get("/ready").status_code == 200
    assert weights_now(client) == {third}


def test_a_replica_that_cannot_have_the_weights_stays_out(
    server: ServerProcess, client: httpx.Client, place: Path
) -> None:
    """The weights came from memory; a folder has them for all again. The others serve meanwhile."""
    (file,) = (place / "allowed" / "first").glob("*.safetensors")
    name, norm = next((n, t) for n, t in load_file(file).items() if n.endswith("norm.weight"))
    content = save({name: norm * 1.25})
    memory = SharedMemory(create=True, size=len(content))
    try:
        assert memory.buf is not None
        memory.buf[: len(content)] = content
        answer = client.post(FROM_TENSOR, json={"shared_memory": memory.name})
    finally:
        memory.close()
        memory.unlink()
    assert answer.status_code == 200, answer.text
    digest = answer.json()["weights"]
    assert weights_now(client) == {digest}
    os.kill(replica_pids(server.process.pid)[0], signal.SIGKILL)
    wait_for(lambda: "came from memory" in client.get("/health").text, SECONDS)
    health = client.get("/health")
    assert health.status_code == 200 and health.json()["status"] == "degraded"
    assert weights_now(client) == {digest} and len(names(client)) == 1
    assert "does not serve: the weights came from memory" in (place / "log").read_text()
    second = update(client, "second")
    wait_for(lambda: len(names(client)) == 2, SECONDS)
    assert weights_now(client) == {second}
    assert client.get("/health").json() == {"status": "ok"}


def test_a_moved_answer_does_not_go_on_under_other_weights(
    server: ServerProcess, client: httpx.Client
) -> None:
    update(client, "third")
    body = chat(max_tokens=8000, n=8, stream=True)
    with (
        client_of(server) as own,
        own.stream("POST", "/v1/chat/completions", json=body) as answer,
    ):
        lines = answer.iter_lines()
        begun = [next(lines) for _ in range(6)]
        assert begun
        update(client, "first")
        for pid in replica_pids(server.process.pid):
            os.kill(pid, signal.SIGKILL)
        told = [line for line in lines if line.startswith("data: {")]
    assert json.loads(told[-1].removeprefix("data: "))["error"]["code"] == "weights_changed"
    wait_for(lambda: len(names(client)) == 2, SECONDS)


def test_replicas_sleep_by_themselves(place: Path) -> None:
    """Replicas serve at once where no orders are allowed, and fall asleep alone."""
    options = (*SMALL, "--idle-sleep", "0.5")
    with (
        server_process(str(place / "model"), *options, command="deploy") as made,
        client_of(made) as client,
    ):
        for _ in range(2):
            wait_for(lambda: client.get("/is_sleeping").json() == {"is_sleeping": True}, SECONDS)
            assert client.get("/ready").status_code == 200
            answer = client.post("/v1/chat/completions", json=chat())
            assert answer.status_code == 200, answer.text
        for path in ("/pause", "/sleep", UPDATE):
            assert "--allow-weight-updates" in client.post(path).text
