"""Scoring as evaluation harnesses do it: continuations of one text, echoed with logprobs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from make_checkpoint import make_checkpoint
from parity_cases import random_ids
from serving import RunningServer, running

from vlm_serve.engine.engine import Engine
from vlm_serve.options.config import EngineConfig
from vlm_serve.server.config import ServerConfig

# What lm-eval's `local-completions` sends with each batch of token ids.
LM_EVAL: dict[str, Any] = {
    "temperature": 0,
    "max_tokens": 1,
    "logprobs": 1,
    "seed": 1234,
    "echo": True,
    "model": "test-model",
}
SALTS = map(str, itertools.count())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    path = make_checkpoint(tmp_path_factory.mktemp("scoring"))
    config = EngineConfig(block_size=16, cache_memory="32MiB", max_model_len=1024, threads=1)
    engine = Engine.from_checkpoint(str(path), config)
    settings = ServerConfig(port=0, idle_check=False)
    with running(engine, settings) as made:
        yield made
    engine.close()


def score(server: RunningServer, prompts: list[list[int]], **fields: Any) -> dict[str, Any]:
    answer = server.post("/v1/completions", {"prompt": prompts, "cache_report": True, **fields})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def logprobs(body: dict[str, Any]) -> list[dict[str, Any]]:
    return [choice["logprobs"] for choice in body["choices"]]


@pytest.mark.parametrize("fields", [LM_EVAL, LM_EVAL | {"max_tokens": 0, "logprobs": 5}])
def test_four_choices_reuse_the_document_and_its_rows(
    server: RunningServer, fields: dict[str, Any]
) -> None:
    document = random_ids(500, seed=fields["logprobs"])
    prompts = [[*document, *random_ids(3, seed=choice)] for choice in range(4)]
    one_by_one = [score(server, [prompt], **fields) for prompt in prompts]
    for body in one_by_one[1:]:
        assert body["cache_report"]["boundary"] == 480
        assert body["cache_report"]["logprobs_reused"] == 495
    cold = [score(server, [prompt], cache_salt=next(SALTS), **fields) for prompt in prompts]
    assert [logprobs(body) for body in one_by_one] == [logprobs(body) for body in cold]
    together = score(server, prompts, **fields)
    assert logprobs(together) == [each for body in cold for each in logprobs(body)]


def test_only_the_last_tokens_are_scored(server: RunningServer) -> None:
    prompt = random_ids(300, seed=9)
    whole = logprobs(score(server, [prompt], **LM_EVAL))[0]
    fields = LM_EVAL | {"prompt_logprobs_start": 290}
    body = score(server, [prompt], cache_salt="start", **fields)
    (part,) = logprobs(body)
    assert part["token_logprobs"] == [None] * 290 + whole["token_logprobs"][290:]
    assert part["top_logprobs"] == [None] * 290 + whole["top_logprobs"][290:]
    again = score(server, [prompt], cache_salt="start", **fields)
    assert again["cache_report"]["boundary"] == 288
    listed = score(server, [prompt], prompt_logprobs=1, prompt_logprobs_start=299, max_tokens=1)
    rows = listed["choices"][0]["prompt_logprobs"]
    assert len(rows) == 300 and rows[:299] == [None] * 299
    assert rows[299][str(prompt[299])]["logprob"] == whole["token_logprobs"][299]


def test_a_start_needs_something_to_report(server: RunningServer) -> None:
    body = {"prompt": [1, 2, 3], "prompt_logprobs_start": 1}
    answer = server.post("/v1/completions", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt_logprobs_start"
    answer = server.post("/v1/completions", body | {"prompt_logprobs": 1, "max_tokens": 1})
    assert answer.status_code == 200
    answer = server.post("/v1/completions", body | LM_EVAL | {"prompt_logprobs_start": 3})
    assert answer.status_code == 400
    assert "less than the prompt's 3 tokens" in answer.json()["error"]["message"]
