"""`vlm-serve deploy` with real replicas: what clients get, and what is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import httpx
import pytest
from other_user import as_nobody, mode, needs_root
from process_tree import opened_by, processes_below, replica_pids
from server_process import ServerProcess, server_process
from serving import wait_for

from vlm_serve.deploy.cluster import LONGEST, PREFIX

pytestmark = pytest.mark.ray

SMALL = ("--device", "cpu", "--cache-memory", "32MiB", "--max-model-len", "2048", "--threads", "1")
SECONDS = 120.0
KEY, TENANTS = "open", {"first-key": "first", "second-key": "second"}
TEXT = "The prefix that all of these requests share is a little longer than one block of it. " * 4


def client_of(url: str, key: str | None = None) -> httpx.Client:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return httpx.Client(base_url=url, timeout=SECONDS, trust_env=False, headers=headers)


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    path.write_text("".join(f"{key}: {salt}\n" for key, salt in TENANTS.items()))
    return path


@pytest.fixture(scope="module")
def server(keys_file: Path) -> Iterator[ServerProcess]:
    """What it logs is shown if it does not start."""
    log = keys_file.with_name("log")
    try:
        with log.open("w") as written:
            yield from deployed(keys_file, written)
    except AssertionError as error:
        raise AssertionError(log.read_text()[-4000:]) from error


def log_of(server: ServerProcess) -> str:
    """What the gateway has logged."""
    return Path(os.readlink(f"/proc/{server.process.pid}/fd/2")).read_text()


def deployed(keys_file: Path, log: IO[str]) -> Iterator[ServerProcess]:
    # A busy machine may keep a process waiting; dead ones are noticed without it.
    patience = ("--silence-timeout", "60")
    arguments = (
        "demo",
        *SMALL,
        *patience,
        "--shutdown-timeout",
        "1",
        "--replicas",
        "2",
        "--speculative",  # What becomes of drafts, and what is said at once, is each replica's own.
        "off",
        "--api-key",
        KEY,
    )
    with server_process(
        *arguments, "--tenant-keys", str(keys_file), command="deploy", log=log
    ) as running:
        yield running


@pytest.fixture
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    with client_of(server.url, KEY) as client:
        wait_for(lambda: len(replica_names(client)) == 2, SECONDS)
        yield client


def replica_names(client: httpx.Client) -> list[str]:
    answer = client.get("/v1/cache/stats")
    return [each["replica"] for each in answer.json().get("data", ())]


def question(text: str = TEXT, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "max_tokens": 12, "temperature": 0, "seed": 1, **fields}


def streamed(client: httpx.Client, body: dict[str, Any]) -> list[str]:
    with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        return [line for line in answer.iter_lines() if line]


def running(client: httpx.Client) -> int:
    load = client.get("/load").json()
    return int(load["num_requests_running"] + load["num_requests_waiting"] + load["server_load"])


def test_answers_equal_those_of_one_process(client: httpx.Client) -> None:
    with (
        server_process("demo", *SMALL) as alone,
        client_of(alone.url) as other,
    ):
        for path, body in (
            ("/v1/chat/completions", question(logprobs=True, top_logprobs=2)),
            ("/v1/completions", {"prompt": "One, two,", "max_tokens": 8, "temperature": 0}),
            # Several replicas keep no responses.
            (
                "/v1/responses",
                {"input": "Say it.", "max_output_tokens": 8, "temperature": 0, "store": False},
            ),
            ("/v1/messages", {**question(), "model": "demo", "max_tokens": 8}),
            ("/tokenize", {"prompt": "One, two, three"}),
        ):
            body.pop("seed", None) if path == "/v1/messages" else None
            got, wanted = client.post(path, json=body), other.post(path, json=body)
            assert got.status_code == wanted.status_code == 200, (path, got.text, wanted.text)
            assert undated(got.json()) == undated(wanted.json()), path
        models = [each.get("/v1/models").json()["data"][0] for each in (client, other)]
        assert undated(models[0]) == undated(models[1])
        bad = {"messages": "nothing"}
        refusals = [each.post("/v1/chat/completions", json=bad) for each in (client, other)]
        assert refusals[0].status_code == refusals[1].status_code == 400
        assert refusals[0].json() == refusals[1].json()


def undated(value: Any) -> Any:
    """Without what differs from one time to another, and with what is cached."""
    if isinstance(value, dict):
        hidden = {"id", "created", "created_at", "completed_at", "cache_report"}
        hidden |= {"cached_tokens", "cache_read_input_tokens", "input_tokens"}
        hidden |= {"cache_write_tokens", "cache_creation_input_tokens", "cache_creation"}
        return {name: undated(each) for name, each in value.items() if name not in hidden}
    if isinstance(value, list):
        return [undated(each) for each in value]
    return value


def test_streams_come_piece_by_piece(client: httpx.Client) -> None:
    lines = streamed(client, question(max_tokens=8, ignore_eos=True))
    assert lines[-1] == "data: [DONE]" and len(lines) > 6


def test_every_response_has_one_id(client: httpx.Client) -> None:
    answer = client.post("/v1/chat/completions", json=question(), headers={"x-request-id": "mine"})
    assert answer.headers.get_list("x-request-id") == ["mine"]


def test_metrics_say_of_which_replica_they_are(client: httpx.Client) -> None:
    client.post("/v1/chat/completions", json=question())
    names, text = replica_names(client), client.get("/metrics").text
    assert len(set(names)) == 2
    for name in names:
        assert f'vlm_serve:generation_tokens_total{{replica="{name}",model_name="demo"}}' in text
    assert "vlm_serve:replicas 2.0" in text
    assert text.count("# TYPE vlm_serve:generation_tokens_total counter") == 1


def test_one_replica_can_be_looked_into(client: httpx.Client) -> None:
    for name in replica_names(client):
        tree = client.get("/v1/cache/tree", params={"replica": name, "limit": 1})
        assert tree.status_code == 200 and tree.json()["object"] == "cache.tree"
        with client.stream("GET", "/v1/cache/events", params={"replica": name}) as events:
            assert next(events.iter_lines()).startswith("id: ")
    unknown = client.get("/v1/cache/tree", params={"replica": "nobody"})
    assert unknown.status_code == 404
    assert unknown.json()["error"]["param"] == "replica"


def test_a_flush_reaches_all_replicas(client: httpx.Client) -> None:
    for _ in range(4):
        client.post("/v1/chat/completions", json=question())
    assert client.post("/v1/cache/flush", json={}).status_code == 200
    for name in replica_names(client):
        assert client.get("/v1/cache/tree", params={"replica": name}).json()["total"] == 0


def test_pins_of_all_replicas_are_listed_and_lifted(client: httpx.Client) -> None:
    for _ in range(4):
        client.post("/v1/chat/completions", json=question())
    keys = set()
    for name in replica_names(client):
        tree = client.get("/v1/cache/tree", params={"replica": name}).json()["nodes"]
        for node in tree[:1]:
            body = {"key": node["key"], "ttl_seconds": 600}
            pinned = client.post("/v1/cache/pin", json=body, params={"replica": name})
            assert pinned.status_code == 200, pinned.text
            keys.add(pinned.json()["key"])
    assert keys
    pages = client.get("/v1/cache/pins").json()["data"]
    assert {each["replica"] for each in pages} == set(replica_names(client))
    assert {each["key"] for page in pages for each in page["pins"]} == keys
    for key in keys:
        assert client.delete(f"/v1/cache/pins/{key}").json()["lifted"] >= 1
        assert client.delete(f"/v1/cache/pins/{key}").status_code == 404
    assert client.delete("/v1/cache/pins").json()["lifted"] == 0


def test_tenants_do_not_see_each_others_cache(server: ServerProcess, client: httpx.Client) -> None:
    client.post("/v1/cache/flush", json={})
    totals = {}
    for key in TENANTS:
        with client_of(server.url, key) as tenant:
            if key == "first-key":
                for _ in range(4):
                    tenant.post("/v1/chat/completions", json=question())
            totals[key] = sum(
                tenant.get("/v1/cache/tree", params={"replica": name}).json()["total"]
                for name in replica_names(client)
            )
            assert tenant.get("/v1/cache/stats").status_code == 403
            assert tenant.post("/v1/cache/flush", json={}).status_code == 403
    assert totals["first-key"] > 0 and totals["second-key"] == 0


def test_no_client_can_give_itself_a_salt(server: ServerProcess, client: httpx.Client) -> None:
    """What the gate has found out travels beside the headers, never as one of them."""
    client.post("/v1/cache/flush", json={})
    with client_of(server.url, "first-key") as tenant:
        for _ in range(4):
            tenant.post("/v1/chat/completions", json=question())
    names = ("tenant_salt", "tenant-salt", "state", "vlm_serve.salt", "x-tenant-salt")
    headers = dict.fromkeys(names, "first")
    probe = {"messages": question()["messages"]}
    for name in replica_names(client):
        asked = client.post(
            "/v1/cache/probe", json=probe, params={"replica": name}, headers=headers
        )
        assert asked.status_code == 200, asked.text
        assert asked.json()["boundary"] == 0
    salted = client.post("/v1/chat/completions", json=question(cache_salt="tenant:first"))
    assert salted.status_code == 400


def test_without_a_key_nobody_is_let_in(server: ServerProcess) -> None:
    with client_of(server.url) as nobody:
        assert nobody.post("/v1/chat/completions", json=question()).status_code == 401
        assert nobody.get("/health").status_code == 200


def test_a_body_that_is_too_large_stops_at_the_front(client: httpx.Client) -> None:
    answer = client.post("/v1/chat/completions", content=b" " * ((64 << 20) + 1))
    assert answer.status_code in (413, 415)


def test_a_client_that_leaves_ends_its_request(client: httpx.Client, server: ServerProcess) -> None:
    async def leave() -> None:
        limits = httpx.Limits(max_connections=None)
        headers = {"authorization": f"Bearer {KEY}"}
        body = question(max_tokens=1500, ignore_eos=True, stream=True)
        async with httpx.AsyncClient(
            base_url=server.url, timeout=SECONDS, trust_env=False, headers=headers, limits=limits
        ) as many:

            async def one() -> None:
                async with many.stream("POST", "/v1/chat/completions", json=body) as answer:
                    assert answer.status_code == 200

            await asyncio.gather(*(one() for _ in range(40)))

    asyncio.run(leave())
    wait_for(lambda: running(client) == 0, SECONDS)


def test_replicas_are_no_less_important_than_the_front(server: ServerProcess) -> None:
    own = os.getpriority(os.PRIO_PROCESS, server.process.pid)
    pids = replica_pids(server.process.pid)
    assert [os.getpriority(os.PRIO_PROCESS, pid) for pid in pids] == [own] * 2


def listening(pids: Iterable[int]) -> list[str]:
    """Local addresses of listening sockets, in the form of /proc."""
    inodes: set[str] = set()
    for pid in pids:
        inodes |= {name[8:-1] for name in opened_by(pid) if name.startswith("socket:[")}
    found = []
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes and (fields[3] == "0A" or table.startswith("udp")):
                found.append(fields[1])
    return found


def listening_ports(pids: Iterable[int]) -> set[int]:
    return {int(address.split(":")[1], 16) for address in listening(pids)}


def test_only_our_port_is_open(server: ServerProcess) -> None:
    loopback = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")
    found = listening([server.process.pid, *processes_below(server.process.pid)])
    assert len(found) > 3
    assert [each for each in found if each.split(":")[0] not in loopback] == []


def test_rays_metrics_answer_nobody(server: ServerProcess) -> None:
    """None of the ports answers without the token, as Ray's own metrics would."""
    own = int(server.url.rpartition(":")[2])
    ports = listening_ports(processes_below(server.process.pid)) - {own}
    assert len(ports) > 3
    for port in ports:
        with contextlib.suppress(httpx.TransportError):  # No HTTP, or HTTP/2 alone.
            answer = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=5, trust_env=False)
            assert answer.status_code in (401, 403), (port, answer.text[:200])


