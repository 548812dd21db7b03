"""Cache marks in all APIs with a real engine: where hits end, and what is kept for how long."""

from __future__ import annotations

import base64
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
import steer_cache
from PIL import Image
from serving import RunningServer, running, wait_for

from vlm_serve.engine.engine import Engine
from vlm_serve.options.config import EngineConfig
from vlm_serve.server.config import ServerConfig

CONTROL = {"cache_control": {"type": "ephemeral"}}
BREAK = {"prompt_cache_breakpoint": {"mode": "explicit"}}
BEGINNING = "Here is what you have to know of the matter: it is an old one."
PICTURE = io.BytesIO()
Image.new("RGB", (64, 64), (200, 90, 30)).save(PICTURE, "PNG")
PNG = base64.b64encode(PICTURE.getvalue()).decode()
APIS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")


@pytest.fixture(scope="module")
def _server(checkpoint: Path) -> Iterator[RunningServer]:
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        block_size=16,
        cache_memory="96MiB",
        max_model_len=2048,
        max_num_seqs=4,
        threads=1,
    )
    engine = Engine.from_checkpoint(str(checkpoint), config)
    options = ServerConfig(port=0, idle_check=False, reasoning_parser="none")
    with running(engine, options) as server:
        yield server
    engine.close()


@pytest.fixture
def server(_server: RunningServer) -> Iterator[RunningServer]:
    """Afterwards nothing may be left of the test's requests, and no invariant violated."""
    _server.engine.flush()
    yield _server
    wait_for(lambda: _server.engine.num_running + _server.engine.num_waiting == 0)
    _server.engine.check()


def body_of(path: str, parts: list[Any], mark: int | None = None, **fields: Any) -> dict[str, Any]:
    """A request with text parts and pictures (None) and perhaps a mark on one of them."""
    chat, messages = path == APIS[0], path == APIS[2]
    content: list[dict[str, Any]] = []
    for at, part in enumerate(parts):
        url = f"data:image/png;base64,{PNG}"
        if part is not None:
            kind = "text" if chat or messages else "input_text"
            content.append({"type": kind, "text": part})
        elif chat:
            content.append({"type": "image_url", "image_url": {"url": url}})
        elif messages:
            source = {"type": "base64", "media_type": "image/png", "data": PNG}
            content.append({"type": "image", "source": source})
        else:
            content.append({"type": "input_image", "image_url": url, "detail": "auto"})
        if at == mark:
            content[-1] |= CONTROL if messages else BREAK
    said = [{"role": "user", "content": content}]
    limit = "max_output_tokens" if path == APIS[1] else "max_tokens"
    body = {"input" if path == APIS[1] else "messages": said, limit: 2, "temperature": 0}
    return body | {"cache_report": True} | fields


def ask(server: RunningServer, path: str, *args: Any, **fields: Any) -> dict[str, Any]:
    answer = server.post(path, body_of(path, *args, **fields))
    assert answer.status_code == 200, answer.text
    assert "cache_control" not in answer.headers.get("x-vlm-serve-ignored-fields", "")
    assert "breakpoint" not in answer.headers.get("x-vlm-serve-ignored-fields", "")
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("before", [[BEGINNING], [None, BEGINNING], [BEGINNING, None]])
def test_a_hit_ends_at_the_mark_also_without_it(
    server: RunningServer, path: str, before: list[Any]
) -> None:
    mark = len(before) - 1
    first = ask(server, path, [*before, " When was it?"], mark)["cache_report"]
    (kept,) = first["marks"]
    assert first["boundary"] == 0 and kept["kept_tokens"] == kept["position"] > 16
    assert kept["seconds"] == (300 if path == APIS[2] else 1800)
    again = ask(server, path, [*before, "\nWho said so?"], mark)["cache_report"]
    assert again["boundary"] == kept["position"]
    assert [each["position"] for each in again["marks"]] == [kept["position"]]
    server.engine.flush()
    ask(server, path, [*before, " When was it?"], mark)
    without = ask(server, path, [*before, "\nWho said so?"])["cache_report"]
    assert without["boundary"] == kept["position"] and "marks" not in without


