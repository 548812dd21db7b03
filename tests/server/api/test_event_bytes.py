"""Streams are byte for byte those that clients have always got, however their events are made.

`tests/data/event_streams.json` was written by the code before events had frames, but a custom call
has no function beside it. `python tests/server/api/test_event_bytes.py` writes it anew.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import re
from pathlib import Path
from typing import Any, cast

import pytest
from attempts import Asked, Replica, bytes_of
from fake_engine import FakeEngine
from serving import running

from vlm_serve.engine.engine import Engine
from vlm_serve.engine.remote.messages import DeltaPacker, DeltaReader
from vlm_serve.engine.requests.outputs import Delta
from vlm_serve.preprocess.text.tokenizer import Tokenizer
from vlm_serve.server.config import ServerConfig
from vlm_serve.server.failover.attempt import Attempt
from vlm_serve.server.http.connections import ChunkedBody

RECORDED = Path(__file__).parents[2] / "data" / "event_streams.json"
SCRIPT = Path(__file__).parents[3] / "examples" / "clients" / "script.json"

ODD = 'a "b" \\ </c>\n\t\x01\x7f\u2028é漢😀\ufffd'
THOUGHT = "<think>\nhm, so\n</think>\n\nYes."
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>'
XML = "<tool_call>\n<function=look>\n<parameter=at>\nsky\n</parameter>\n</function>\n</tool_call>"
LOOK: dict[str, Any] = {
    "name": "look",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
}
SAID = [{"role": "user", "content": "hi"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES, GENERATE = "/v1/responses", "/v1/messages", "/inference/v1/generate"
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": SAID},
    COMPLETIONS: {"prompt": "hi", "max_tokens": 64},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": SAID, "max_tokens": 99},
    GENERATE: {"token_ids": [5, 6], "sampling_params": {"max_tokens": 64}},
}
USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}
CONTINUOUS: dict[str, Any] = {
    "stream_options": {"include_usage": True, "continuous_usage_stats": True}
}
TOOLS: dict[str, Any] = {"tools": [{"type": "function", "function": LOOK}]}
CUSTOM: dict[str, Any] = {"tools": [{"type": "custom", "custom": {"name": "look"}}]}

CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    f"{path.removeprefix('/v1/')} {name}": (path, fields, answer)
    for path, fields, name, answer in [
        *((path, {}, "plain", ODD) for path in BASE),
        *((path, {}, "thought", THOUGHT) for path in (CHAT, RESPONSES, MESSAGES)),
        *((path, {"max_tokens": 4}, "cut", ODD) for path in (CHAT, COMPLETIONS, MESSAGES)),
        *((path, {"n": 2}, "choices", "two words") for path in (CHAT, COMPLETIONS)),
        *((path, USAGE, "usage", "two words") for path in (CHAT, COMPLETIONS)),
        *((path, CONTINUOUS, "each usage", "two words") for path in (CHAT, COMPLETIONS, GENERATE)),
        *((path, {"cache_report": True}, "report", "so") for path in BASE),
        *(
            (path, {"return_token_ids": True, "n": 2}, "tokens", "so é")
            for path in (CHAT, COMPLETIONS)
        ),
        (CHAT, {"logprobs": True, "top_logprobs": 2} | USAGE, "logprobs", "so é😀\n"),
        (CHAT, {"logprobs": True, "return_token_ids": True}, "no rivals", THOUGHT),
        (COMPLETIONS, {"logprobs": 2}, "logprobs", "so é😀\n"),
        (COMPLETIONS, {"logprobs": 0, "return_token_ids": True} | USAGE, "no rivals", "so é"),
        (COMPLETIONS, {"prompt": ["hi", "ho"], "echo": True, "n": 2}, "echo", "so"),
        (COMPLETIONS, {"prompt": "hi", "echo": True, "max_tokens": 0}, "only echo", "so"),
        (
            RESPONSES,
            {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
            "logprobs",
            "<think>\na\n</think>\n\nso é",
        ),
        (GENERATE, {"sampling_params": {"logprobs": 2, "n": 2}}, "logprobs", "so é"),
        (GENERATE, {"sampling_params": {"logprobs": 0}}, "no rivals", "so é"),
        *((CHAT, TOOLS, f"call {form}", f"I look.\n{text}") for form, text in
          (("json", CALL), ("xml", XML))),
        (CHAT, {"functions": [LOOK]}, "old call", XML),
        (CHAT, CUSTOM, "custom call", XML.replace("=at>", "=input>")),
        (RESPONSES, {"tools": [{"type": "function", **LOOK}]}, "call", f"I look.\n{XML}"),
        (
            RESPONSES,
            {"tools": [{"type": "custom", "name": "look"}]},
            "custom call",
            XML.replace("=at>", "=input>"),
        ),
        (
            MESSAGES,
            {"tools": [{"name": "look", "input_schema": LOOK["parameters"]}]},
            "call",
            f"{THOUGHT}\n{XML}",
        ),
        *(
            (CHAT, TOOLS, f"client {number}", entry["answer"])
            for number, entry in enumerate(json.loads(SCRIPT.read_text()))
            if number < 5 and len(entry["answer"]) < 160
        ),
    ]
}  # fmt: skip


class Apart(FakeEngine):
    """Its deltas come as they do from a process of its own."""

    def submit(self, prompt: Any, params: Any, on_delta: Any, **options: Any) -> str:
        packer, reader = DeltaPacker(), DeltaReader()

        def receive(delta: Delta) -> None:
            read = reader.read(*pickle.loads(pickle.dumps(packer.packed(delta))))
            assert read == delta and read.time == delta.time
            on_delta(read)

        return super().submit(prompt, params, receive, **options)


def stream_of(
    tokenizer: Tokenizer,
    name: str,
    *,
    together: bool,
    interval: float = 0.0,
    kind: type[FakeEngine] = FakeEngine,
) -> bytes:
    """The body of a stream.

    Args:
        kind: of the engine.
        together: tokens that come together share an event, as in a server without a gateway.
    """
    path, fields, answer = CASES[name]
    body = BASE[path] | fields | {"stream": True, "temperature": 0}
    engine = kind(tokenizer)
    engine.answer, engine.paced = answer, not together

    async def run() -> bytes:
        parser = {"tool_call_parser": "hermes"} if "json" in name else {}
        options = {"stream_interval": interval} if interval else {}
        replica = Replica(cast(Engine, engine), reasoning_parser="qwen3", **parser, **options)
        attempt = None if together else Attempt(1, "one", 1_700_000_000)
        told = await replica.answer(Asked(path, body), attempt, [(b"x-request-id", b"one")])
        assert told[0]["status"] == 200, bytes_of(told)
        return bytes_of(told)

    try:
        return asyncio.run(run())
    finally:
        engine.close()


@pytest.fixture(scope="module")
def recorded() -> dict[str, str]:
    streams: dict[str, str] = json.loads(RECORDED.read_text())
    return streams


@pytest.mark.parametrize("kind", [FakeEngine, Apart])
@pytest.mark.parametrize("name", CASES)
def test_a_stream_has_the_bytes_of_before(
    tokenizer: Tokenizer, recorded: dict[str, str], name: str, kind: type[FakeEngine]
) -> None:
    assert stream_of(tokenizer, name, together=False, kind=kind).decode() == recorded[name]


@pytest.mark.parametrize("interval", [0.0, 60_000.0])
@pytest.mark.parametrize("name", CASES)
def test_tokens_that_come_together_lose_nothing(
    tokenizer: Tokenizer, recorded: dict[str, str], name: str, interval: float
) -> None:
    """With a long interval all but the first ones come together, without one some may."""
    told = stream_of(tokenizer, name, together=True, interval=interval).decode()
    assert folded(told) == folded(recorded[name])
    if interval and name.endswith(("plain", "thought")):
        assert len(told) < 0.8 * len(recorded[name])


@pytest.mark.parametrize("name", [name for name in CASES if name.endswith(("plain", "logprobs"))])
def test_what_is_told_without_a_task_has_the_same_bytes(
    tokenizer: Tokenizer,
    recorded: dict[str, str],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over a real connection."""
    path, fields, answer = CASES[name]
    written, write = list[bytes](), ChunkedBody.write

    def noted(body: ChunkedBody, data: bytes) -> None:
        written.append(data)
        write(body, data)

    monkeypatch.setattr(ChunkedBody, "write", noted)
    engine = FakeEngine(tokenizer)
    engine.answer = answer
    body = BASE[path] | fields | {"stream": True, "temperature": 0}
    config = ServerConfig(port=0, reasoning_parser="qwen3", stream_silence=0.0)
    with (
        running(engine, config) as server,
        server.client.stream("POST", path, json=body, headers={"x-request-id": "one"}) as response,
    ):
        told = response.read()
    engine.close()
    assert folded(told.decode()) == folded(recorded[name])
    assert written and all(each in told for each in written)


