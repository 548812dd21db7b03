"""/classify in vLLM's form, and scores of a classifier with one label."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from classifiers import logits, make_classifier
from families import SPECS
from serving import RunningServer, ok, running

from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Pipeline
from vlm_serve.server.config import ServerConfig

PLAIN: dict[str, Any] = {"dtype": "float32", "block_size": 16, "cache_memory": "32MiB"}
Served = tuple[RunningServer, Pipeline, Path]


@contextmanager
def serving(path: Path, labels: list[str], **fields: Any) -> Iterator[Served]:
    make_classifier(path, SPECS["qwen3"], labels, **fields)
    with (
        Pipeline(path, EngineConfig(**PLAIN)) as pipe,
        running(pipe.engine, ServerConfig(port=0, idle_check=False)) as server,
    ):
        yield server, pipe, path


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("labels"), ["bad", "good", "best"]) as made:
        yield made


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("reward"), ["LABEL_0"]) as made:
        yield made


def test_texts_and_ids_are_labelled_as_they_are(classifier: Served) -> None:
    server, pipe, path = classifier
    texts = ["a red circle", "a blue square"]
    ids = [pipe.engine.preprocessor.encode(each) for each in texts]
    for given in (texts, ids):
        body = ok(server.post("/classify", {"model": "test-model", "input": given}))
        assert (body["object"], body["model"]) == ("list", "test-model") and body["created"]
        assert body["usage"]["completion_tokens"] == 0
        assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] == sum(map(len, ids))
        for index, (one, tokens) in enumerate(zip(body["data"], ids, strict=True)):
            expected = logits(path, tokens).softmax(0)
            assert one["probs"] == pytest.approx(expected.tolist(), abs=1e-4)
            assert (one["index"], one["num_classes"]) == (index, 3)
            assert one["label"] == ["bad", "good", "best"][int(expected.argmax())]
    one = ok(server.post("/classify", {"input": texts[0], "use_activation": False}))
    assert one["data"][0]["probs"] == pytest.approx(logits(path, ids[0]).tolist(), abs=1e-4)


def test_a_conversation_is_labelled_without_another_turn(classifier: Served) -> None:
    server, pipe, path = classifier
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    body = ok(server.post("/classify", {"messages": messages}))
    prompt = pipe.engine.preprocessor.prepare(messages, add_generation_prompt=False)
    expected = logits(path, prompt.token_ids).softmax(0)
    assert body["data"][0]["probs"] == pytest.approx(expected.tolist(), abs=1e-4)
    asked = ok(server.post("/classify", {"messages": messages, "add_generation_prompt": True}))
    assert asked["usage"]["prompt_tokens"] > body["usage"]["prompt_tokens"]


@pytest.mark.parametrize("ids", [[9, 8, 7, 5, 5], [5, 9, 5, 8], [5, 5, 5]])
def test_padding_at_the_end_is_passed_over(classifier: Served, ids: list[int]) -> None:
    """One prompt has those of transformers."""
    server, _, path = classifier
    body = ok(server.post("/classify", {"input": ids}))
    expected = logits(path, ids).softmax(0)
    assert body["data"][0]["probs"] == pytest.approx(expected.tolist(), abs=1e-4)


def test_rewards_are_scores(reward: Served) -> None:
    server, pipe, _ = reward
    pair = {"text_1": "What is red?", "text_2": "a circle"}
    (scored,) = ok(server.post("/v1/score", pair))["data"]
    assert scored["score"] == pytest.approx(pipe.rerank("What is red?", ["a circle"])[0], abs=1e-5)
    (raw,) = ok(server.post("/v1/score", pair | {"use_activation": False}))["data"]
    assert float(torch.tensor(raw["score"]).sigmoid()) == pytest.approx(scored["score"], abs=1e-5)
    found = ok(server.post("/v1/rerank", {"query": "What is red?", "documents": ["a circle"]}))
    assert found["results"][0]["relevance_score"] == pytest.approx(scored["score"], abs=1e-5)
    (label,) = ok(server.post("/classify", {"input": "x"}))["data"]
    assert label["num_classes"] == 1 and 0 < label["probs"][0] < 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/embeddings", {"input": "x"}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/classify", {}),
        ("/classify", {"input": []}),
        ("/classify", {"input": "x", "stream": True}),
    ],
)
def test_what_cannot_be_labelled_is_named(
    classifier: Served, path: str, body: dict[str, Any]
) -> None:
    assert classifier[0].post(path, body).status_code == 400
