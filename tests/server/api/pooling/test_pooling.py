"""/v1/embeddings, /v1/rerank and /v1/score over engines that pool."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from families import SPECS
from make_checkpoint import make_checkpoint
from serving import RunningServer, ok, running

from vlm_serve.engine.requests import pooling
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Pipeline
from vlm_serve.server.config import ServerConfig

PLAIN: dict[str, Any] = {"dtype": "float32", "block_size": 16, "cache_memory": "32MiB"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("pooling"), SPECS["vl"])


@contextmanager
def serving(checkpoint: Path, task: str) -> Iterator[tuple[RunningServer, Pipeline]]:
    config = ServerConfig(port=0, idle_check=False)
    with (
        Pipeline(checkpoint, EngineConfig(task=task, **PLAIN)) as pipe,
        running(pipe.engine, config) as server,
    ):
        yield server, pipe


@pytest.fixture(scope="module")
def embedder(checkpoint: Path) -> Iterator[tuple[RunningServer, Pipeline]]:
    with serving(checkpoint, "embed") as made:
        yield made


@pytest.fixture(scope="module")
def reranker(checkpoint: Path) -> Iterator[tuple[RunningServer, Pipeline]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pooling, "JUDGEMENTS", ("a", "b"))
        with serving(checkpoint, "rerank") as made:
            yield made


def image() -> tuple[PIL.Image.Image, dict[str, Any]]:
    """A picture, and the part that names it."""
    noise = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    made, file = PIL.Image.fromarray(noise), io.BytesIO()
    made.save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return made, {"type": "image_url", "image_url": {"url": url}}


Served = tuple[RunningServer, Pipeline]


def test_embeddings_of_texts_are_those_of_python(embedder: Served) -> None:
    server, pipe = embedder
    texts = ["a red circle", "a blue square"]
    body = ok(server.post("/v1/embeddings", {"input": texts, "instruction": "Find shapes"}))
    expected = pipe.embed(texts, "Find shapes")
    assert (body["object"], body["model"]) == ("list", "test-model")
    for index, (one, vector) in enumerate(zip(body["data"], expected, strict=True)):
        assert (one["index"], one["object"]) == (index, "embedding")
        np.testing.assert_allclose(one["embedding"], vector, atol=1e-6)
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] > 0
    assert "cache_report" not in body


def test_one_text_one_list_of_ids_and_several(embedder: Served) -> None:
    server, pipe = embedder
    ids = pipe.engine.preprocessor.tokenizer.encode("a red circle")
    for given, count in (("x", 1), (ids, 1), ([ids, ids[1:]], 2)):
        assert len(ok(server.post("/v1/embeddings", {"input": given}))["data"]) == count


def test_only_the_last_tokens_of_a_prompt_are_pooled(embedder: Served) -> None:
    server, pipe = embedder
    ids = pipe.engine.preprocessor.tokenizer.encode("a red circle and a blue square")

    def asked(**fields: Any) -> Any:
        return server.post("/v1/embeddings", fields)

    whole = ok(asked(input=ids[-3:]))
    cut = ok(asked(input=ids, truncate_prompt_tokens=3))
    assert cut["data"] == whole["data"] and cut["usage"]["prompt_tokens"] == 3
    text = "word " * 9000
    assert asked(input=text).status_code == 400
    for wanted, count in ((16, 16), (-1, pipe.engine.max_model_len - 1)):
        made = ok(asked(input=text, truncate_prompt_tokens=wanted))
        assert made["usage"]["prompt_tokens"] == count
    messages = [{"role": "user", "content": [image()[1]]}]
    for fields in ({"input": "x", "truncate_prompt_tokens": 0},
                   {"messages": messages, "truncate_prompt_tokens": 3}):  # fmt: skip
        refused = asked(**fields)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "truncate_prompt_tokens"


def test_base64_and_dimensions(embedder: Served) -> None:
    server, _ = embedder
    plain = ok(server.post("/v1/embeddings", {"input": "x", "dimensions": 8}))
    coded = ok(
        server.post("/v1/embeddings", {"input": "x", "dimensions": 8, "encoding_format": "base64"})
    )
    vector = np.frombuffer(base64.b64decode(coded["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(vector, plain["data"][0]["embedding"], atol=1e-7)
    assert float(np.linalg.norm(vector)) == pytest.approx(1.0, abs=1e-6)


def test_messages_with_pictures_hit_the_cache(embedder: Served) -> None:
    server, pipe = embedder
    picture, part = image()
    system = {"role": "system", "content": "Represent the user's input."}
    messages = [system, {"role": "user", "content": [part, {"type": "text", "text": "what?"}]}]
    request = {"messages": messages, "cache_report": True}
    cold, hit = (ok(server.post("/v1/embeddings", request)) for _ in range(2))
    assert hit["data"] == cold["data"]
    assert hit["cache_report"][0]["boundary"] >= hit["usage"]["prompt_tokens"] - 16
    parts: list[dict[str, Any]] = [
        {"type": "image", "image": picture},
        {"type": "text", "text": "what?"},
    ]
    np.testing.assert_allclose(cold["data"][0]["embedding"], pipe.embed([parts])[0], atol=1e-5)


def test_documents_are_sorted_by_score(reranker: Served) -> None:
    server, pipe = reranker
    picture, part = image()
    documents: list[Any] = ["a red circle", "a river", {"content": [part]}]
    request = {"query": "What is red?", "documents": documents, "return_documents": True}
    body = ok(server.post("/v1/rerank", request))
    found = body["results"]
    scores = [each["relevance_score"] for each in found]
    assert scores == sorted(scores, reverse=True)
    expected = pipe.rerank("What is red?", [*documents[:2], [{"type": "image", "image": picture}]])
    for each in found:
        assert each["relevance_score"] == pytest.approx(expected[each["index"]], abs=1e-5)
    texts = {each["index"]: each["document"] for each in found}
    assert texts[0] == {"text": "a red circle"} and texts[2] == {"content": [part]}
    few = ok(server.post("/v1/rerank", request | {"top_n": 1, "return_documents": False}))
    assert [each["index"] for each in few["results"]] == [found[0]["index"]]
    assert "document" not in few["results"][0]


def test_rerankers_are_asked_under_the_names_of_other_servers(reranker: Served) -> None:
    """Cohere's and Jina's clients ask for /v2/rerank and /rerank, vLLM's for /score."""
    server, _ = reranker
    request = {"query": "red", "documents": ["a red circle", "nothing"]}
    expected = ok(server.post("/v1/rerank", request))["results"]
    for path in ("/rerank", "/v2/rerank"):
        assert ok(server.post(path, request))["results"] == expected
    cut = ok(server.post("/v2/rerank", request | {"truncate_prompt_tokens": 8}))
    assert cut["usage"]["prompt_tokens"] == 16
    pairs = {"text_1": "red", "text_2": ["a red circle", "nothing"]}
    assert ok(server.post("/score", pairs))["data"] == ok(server.post("/v1/score", pairs))["data"]


