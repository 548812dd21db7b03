"""`truncate_prompt_tokens`: only the end of a prompt is used."""

from __future__ import annotations

import base64
import io
from typing import Any

import pytest
from PIL import Image
from serving import RunningServer

from vlm_serve.pipeline.pipeline import Pipeline
from vlm_serve.sampling_params import SamplingParams

OPTIONS = {"temperature": 0, "max_tokens": 6, "return_token_ids": True}
TEXT = "one two three four five six seven eight nine ten " * 8
LONG = TEXT * 400
"""Far more than the context of 2048 tokens."""


def ask(server: RunningServer, path: str, body: dict[str, Any]) -> Any:
    made = server.post(path, body)
    assert made.status_code == 200, made.text
    return made.json()


def test_text_and_tokens_keep_their_end(server: RunningServer) -> None:
    ids = server.engine.preprocessor.tokenizer.encode(TEXT)
    short = ask(server, "/v1/completions", OPTIONS | {"prompt": ids[-21:]})["choices"][0]
    for prompt in (TEXT, ids, ids[-21:]):
        body = OPTIONS | {"prompt": prompt, "truncate_prompt_tokens": 21}
        choice = ask(server, "/v1/completions", body)["choices"][0]
        assert choice["prompt_token_ids"] == ids[-21:]
        assert choice["token_ids"] == short["token_ids"]
    sampling = {"temperature": 0, "max_tokens": 6, "truncate_prompt_tokens": 21}
    body = {"token_ids": ids, "sampling_params": sampling}
    made = ask(server, "/inference/v1/generate", body)
    assert made["usage"]["prompt_tokens"] == 21
    assert made["choices"][0]["token_ids"] == short["token_ids"]


def test_a_text_far_beyond_the_context_is_cut_first(server: RunningServer) -> None:
    ids = server.engine.preprocessor.tokenizer.encode(TEXT)
    body = OPTIONS | {"prompt": "filler <|im_end|>" * 50_000 + TEXT, "truncate_prompt_tokens": 99}
    choice = ask(server, "/v1/completions", body)["choices"][0]
    assert len(ids) > 99
    assert choice["prompt_token_ids"] == ids[-99:]
    assert (
        server.post("/v1/completions", body | {"truncate_prompt_tokens": None}).status_code == 400
    )
    assert (
        server.post("/v1/completions", body | {"truncate_prompt_tokens": 9999}).status_code == 400
    )


def test_a_conversation_keeps_its_end(server: RunningServer) -> None:
    messages = [{"role": "system", "content": TEXT}, {"role": "user", "content": TEXT}]
    whole = ask(server, "/v1/chat/completions", OPTIONS | {"messages": messages})
    ids = whole["prompt_token_ids"]
    count = len(ids) // 2 + 1
    body = OPTIONS | {"messages": messages, "truncate_prompt_tokens": count}
    for _ in range(2):  # The second time from the cache.
        cut = ask(server, "/v1/chat/completions", body)
        assert cut["prompt_token_ids"] == ids[-count:]
        assert cut["usage"]["prompt_tokens"] == count
    expected = ask(server, "/v1/completions", OPTIONS | {"prompt": ids[-count:]})
    assert cut["choices"][0]["token_ids"] == expected["choices"][0]["token_ids"]
    assert cut["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_media_are_not_cut(server: RunningServer) -> None:
    data = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(data, "PNG")
    url = "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
    body = {"messages": [{"role": "user", "content": content}], "truncate_prompt_tokens": 5}
    path, least = "/v1/chat/completions", {"truncate_prompt_tokens": -1, "max_tokens": 4}
    assert "choices" in ask(server, path, body | least)
    for other in ({}, least | {"max_tokens": 2040}):
        error = server.post(path, body | other).json()["error"]
        assert error["param"] == "truncate_prompt_tokens"
        assert error["message"].endswith("is not possible for a prompt with media")


@pytest.mark.parametrize("limit", [{}, {"max_tokens": 40}, {"min_tokens": 30, "max_tokens": 30}])
def test_minus_one_leaves_room_for_the_answer(server: RunningServer, limit: dict[str, Any]) -> None:
    ids = server.engine.preprocessor.tokenizer.encode_plain(LONG)
    room = limit.get("max_tokens", 16)
    last = ids[room - 2048 :]
    body = {"return_token_ids": True, "truncate_prompt_tokens": -1, "ignore_eos": True} | limit
    for prompt in (ids, LONG):
        made = ask(server, "/v1/completions", body | {"prompt": prompt})
        assert made["choices"][0]["prompt_token_ids"] == last
        assert made["usage"]["completion_tokens"] == room
    sampling = {"truncate_prompt_tokens": -1, "max_tokens": room}
    body = {"token_ids": ids, "sampling_params": sampling}
    assert ask(server, "/inference/v1/generate", body)["usage"]["prompt_tokens"] == len(last)
    params = SamplingParams(truncate_prompt_tokens=-1, max_tokens=room)
    assert Pipeline.from_engine(server.engine).generate(ids, params).prompt_token_ids == last


def test_minus_one_without_a_limit_leaves_room_for_a_token(server: RunningServer) -> None:
    messages = [{"role": "user", "content": LONG}]
    made = ask(server, "/v1/chat/completions", {"messages": messages, "truncate_prompt_tokens": -1})
    assert (made["usage"]["prompt_tokens"], made["usage"]["completion_tokens"]) == (2047, 1)
    end = server.client.post(
        "/tokenize", json={"messages": [{"role": "user", "content": TEXT * 8}]}
    ).json()["tokens"]
    for count in (30, 2000):
        fields = OPTIONS | {"messages": messages, "truncate_prompt_tokens": count}
        made = ask(server, "/v1/chat/completions", fields)
        assert made["prompt_token_ids"] == end[-count:]
    short = [{"role": "user", "content": "hi"}]
    options = OPTIONS | {"messages": short}
    whole = ask(server, "/v1/chat/completions", options)
    assert (
        ask(server, "/v1/chat/completions", options | {"truncate_prompt_tokens": -1})["choices"]
        == (whole["choices"])
    )


@pytest.mark.parametrize("bad", [0, -2, "5", 1.5])
def test_bad_lengths_are_refused(server: RunningServer, bad: Any) -> None:
    made = server.post("/v1/completions", {"prompt": "a", "truncate_prompt_tokens": bad})
    assert (made.status_code, made.json()["error"]["param"]) == (400, "truncate_prompt_tokens")


def test_python_has_the_option(server: RunningServer) -> None:
    ids = server.engine.preprocessor.tokenizer.encode(TEXT)
    params = SamplingParams(temperature=0.0, max_tokens=6, truncate_prompt_tokens=21)
    pipe = Pipeline.from_engine(server.engine)
    found = pipe.generate(ids, params)
    assert found.prompt_token_ids == ids[-21:]
    assert found.token_ids == pipe.generate(ids[-21:], params).token_ids
    streamed = list(pipe.stream([{"role": "user", "content": TEXT}], params))
    assert streamed[-1].usage.prompt_tokens == 21