def test_user_signals_without_a_meaning_change_nothing(
    server: ServerProcess, client: httpx.Client
) -> None:
    server.process.send_signal(signal.SIGUSR2)
    assert client.post("/v1/chat/completions", json=question()).status_code == 200
    assert server.process.poll() is None


@pytest.fixture
def folder(server: ServerProcess) -> Path:
    """The one for Ray's files, which the gateway holds open."""
    (found,) = {
        path
        for each in opened_by(server.process.pid)
        if (path := Path(each)).name.startswith(PREFIX)
    }
    return found


def test_rays_files_have_a_folder_that_others_cannot_enter(folder: Path) -> None:
    assert mode(folder) == 0o700
    sockets = [each for each in folder.rglob("*") if each.is_socket()]
    assert {each.name for each in sockets} >= {"plasma_store", "raylet"}
    # With a process's number of seven digits, as Linux may have.
    assert max(len(str(each)) for each in sockets) <= len(str(folder)) + 107 - LONGEST
    assert len(str(folder)) <= LONGEST


@needs_root
def test_nobody_can_change_rays_files(folder: Path) -> None:
    ray = folder / "r"
    (session,) = (each for each in ray.glob("session_2*") if not each.is_symlink())
    for script, path in (
        ('ls "$1"', ray),
        ('touch "$1/planted"', ray),
        ('touch "$1/logs/planted"', session),
        ('mv "$1/sockets/plasma_store" "$1/sockets/gone"', session),
        ('cat "$1"/logs/*.log', session),
    ):
        assert as_nobody(script, path).returncode != 0, script
    assert (session / "sockets" / "plasma_store").exists()


