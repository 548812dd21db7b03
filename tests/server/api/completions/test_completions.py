"""/v1/completions, /tokenize and /detokenize over a scripted engine."""

from __future__ import annotations

from typing import Any

import pytest
from serving import RunningServer, wait_for

PATH = "/v1/completions"


def complete(fake: RunningServer, prompt: Any = "once", **fields: Any) -> dict[str, Any]:
    response = fake.post(PATH, {"prompt": prompt, **fields})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def test_a_whole_completion(fake: RunningServer) -> None:
    body = complete(fake, model="test-model")
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["choices"] == [
        {"index": 0, "text": "Hello, world!", "logprobs": None, "finish_reason": "stop"}
    ]
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 3


def test_sixteen_tokens_unless_said_otherwise(fake: RunningServer) -> None:
    fake.engine.answer = "x y z " * 20
    assert complete(fake)["usage"]["completion_tokens"] == 16
    assert complete(fake)["choices"][0]["finish_reason"] == "length"
    assert complete(fake, max_tokens=20)["usage"]["completion_tokens"] == 20


def test_token_ids_and_text_are_the_same_prompt(fake: RunningServer) -> None:
    ids = fake.engine.preprocessor.tokenizer.encode("once upon")
    text = complete(fake, "once upon", return_token_ids=True)
    assert text["choices"][0]["prompt_token_ids"] == ids
    assert complete(fake, ids)["usage"] == text["usage"]


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_and_choices_are_numbered(fake: RunningServer, stream: bool) -> None:
    body = {"prompt": ["a", "a b c", "x"], "n": 2}
    if stream:
        chunks = fake.stream(PATH, body)
        texts = [""] * 6
        for chunk in chunks:
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"]
        finishes = [c["finish_reason"] for k in chunks for c in k["choices"]]
        assert finishes.count("stop") == 6
    else:
        answer = fake.post(PATH, body).json()
        assert [choice["index"] for choice in answer["choices"]] == list(range(6))
        texts = [choice["text"] for choice in answer["choices"]]
        single = sum(complete(fake, p, n=2)["usage"]["prompt_tokens"] for p in body["prompt"])  # type: ignore[attr-defined]
        assert answer["usage"]["prompt_tokens"] == single
    assert texts == ["Hello, world!"] * 6


def test_a_stream_with_usage(fake: RunningServer) -> None:
    body = {"prompt": "once", "stream_options": {"include_usage": True}}
    chunks = fake.stream(PATH, body)
    assert "".join(c["text"] for chunk in chunks for c in chunk["choices"]) == "Hello, world!"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == complete(fake)["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


@pytest.mark.parametrize("include_usage", [False, True])
def test_cache_reports_one_per_prompt(fake: RunningServer, include_usage: bool) -> None:
    one = complete(fake, cache_report=True)["cache_report"]
    assert one["reason"] == "cold"
    two = complete(fake, ["once", "once"], cache_report=True)["cache_report"]
    assert two == [one, one]
    assert "cache_report" not in complete(fake)
    for prompt, wanted in (("once", one), (["once", "once"], two)):
        body: dict[str, Any] = {"prompt": prompt, "cache_report": True}
        body["stream_options"] = {"include_usage": include_usage}
        chunks = fake.stream(PATH, body)
        assert chunks[-1]["cache_report"] == wanted
        assert not any("cache_report" in chunk for chunk in chunks[:-1])


def test_a_stream_says_every_token_once(fake: RunningServer) -> None:
    whole = complete(fake, return_token_ids=True)["choices"][0]
    chunks = fake.stream(PATH, {"prompt": "once", "return_token_ids": True})
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [i for choice in choices for i in choice["token_ids"]] == whole["token_ids"]
    assert choices[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert not any("prompt_token_ids" in choice for choice in choices[1:])


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_first(fake: RunningServer, stream: bool) -> None:
    if stream:
        chunks = fake.stream(PATH, {"prompt": "once ", "echo": True})
        text = "".join(c["text"] for chunk in chunks for c in chunk["choices"])
    else:
        text = complete(fake, "once ", echo=True)["choices"][0]["text"]
    assert text == "once Hello, world!"


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_of_no_tokens_is_the_prompt(fake: RunningServer, stream: bool) -> None:
    body = {"prompt": ["once ", "twice"], "echo": True, "max_tokens": 0, "return_token_ids": True}
    if stream:
        *chunks, last = fake.stream(PATH, body | {"stream_options": {"include_usage": True}})
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        usage = last["usage"]
    else:
        answer = complete(fake, **body)
        choices, usage = answer["choices"], answer["usage"]
    assert sorted((each["index"], each["text"]) for each in choices) == [(0, "once "), (1, "twice")]
    assert {each["finish_reason"] for each in choices} == {"length"}
    assert [each["token_ids"] for each in choices] == [[], []]
    assert usage["completion_tokens"] == 0
    assert usage["total_tokens"] == usage["prompt_tokens"]


def test_logprobs_in_the_older_form(fake: RunningServer) -> None:
    logprobs = complete(fake, logprobs=2)["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == "Hello, world!"
    assert set(logprobs["token_logprobs"]) == {-0.5}
    assert all(len(row) == 2 for row in logprobs["top_logprobs"])
    assert logprobs["text_offset"][0] == 0
    ends = [o + len(t) for o, t in zip(logprobs["text_offset"], logprobs["tokens"], strict=True)]
    assert ends[:-1] == logprobs["text_offset"][1:]
    chunks = fake.stream(PATH, {"prompt": "once", "logprobs": 2})
    streamed = [o for k in chunks for c in k["choices"] for o in c["logprobs"]["text_offset"]]
    assert streamed == logprobs["text_offset"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["x"] * 129}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "best_of": 3}, "best_of"),
    ],
)
def test_what_is_refused(fake: RunningServer, fields: dict[str, Any], param: str) -> None:
    response = fake.post(PATH, fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_one_failure_ends_all_prompts_of_a_request(fake: RunningServer) -> None:
    fake.engine.fail_after = 1
    assert fake.post(PATH, {"prompt": ["a", "b", "c"]}).status_code == 500
    wait_for(lambda: not fake.engine.requests)
    chunks = fake.stream(PATH, {"prompt": ["a", "b", "c"]})
    assert "error" in chunks[-1]


def test_tokenize_and_back(fake: RunningServer) -> None:
    body = fake.post("/tokenize", {"prompt": "héllo", "return_token_strs": True}).json()
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
    assert body["max_model_len"] == 4096
    assert fake.post("/detokenize", {"tokens": body["tokens"]}).json() == {"prompt": "héllo"}


def test_tokenize_a_conversation(fake: RunningServer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    body = fake.post("/tokenize", {"messages": messages}).json()
    text = fake.post("/detokenize", {"tokens": body["tokens"]}).json()["prompt"]
    assert text == "user: hi\nassistant:"
    assert "token_strs" not in body


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "x", "messages": []}),
        ("/tokenize", {"prompt": 5}),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": [{"type": "image", "image": "/x"}]}]},
        ),
        ("/detokenize", {"tokens": [10**6]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": "x"}),
    ],
)
def test_tokenization_refuses_nonsense(
    fake: RunningServer, path: str, body: dict[str, Any]
) -> None:
    assert fake.post(path, body).status_code == 400