def test_a_mark_moves_on(server: RunningServer) -> None:
    path, parts = APIS[2], [f"{BEGINNING} And {at} more words." for at in range(4)]
    ends = list[int]()
    for count in range(1, len(parts)):
        report = ask(server, path, parts[: count + 1], count - 1)["cache_report"]
        assert report["boundary"] >= max(ends, default=0)
        ends.append(report["marks"][0]["position"])
    assert ends == sorted(set(ends))


def test_answers_are_the_same_with_and_without_marks(server: RunningServer) -> None:
    path, parts = APIS[0], [None, BEGINNING, " Where was it, and when?"]
    said = []
    for mark in (None, 1, None, 0, None):
        answer = ask(server, path, parts, mark, max_tokens=8, logprobs=True)
        said.append(answer["choices"][0]["logprobs"]["content"])
        server.engine.flush() if mark is None else None
    assert all(each == said[0] for each in said)


@pytest.mark.parametrize("path", APIS[:2])
def test_an_explicit_mode_without_marks_uses_no_cache(server: RunningServer, path: str) -> None:
    options = {"prompt_cache_options": {"mode": "explicit"}}
    name = "prompt_tokens_details" if path == APIS[0] else "input_tokens_details"
    for _ in range(2):
        usage = ask(server, path, [BEGINNING, BEGINNING], **options)["usage"]
        assert (usage[name]["cached_tokens"], usage[name]["cache_write_tokens"]) == (0, 0)
    ask(server, path, [BEGINNING, BEGINNING])
    assert ask(server, path, [BEGINNING, BEGINNING])["usage"][name]["cached_tokens"] > 0
    marked = ask(server, path, [BEGINNING, BEGINNING], 0, **options)
    assert marked["usage"][name]["cached_tokens"] > 0