def test_a_dead_idle_replica_is_not_missed(client: httpx.Client, server: ServerProcess) -> None:
    before = set(replica_names(client))
    os.kill(replica_pids(server.process.pid)[0], signal.SIGKILL)
    for _ in range(6):
        answer = client.post("/v1/chat/completions", json=question())
        assert answer.status_code == 200, answer.text
    wait_for(lambda: len(set(replica_names(client)) - before) == 1, SECONDS)  # Serve's new one
    # The controller asks each replica for these every two seconds; it has noticed the death by now.
    log = log_of(server)
    assert "crashed, marking it unhealthy" in log
    assert "get_routing_stats" not in log, "a traceback of Serve's own"


def test_answers_whose_replica_dies_are_whole(client: httpx.Client, server: ServerProcess) -> None:
    """Streams on both replicas, one of which is killed: every one of them has what it had when
    nothing happened, choices, log-probabilities, calls and usage included."""
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    bodies = [
        question(ignore_eos=True, temperature=1),
        question(ignore_eos=True, n=2, temperature=1),
        question(ignore_eos=True, logprobs=True, top_logprobs=2),
        question(tools=[tool], tool_choice="required"),
    ]
    bodies = [
        {**body, "max_tokens": 300, "seed": number, "stream_options": {"include_usage": True}}
        for number, body in enumerate(bodies)
    ]
    undisturbed = [said(streamed(client, body)) for body in bodies]
    begun = threading.Barrier(len(bodies) + 1, timeout=SECONDS)

    def one(body: dict[str, Any]) -> list[str]:
        lines: list[str] = []
        asked = {**body, "stream": True}
        with (
            client_of(server.url, KEY) as own,
            own.stream("POST", "/v1/chat/completions", json=asked) as answer,
        ):
            for line in answer.iter_lines():
                if not lines:
                    begun.wait()
                lines += [line] if line else []
        return lines

    with ThreadPoolExecutor(len(bodies)) as pool:
        streams = [pool.submit(one, body) for body in bodies]
        begun.wait()
        os.kill(replica_pids(server.process.pid)[0], signal.SIGKILL)
        answers = [said(stream.result(SECONDS)) for stream in streams]
    assert answers == undisturbed
    assert client.post("/v1/chat/completions", json=question()).status_code == 200
    wait_for(lambda: len(replica_names(client)) == 2, SECONDS)


def said(lines: list[str]) -> list[Any]:
    """What a stream said, without what differs from one time to another."""
    assert lines[-1] == "data: [DONE]", lines[-1]
    return [undated(json.loads(line.removeprefix("data: "))) for line in lines[:-1]]


def test_new_replicas_take_over_what_runs(client: httpx.Client, server: ServerProcess) -> None:
    old = set(replica_names(client))
    server.process.send_signal(signal.SIGUSR1)
    body = question(max_tokens=400, ignore_eos=True)
    undisturbed = said(streamed(client, body))
    deadline = time.monotonic() + SECONDS
    while old & set(now := replica_names(client)) or len(now) < 2:
        assert said(streamed(client, body)) == undisturbed
        assert time.monotonic() < deadline


def test_a_signal_ends_all_that_was_started(server: ServerProcess) -> None:
    below = processes_below(server.process.pid)
    assert any("raylet" in line for line in below.values())
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(SECONDS) == 0
    deadline = time.monotonic() + SECONDS
    while left := [pid for pid in below if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, {pid: below[pid] for pid in left}
        time.sleep(0.1)