TEXTS = {"text", "content", "reasoning", "reasoning_content", "delta", "arguments", "input"}
TEXTS |= {"partial_json", "thinking"}
ONCE = {"usage", "cache_report", "prompt_token_ids"}


def folded(stream: str) -> dict[int, list[Any]]:
    """The events of each choice of a stream, those that follow each other in one as far as they
    tell more of the same. Ids and times are left out, and the numbers of events, which must count.
    """
    stream = re.sub(r"[0-9a-f]{32}", "id", stream)
    stream = re.sub(r'"(created|created_at)":\d+', r'"\1":0', stream)
    lanes: dict[int, list[Any]] = {}
    for number, text in enumerate(stream.removesuffix("\n\n").split("\n\n")):
        name, _, data = text.rpartition("data: ")
        event: dict[str, Any] = json.loads(data) if data != "[DONE]" else {"done": True}
        assert event.pop("sequence_number", number) == number
        (choice,) = event.get("choices") or [{}]
        lane = lanes.setdefault(choice.get("index", -1), [{}])
        for part in (event, choice):  # that stand in the first event, the last one, or in all
            lane[0] |= {name: part.pop(name) for name in ONCE & part.keys() if part[name]}
            part.pop("usage", None)
            for name in {"logprobs", "token_ids"} & part.keys():  # of all tokens, in their order
                lane[0][name] = gathered(lane[0].get(name), part.pop(name))
        together = fold(lane[-1], [name, event]) if len(lane) > 1 else None
        lane[-1:] = [lane[-1], [name, event]] if together is None else [together]
    return lanes