def test_a_lifetime_keeps_and_ends_on_time(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, inspector = APIS[0], server.engine._inspector
    assert ask(server, path, [BEGINNING, "a"])["cache_report"].get("marks") is None
    assert server.client.get("/v1/cache/pins").json()["total"] == 0
    for ttl, seconds in (("30m", 1800), ("12h", 43200)):
        asked = {"prompt_cache_options": {"ttl": ttl}}
        report = ask(server, path, [BEGINNING, "a"], **asked)["cache_report"]
        assert [each["seconds"] for each in report["marks"]] == [seconds]
    (pin,) = server.client.get("/v1/cache/pins").json()["pins"]
    assert pin["state"] and 43100 < pin["expires_in_seconds"] <= 43200
    clock = inspector.clock
    monkeypatch.setattr(inspector, "clock", lambda: clock() + 43201)
    server.engine.call(lambda: None)  # it wakes the engine, which has no traffic
    wait_for(lambda: server.client.get("/v1/cache/pins").json()["total"] == 0)


@pytest.mark.parametrize(
    ("path", "given", "named"),
    [
        (APIS[0], {"prompt_cache_options": {"ttl": "5m"}}, "prompt_cache_options.ttl"),
        (APIS[1], {"prompt_cache_options": {"mode": "on"}}, "prompt_cache_options.mode"),
        (APIS[2], {"cache_control": {"type": "ephemeral", "ttl": "12h"}}, "cache_control.ttl"),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    server: RunningServer, path: str, given: dict[str, Any], named: str
) -> None:
    answer = server.post(path, body_of(path, [BEGINNING], **given))
    assert answer.status_code == 400 and named in answer.text


def test_a_mark_on_tools_and_system_and_the_whole_request(server: RunningServer) -> None:
    tool = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}
    system = [{"type": "text", "text": BEGINNING, **CONTROL}]
    fields = {"tools": [tool | CONTROL], "system": system, **CONTROL}
    report = ask(server, APIS[2], ["Hello"], **fields)["cache_report"]
    places = [each["position"] for each in report["marks"]]
    assert len(places) == 3 and places == sorted(set(places))
    other = {"tools": [tool], "system": "Something else, in its place."}
    assert ask(server, APIS[2], ["Hello"], **other)["cache_report"]["boundary"] >= places[0]
    assert ask(server, APIS[2], ["Good bye"], **fields)["cache_report"]["boundary"] >= places[1]


@pytest.mark.parametrize("end", ["", "\n"])
def test_a_mark_stands_where_it_is_also_behind_others(server: RunningServer, end: str) -> None:
    """A template trims a text at its end, unless the sign of a mark stands there."""
    parts = [BEGINNING + " Be short. " + end, None, BEGINNING + end, BEGINNING + " So? " + end]
    alone = []
    for mark in range(4):
        (kept,) = ask(server, APIS[2], parts, mark)["cache_report"]["marks"]
        alone.append(kept["position"])
    assert alone == sorted(set(alone))
    body = body_of(APIS[2], parts)
    for block in body["messages"][0]["content"]:
        block |= CONTROL
    marks = server.post(APIS[2], body).json()["cache_report"]["marks"]
    assert [each["position"] for each in marks] == alone
    system = [{"type": "text", "text": BEGINNING + end, **CONTROL}]
    (first,) = ask(server, APIS[2], ["Hi"], system=system)["cache_report"]["marks"]
    turns = [
        {"role": role, "content": [{"type": "text", "text": BEGINNING + end, **CONTROL}]}
        for role in ("user", "assistant", "user")
    ]
    body |= {"system": system, "messages": turns}
    places = [
        each["position"] for each in server.post(APIS[2], body).json()["cache_report"]["marks"]
    ]
    assert len(set(places)) == 4 and places[0] == first["position"]


def test_the_example_hits_at_its_mark_with_it_and_without(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["steer_cache.py", "--base-url", f"{server.url}/v1"])
    steer_cache.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(" tokens written, 0 generated")
    kept = [line.split()[0] for line in lines if "are kept for 1800 s" in line]
    hits = [line.split(": ")[1].split()[0] for line in lines if "tokens from the cache" in line]
    assert len(kept) == 2 and hits == [kept[0]] * 2
    assert lines[-1].startswith("with a date in front: input_changed, ")
    assert int(lines[-1].split()[-3]) > int(kept[0]) // 2


@pytest.mark.parametrize(("ttl", "seconds"), [("5m", 300), ("1h", 3600)])
def test_anthropics_client_marks_streams_and_prewarms(
    server: RunningServer, ttl: Any, seconds: int
) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="none")
    mark: Any = {"type": "ephemeral", "ttl": ttl}
    asked: dict[str, Any] = {
        "model": "default",
        "system": [{"type": "text", "text": BEGINNING, "cache_control": mark}],
        "extra_body": {"cache_report": True},
    }
    said: Any = [{"role": "user", "content": "When?"}]
    asked["model"] = server.client.get("/v1/models").json()["data"][0]["id"]
    warmed = client.messages.create(max_tokens=0, messages=said, **asked)
    (kept,) = warmed.cache_report["marks"]
    assert kept["seconds"] == seconds and warmed.usage.output_tokens == 0
    created = warmed.usage.cache_creation
    assert created is not None
    by_time = {"5m": created.ephemeral_5m_input_tokens, "1h": created.ephemeral_1h_input_tokens}
    assert by_time[ttl] == sum(by_time.values()) == warmed.usage.cache_creation_input_tokens
    other: Any = mark | {"ttl": "5m"}
    said = [
        {"role": "user", "content": [{"type": "text", "text": "Where?", "cache_control": other}]}
    ]
    asked["system"][0]["text"] = "Of both lifetimes. " + BEGINNING
    both = client.messages.create(max_tokens=0, messages=said, **asked)
    created = both.usage.cache_creation
    assert created is not None
    first = both.cache_report["marks"][0]["position"] - (both.usage.cache_read_input_tokens or 0)
    hour = first if ttl == "1h" else 0
    assert created.ephemeral_1h_input_tokens == hour
    written = both.usage.cache_creation_input_tokens or 0
    assert created.ephemeral_5m_input_tokens == written - hour > 0
    asked["system"][0]["text"] = BEGINNING
    said = [{"role": "user", "content": "\nWho?"}]
    with client.messages.stream(max_tokens=2, messages=said, **asked) as stream:
        usage = stream.get_final_message().usage
    assert (usage.cache_read_input_tokens or 0) >= kept["kept_tokens"] > 16
