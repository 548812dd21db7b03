"""Tool calls, thoughts and continued messages through every API that answers a conversation: whole
and as a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fake_engine import FakeEngine
from pydantic_core import from_json
from serving import RunningServer, running
from tool_texts import FILE

from vlm_serve.preprocess.text.tokenizer import Tokenizer
from vlm_serve.server.config import ServerConfig

FUNCTION: dict[str, Any] = {"name": "write_file", "description": "writes", "parameters": FILE}
VALUE = "A call ends with </parameter> and\n</tool_call>\nas <parameter=a>1</parameter> shows."
CALL = (
    "<tool_call>\n<function=write_file>\n<parameter=path>\nx.md\n</parameter>\n<parameter=content>\n"
    f"{VALUE}\n</parameter>\n</function>\n</tool_call>"
)
MADE = [("write_file", {"path": "x.md", "content": VALUE})]
APIS = ("chat", "messages", "responses")


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer) -> Iterator[RunningServer]:
    engine = FakeEngine(tokenizer)
    engine.preprocessor.generation_prompt = "assistant:<think>\n"
    with running(engine, ServerConfig(port=0, reasoning_parser="qwen3")) as server:
        yield server


@pytest.fixture(autouse=True)
def fresh(server: RunningServer) -> None:
    server.engine.reset()
    server.engine.preprocessor.generation_prompt = "assistant:<think>\n"


def asked(api: str, limit: int | None = None) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": "hi"}]
    if api == "chat":
        tools = [{"type": "function", "function": FUNCTION}]
        body = {"messages": messages, "tools": tools}
        return "/v1/chat/completions", body | ({"max_tokens": limit} if limit else {})
    if api == "messages":
        tool = {"name": "write_file", "input_schema": FILE}
        return "/v1/messages", {"messages": messages, "tools": [tool], "max_tokens": limit or 999}
    body = {"input": "hi", "tools": [{"type": "function", **FUNCTION}]}
    return "/v1/responses", body | ({"max_output_tokens": limit} if limit else {})


def of_chat(message: dict[str, Any], reason: str) -> dict[str, Any]:
    calls = [call["function"] for call in message.get("tool_calls") or []]
    return {
        "reasoning": message.get("reasoning") or "",
        "content": message.get("content") or "",
        "calls": [(call["name"], call["arguments"]) for call in calls],
        "reason": reason,
    }


def of_messages(content: list[dict[str, Any]], reason: str) -> dict[str, Any]:
    def joined(kind: str) -> str:
        return "".join(block[kind] for block in content if block["type"] == kind)

    calls = [block for block in content if block["type"] == "tool_use"]
    return {
        "reasoning": joined("thinking"),
        "content": joined("text"),
        "calls": [(call["name"], json.dumps(call["input"])) for call in calls],
        "reason": {"tool_use": "tool_calls", "end_turn": "stop", "max_tokens": "length"}[reason],
    }


def of_responses(body: dict[str, Any]) -> dict[str, Any]:
    def joined(kind: str) -> str:
        items = [item for item in body["output"] if item["type"] == kind]
        return "".join(part["text"] for item in items for part in item["content"])

    calls = [item for item in body["output"] if item["type"] == "function_call"]
    reason = "tool_calls" if calls else "stop"
    return {
        "reasoning": joined("reasoning"),
        "content": joined("message"),
        "calls": [(call["name"], call["arguments"]) for call in calls],
        "reason": "length" if body["status"] == "incomplete" else reason,
    }


def chat_stream(chunks: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    message: dict[str, Any] = {"reasoning": "", "content": "", "tool_calls": []}
    reason = ""
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            delta, reason = choice["delta"], choice["finish_reason"] or reason
            for name in ("reasoning", "content"):
                message[name] += delta.get(name) or ""
            for entry in delta.get("tool_calls", []):
                if entry["index"] == len(message["tool_calls"]):
                    message["tool_calls"].append({"function": {"name": "", "arguments": ""}})
                function = message["tool_calls"][entry["index"]]["function"]
                for name, text in entry["function"].items():
                    function[name] += text
    return of_chat(message, reason)


def messages_stream(events: list[dict[str, Any]]) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = []
    reason = ""
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            delta = dict(event["delta"])
            delta.pop("type")
            ((name, text),) = delta.items()
            name = "json" if name == "partial_json" else name
            blocks[event["index"]][name] += text
        elif event["type"] == "message_delta":
            reason = event["delta"]["stop_reason"]
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = from_json(block["json"], allow_partial=True)
    return of_messages(blocks, reason)


def stream(server: RunningServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    lines = server.post(path, body | {"stream": True}).text.splitlines()
    texts = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(text) for text in texts if text != "[DONE]"]


def answers(server: RunningServer, api: str, limit: int | None = None) -> dict[str, Any]:
    """What the answer says, whole and as a stream alike."""
    path, body = asked(api, limit)
    whole = server.post(path, body).json()
    events = stream(server, path, body)
    if api == "chat":
        choice = whole["choices"][0]
        both = of_chat(choice["message"], choice["finish_reason"]), chat_stream(events)
    elif api == "messages":
        both = of_messages(whole["content"], whole["stop_reason"]), messages_stream(events)
    else:
        both = of_responses(whole), of_responses(events[-1]["response"])
    assert both[0] == both[1]
    return both[0]


def said(found: dict[str, Any]) -> dict[str, Any]:
    return found | {"calls": [(name, json.loads(text)) for name, text in found["calls"]]}


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("behind", ["", "\n</think>\n\n"])
def test_a_call_ends_a_thought_and_its_values_are_whole(
    server: RunningServer, api: str, behind: str
) -> None:
    server.engine.answer = f"I write.\n{CALL}{behind}"
    wanted = {"reasoning": "I write.", "content": "", "calls": MADE, "reason": "tool_calls"}
    assert said(answers(server, api)) == wanted


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("end", ["\n</parameter>\n<parameter=content>\nA call", "\n</tool_call>"])
def test_half_a_call_is_text(server: RunningServer, api: str, end: str) -> None:
    half = CALL[: CALL.index("\n</parameter>")] + end
    server.engine.answer = f"Hm.\n</think>\n\nI write.\n\n{half}"
    wanted = {"reasoning": "Hm.", "content": f"I write.\n\n{half}", "calls": [], "reason": "stop"}
    assert answers(server, api) == wanted


@pytest.mark.parametrize("api", APIS)
def test_a_call_that_the_limit_cuts_is_not_whole(server: RunningServer, api: str) -> None:
    answer = f"Hm.\n</think>\n\n{CALL}"
    server.engine.answer = answer
    tokenizer = server.engine.preprocessor.tokenizer
    for place in ("x.md", "</parameter> and", "</tool_call>\nas", " shows"):
        limit = len(tokenizer.encode_plain(answer[: answer.index(place)])) + 1
        found = answers(server, api, limit)
        assert found["reason"] == "length" and found["content"] == ""
        ((_, arguments),) = found["calls"]
        given = from_json(arguments, allow_partial=True)
        assert given.items() <= {"path": "x.md"}.items()


def test_every_choice_has_its_own_calls(server: RunningServer) -> None:
    server.engine.answer = f"I write.\n{CALL}"
    path, body = asked("chat")
    body |= {"n": 3, "temperature": 1}
    whole = server.post(path, body).json()["choices"]
    chunks = stream(server, path, body)
    for index, choice in enumerate(whole):
        found = of_chat(choice["message"], choice["finish_reason"])
        assert said(found)["calls"] == MADE
        assert chat_stream(chunks, index) == found


@pytest.mark.parametrize(
    ("choice", "calls"),
    [
        ("auto", 1),
        ("required", 1),
        ({"type": "function", "function": {"name": "write_file"}}, 1),
        ({"type": "function", "function": {"name": "stop"}}, 0),
        ("none", 0),
    ],
)
def test_what_may_not_be_called_is_not(server: RunningServer, choice: Any, calls: int) -> None:
    server.engine.answer = f"I write.\n{CALL}"
    path, body = asked("chat")
    body["tools"].append({"type": "function", "function": {"name": "stop", "parameters": {}}})
    message = server.post(path, body | {"tool_choice": choice}).json()["choices"][0]["message"]
    assert len(message.get("tool_calls") or []) == calls
    if not calls:
        assert message["reasoning"] == server.engine.answer


def test_one_call_where_several_are_not_allowed(server: RunningServer) -> None:
    server.engine.answer = f"I write.\n</think>\n\n{CALL}\n{CALL}"
    path, body = asked("chat")
    answer = server.post(path, body | {"parallel_tool_calls": False}).json()
    message = answer["choices"][0]["message"]
    assert len(message["tool_calls"]) == 1
    assert message["content"] == CALL


def test_a_form_that_is_enforced_is_what_follows_the_thought(server: RunningServer) -> None:
    server.engine.answer = f"I write.\n{CALL}\n</think>\n\n{CALL}"
    path, body = asked("chat")
    found = server.post(path, body | {"tool_choice": "required"}).json()["choices"][0]["message"]
    assert found["reasoning"] == f"I write.\n{CALL}"
    assert len(found["tool_calls"]) == 1


@pytest.mark.parametrize(
    ("end", "answer", "reasoning", "content"),
    [
        ("<|im_start|>assistant\ndef f():", "\n    return 1", None, "\n    return 1"),
        ("<|im_start|>assistant\ndef f():", " return 1", None, " return 1"),
        ("<|im_start|>assistant\n<think>\nLet me", " see.\n</think>\n\nRed.", " see.", "Red."),
        ("<|im_start|>assistant\n<think>\nHm\n</think>\n\nThe star", " is red.", None, " is red."),
        ("<|im_start|>assistant\n<think>", " Hm.</think>\n\nRed.", " Hm.", "Red."),
        ("<|im_start|>assistant\nThe tag <think>", " begins one.", None, " begins one."),
        (
            "<|im_start|>assistant\n<think>\n\n</think>\n\nThe tag <think>",
            " begins one.",
            None,
            " begins one.",
        ),
        (
            "<|im_start|>assistant\n<think>\nThe tag <think>",
            " begins one.</think>Right.",
            " begins one.",
            "Right.",
        ),
        (
            "<|im_start|>assistant\n<think>\n\n</think>\n\n<think>\nLet me",
            " see.</think>Red.",
            " see.",
            "Red.",
        ),
    ],
)
def test_a_continued_message_goes_on_where_it_ended(
    server: RunningServer, end: str, answer: str, reasoning: str | None, content: str
) -> None:
    server.engine.answer = answer
    server.engine.preprocessor.generation_prompt = end
    path, body = asked("chat")
    thinks = {"role": "user", "content": "what is <think>?"}
    for tools in ({}, {"tools": body["tools"]}):
        asks = {"messages": [thinks], "continue_final_message": True} | tools
        (choice,) = server.post(path, asks).json()["choices"]
        found = of_chat(choice["message"], choice["finish_reason"])
        assert (found["reasoning"], found["content"]) == (reasoning or "", content)
        assert chat_stream(stream(server, path, asks)) == found
    prefilled = {"messages": [thinks, {"role": "assistant", "content": "x"}], "max_tokens": 99}
    blocks = server.post("/v1/messages", prefilled).json()["content"]
    assert [block["text"] for block in blocks if block["type"] == "text"] == [content]


def test_an_answer_that_begins_indented_stays_so(server: RunningServer) -> None:
    server.engine.preprocessor.generation_prompt = "assistant:<think>\n\n</think>\n\n"
    server.engine.answer = "    return 1"
    path, body = asked("chat")
    assert server.post(path, body).json()["choices"][0]["message"]["content"] == "    return 1"
