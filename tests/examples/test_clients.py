"""The scripts that try clients: their list is whole, and scripted answers pass a real server."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from server_process import server_process

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "clients"
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def run() -> ModuleType:
    return loaded("run", "clients_run")


def loaded(name: str, known: str) -> ModuleType:
    """A module of the folder, with those beside it."""
    spec = importlib.util.spec_from_file_location(known, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[known] = module
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    start = (sys.executable, str(ROOT / "tests" / "scripted_server.py"))
    script = str(FOLDER / "script.json")
    with server_process("demo", "--response-store", "1MiB", start=start, command=script) as server:
        yield server.url


def answer(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = httpx.post(f"{url}{path}", json=body, timeout=60, trust_env=False)
    assert response.status_code == 200, response.text
    read: dict[str, Any] = response.json()
    return read


def test_every_client_has_a_script_and_pinned_packages(run: ModuleType) -> None:
    clients = run.read_clients()
    assert clients
    for client in clients:
        assert client.script.is_file(), client.name
        if "node" in client.fields:
            lock = json.loads(
                (FOLDER / "node" / client.fields["node"] / "package-lock.json").read_text()
            )
            assert all("integrity" in entry for at, entry in lock["packages"].items() if at)
        else:
            assert re.search(r"==\d", client.fields["pip"][0]), client.name


def test_no_script_hides_a_package_of_its_name() -> None:
    """Python looks into a script's own folder first."""
    scripts = list((FOLDER / "tries").glob("*.py"))
    own = {script.stem for script in scripts} - {"common"}
    for script in scripts:
        found = re.findall(r"^ *(?:from|import) (\w+)", script.read_text(encoding="utf-8"), re.M)
        assert found, script.name
        assert not own & set(found), script.name


def test_the_demo_is_asked_by_the_clients_that_say_so(run: ModuleType) -> None:
    asked = {client.name for client in run.read_clients() if client.fields.get("demo")}
    script = (FOLDER / "tries" / "demo.py").read_text(encoding="utf-8")
    defined = re.findall(r"^def (\w+)\(\) -> None:$", script, re.M)
    assert {name.replace("-", "_") for name in asked} == set(defined)
    document = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
    table = document.split("## The demo model by itself")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| ([a-z-]+) \|", table, re.M)) - {"client"} == asked


def test_the_document_has_one_row_for_every_client_and_no_other(run: ModuleType) -> None:
    document = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
    lines = [line for line in document.splitlines() if line.startswith("| `")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    clients = {client.name: client for client in run.read_clients()}
    assert [row[0].strip("`") for row in rows] == list(clients)
    wires = {"chat", "responses", "messages", "completions"}
    for name, version, wire, tried, cached, result in rows:
        number = re.findall(r"\d+(?:\.\d+)+", clients[name.strip("`")].version)[0]
        assert number in version, name
        assert tried and result, name
        assert wire and set(wire.split(", ")) <= wires, name
        assert re.fullmatch(r"\d+\.\d % of [\d ]+|one turn|not measured", cached), name
    assert len(rows) >= 75
    assert sum(row[5] == "passes" for row in rows) >= 70


def test_small_clients_take_turns(run: ModuleType) -> None:
    clients = run.read_clients()
    small = {client.name for client in clients if client.fields.get("small")}
    assert len(small) >= 12
    turns = [[client.name for client in run.of_turn(clients, turn)] for turn in range(40)]
    assert all(len(set(turn)) == run.A_TURN and set(turn) <= small for turn in turns)
    rounds = -(-len(small) // run.A_TURN)
    for first in range(40 - rounds):
        assert {name for turn in turns[first : first + rounds] for name in turn} == small


def test_the_recorder_sees_apis_and_what_turns_reuse(url: str) -> None:
    recorder = loaded("recorder", "clients_recorder")
    long = " ".join(f"Rule {number}." for number in range(40))
    turns: list[dict[str, Any]] = [{"role": "user", "content": f"{long} Say hello."}]
    with recorder.Recorder(f"{url}/v1") as seen:
        root = seen.url.removesuffix("/v1")
        answer(root, "/v1/chat/completions", {"messages": turns})
        turns += [
            {"role": "assistant", "content": "hello to you"},
            {"role": "user", "content": "?"},
        ]
        body = {"messages": turns, "stream": True, "max_tokens": 4}
        with httpx.stream(
            "POST", f"{root}/v1/chat/completions", json=body, timeout=60, trust_env=False
        ) as stream:
            assert b"".join(stream.iter_bytes()).endswith(b"[DONE]\n\n")
        marked = {"type": "text", "text": long, "cache_control": {"type": "ephemeral"}}
        asked = {
            "model": "demo",
            "max_tokens": 4,
            "messages": [{"role": "user", "content": [marked]}],
        }
        answer(root, "/v1/messages", asked)
        missing = httpx.get(f"{root}/nothing", timeout=60, trust_env=False)
        assert missing.status_code == 404
    assert seen.wires == ["chat", "messages"]
    assert [turn.wire for turn in seen.turns] == ["chat", "chat", "messages"]
    first, second, _ = seen.turns
    assert first.prompt - 16 < second.cached < second.prompt
    share, _, known = seen.second_turn().partition(" % of ")
    assert float(share) > 90 and int(known) == first.prompt + first.answer


def test_a_script_answers_by_the_last_turn(url: str) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Call weather for Rome"}]
    body = {"messages": messages, "tools": [TOOL]}
    (choice,) = answer(url, "/v1/chat/completions", body)["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Rome"}
    assert choice["message"]["content"] == "I look."
    result = {"role": "tool", "tool_call_id": call["id"], "content": "sun in Rome"}
    messages += [choice["message"], result]
    second = answer(url, "/v1/chat/completions", body)
    assert second["choices"][0]["message"]["content"] == "There is sun in Rome."
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_without_an_entry_or_against_a_grammar_the_model_answers(url: str) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    for text in ("Say hello.", "What is this?"):
        body = {"messages": [{"role": "user", "content": text}], "response_format": form}
        made = answer(url, "/v1/chat/completions", body)
        assert json.loads(made["choices"][0]["message"]["content"]) == {"n": 7}