def gathered(one: Any, more: Any) -> Any:
    """Lists, perhaps in dictionaries, behind each other."""
    if isinstance(one, dict) and more is not None:
        return {name: gathered(value, more[name]) for name, value in one.items()}
    return (one or more) if not (one and more) else one + more


def fold(one: Any, more: Any, key: str = "") -> Any:
    """What two values of consecutive events tell together; None: something else."""
    if key == "delta" and {"content": ""} in (one, more):
        return one if more == {"content": ""} else more
    if key in ("tool_calls", "function_call"):
        return called(one, more)
    if isinstance(one, dict) and isinstance(more, dict) and one.keys() == more.keys():
        parts = {name: fold(value, more[name], name) for name, value in one.items()}
        same = {name for name, value in one.items() if value is None and more[name] is None}
        return None if any(parts[name] is None for name in parts.keys() - same) else parts
    if isinstance(one, list) and isinstance(more, list):
        if key in ("", "choices"):
            pairs = [fold(*pair) for pair in zip(one, more, strict=True)]
            return None if None in pairs else pairs
        return one + more
    if isinstance(one, str) and isinstance(more, str) and key in TEXTS:
        return one + more
    if one is None and key in ("finish_reason", "stop_reason"):
        return more
    return one if one == more else None


def called(one: Any, more: Any) -> Any:
    """Calls as clients gather them: by index, with longer and longer arguments."""
    if isinstance(one, list):
        calls = {call["index"]: call for call in one}
        for call in more:
            calls[call["index"]] = called(calls.get(call["index"], {}), call)
        return [calls[index] for index in sorted(calls)]
    if isinstance(one, dict):
        return one | {name: called(one.get(name), value) for name, value in more.items()}
    return one + more if isinstance(one, str) and isinstance(more, str) else more


if __name__ == "__main__":
    import tempfile

    from make_checkpoint import make_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        made = Tokenizer(make_checkpoint(Path(folder)))
        streams = {name: stream_of(made, name, together=False).decode() for name in CASES}
    RECORDED.write_text(json.dumps(streams, indent=0, ensure_ascii=False) + "\n")