def test_scores_of_pairs(reranker: Served) -> None:
    server, pipe = reranker
    body = ok(server.post("/v1/score", {"text_1": "What is red?", "text_2": ["a", "b"]}))
    found = [each["score"] for each in body["data"]]
    assert found == pytest.approx(pipe.rerank("What is red?", ["a", "b"]), abs=1e-5)
    both = ok(server.post("/v1/score", {"text_1": ["x", "y"], "text_2": ["a", "b"]}))
    assert len(both["data"]) == 2


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {}, "input"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": "x", "messages": []}, "input"),
        ("/v1/embeddings", {"input": "x", "dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"input": "x", "dimensions": 65}, "dimensions"),
        ("/v1/embeddings", {"input": "x", "encoding_format": "int8"}, "encoding_format"),
        ("/v1/embeddings", {"input": [1 << 30]}, None),
        ("/v1/embeddings", {"input": "x", "stream": True}, "stream"),
        ("/v1/rerank", {"query": "x", "documents": ["a"]}, None),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, None),
    ],
)
def test_what_cannot_be_embedded_is_named(
    embedder: Served, path: str, body: dict[str, Any], param: str | None
) -> None:
    server, _ = embedder
    response = server.post(path, body)
    assert response.status_code == 400, response.text
    if param is not None:
        assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/rerank", {"query": "x", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "x", "documents": ["a"], "top_n": 0}, "top_n"),
        ("/v1/rerank", {"documents": ["a"]}, "query"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/v1/embeddings", {"input": "x"}, None),
    ],
)
def test_what_cannot_be_reranked_is_named(
    reranker: Served, path: str, body: dict[str, Any], param: str | None
) -> None:
    server, _ = reranker
    response = server.post(path, body)
    assert response.status_code == 400, response.text
    if param is not None:
        assert response.json()["error"]["param"] == param
