"""Embedders of texts alone, as sentence-transformers' files and the cards of Qwen3 say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from families import SPECS
from make_checkpoint import make_checkpoint
from serving import ok, running

from vlm_serve.errors import CheckpointError, InvalidRequestError
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Pipeline
from vlm_serve.preprocess.text.pooled_prompts import embedding_messages, rerank_messages
from vlm_serve.preprocess.text.sentence_files import Sentences
from vlm_serve.preprocess.text.tokenizer import Tokenizer
from vlm_serve.server.config import ServerConfig

PLAIN: dict[str, Any] = {"dtype": "float32", "block_size": 16, "cache_memory": "32MiB"}
PROMPTS = {"query": "Instruct: Find it\nQuery:", "document": "", "code": "Code: "}
KINDS = ("Transformer", "Pooling", "Normalize")


def write_files(path: Path, *kinds: str, pooling: Any = None, **named: Any) -> Path:
    """Write them as sentence-transformers does; of tokens, `<|im_end|>` ends every text."""
    folders = ["" if kind == "Transformer" else f"{at}_{kind}" for at, kind in enumerate(kinds)]
    modules = [
        {"idx": at, "name": str(at), "path": folder, "type": f"sentence_transformers.models.{kind}"}
        for at, (kind, folder) in enumerate(zip(kinds, folders, strict=True))
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    for folder in filter(None, folders):
        (path / folder).mkdir(exist_ok=True)
    modes = {f"pooling_mode_{each}": False for each in ("cls_token", "mean_tokens", "max_tokens")}
    fields = {"word_embedding_dimension": 64, **modes, "pooling_mode_lasttoken": True}
    if "Pooling" in kinds:
        file = path / "1_Pooling" / "config.json"
        file.write_text(json.dumps(fields if pooling is None else pooling))
    (path / "config_sentence_transformers.json").write_text(
        json.dumps({"prompts": PROMPTS} | named)
    )
    file = path / "tokenizer.json"
    saved = json.loads(file.read_text())
    end = next(each["id"] for each in saved["added_tokens"] if each["content"] == "<|im_end|>")
    single = [{"Sequence": {"id": "A", "type_id": 0}}]
    single += [{"SpecialToken": {"id": "<|im_end|>", "type_id": 0}}]
    saved["post_processor"] = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            "<|im_end|>": {"id": "<|im_end|>", "ids": [end], "tokens": ["<|im_end|>"]}
        },
    }
    file.write_text(json.dumps(saved))
    return path


@torch.no_grad()
def hidden(path: Path, text: str) -> torch.Tensor:
    """transformers' state of the last token of a text, as its tokenizer writes it."""
    ids = oracle.tokenizer(path)(text, return_tensors="pt")["input_ids"]
    return torch.as_tensor(oracle.model(path).model(input_ids=ids).last_hidden_state[0, -1]).float()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint(tmp_path_factory.mktemp("sentences"), SPECS["qwen3"])
    return write_files(folder, *KINDS)


def test_texts_are_embedded_with_their_prompt_and_end(path: Path) -> None:
    text = "a red circle"
    unit = {
        name: torch.nn.functional.normalize(hidden(path, before + text), dim=0).numpy()
        for name, before in {"": "", **PROMPTS, "told": "Instruct: Find\nQuery:"}.items()
    }
    with Pipeline(path, EngineConfig(task="embed", **PLAIN)) as pipe:
        for name in ("query", "code", "document"):
            (vector,) = pipe.embed([text], prompt_name=name)
            np.testing.assert_allclose(vector, unit[name], atol=1e-4)
        np.testing.assert_allclose(pipe.embed([text])[0], unit[""], atol=1e-4)
        np.testing.assert_allclose(pipe.embed([text], "Find")[0], unit["told"], atol=1e-4)
        with pytest.raises(
            InvalidRequestError, match="no prompt 'other', only .'query', 'document'"
        ):
            pipe.embed([text], prompt_name="other")
        with running(pipe.engine, ServerConfig(port=0, idle_check=False)) as server:
            for field, name, known in (
                ("prompt_name", "query", "query"),
                ("input_type", "query", "query"),
                ("input_type", "search_query", "query"),
                ("input_type", "passage", "document"),
            ):
                body = ok(server.post("/v1/embeddings", {"input": text, field: name}))
                np.testing.assert_allclose(body["data"][0]["embedding"], unit[known], atol=1e-4)
            raw = ok(server.post("/v1/embeddings", {"input": text, "use_activation": False}))
            found = raw["data"][0]["embedding"]
            np.testing.assert_allclose(found, hidden(path, text).numpy(), atol=1e-3)
            assert (
                server.post("/v1/embeddings", {"input": text, "input_type": "x"}).status_code == 400
            )


def test_without_normalisation_vectors_are_states(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, SPECS["qwen3"])
    write_files(path, "Transformer", "Pooling", default_prompt_name="query")
    with Pipeline(path, EngineConfig(task="embed", **PLAIN)) as pipe:
        (vector,) = pipe.embed(["x"])
    np.testing.assert_allclose(vector, hidden(path, PROMPTS["query"] + "x").numpy(), atol=1e-3)


@pytest.mark.parametrize(
    ("kinds", "pooling", "complaint"),
    [
        ((*KINDS, "Dense"), None, "modules.json asks for Dense, which is not supported"),
        (KINDS, {"pooling_mode_mean_tokens": True}, "asks for pooling_mode_mean_tokens, which"),
        (KINDS, {"pooling_mode": "cls"}, "asks for pooling_mode_cls, which"),
        (KINDS, {}, "asks for no pooling, which"),
    ],
)
def test_what_is_not_followed_is_named(
    tmp_path: Path, kinds: tuple[str, ...], pooling: Any, complaint: str
) -> None:
    path = write_files(make_checkpoint(tmp_path, SPECS["qwen3"]), *kinds, pooling=pooling)
    with pytest.raises(CheckpointError, match=complaint):
        Pipeline(path, EngineConfig(task="embed", **PLAIN))


def test_both_forms_of_the_last_token_are_read(path: Path, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path, SPECS["qwen3"])
    write_files(other, *KINDS, pooling={"pooling_mode": "lasttoken", "include_prompt": True})
    assert Sentences.of(other) == Sentences.of(path) is not None
    assert Sentences.of(make_checkpoint(tmp_path / "none", SPECS["qwen3"])) is None


def test_vision_kinds_keep_the_form_of_their_card(tmp_path: Path) -> None:
    path = write_files(make_checkpoint(tmp_path, SPECS["vl"]), "Transformer", "Pooling")
    with Pipeline(path, EngineConfig(task="embed", **PLAIN)) as pipe:
        assert pipe.engine.preprocessor.sentences is None
        assert not pipe.engine.preprocessor.normalised
        (vector,) = pipe.embed(["x"])
    assert abs(float(np.linalg.norm(vector)) - 1) > 1e-3
    with pytest.raises(InvalidRequestError, match="the model has no prompts"):
        embedding_messages("x", name="query")


def test_rerankers_of_texts_have_a_card_of_their_own() -> None:
    """Qwen3-Reranker's, whose parts stand on lines."""
    system, user = rerank_messages("red?", "a circle", plain=True)
    assert system["content"][0]["text"].endswith('can only be "yes" or "no".')
    assert "".join(part["text"] for part in user["content"]) == (
        "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
        "<Query>: red?\n<Document>: a circle"
    )


def test_the_added_tokens_end_the_prompt(path: Path) -> None:
    with Pipeline(path, EngineConfig(task="embed", **PLAIN)) as pipe:
        prompt = pipe.engine.preprocessor.prepare(
            embedding_messages("x", sentences=Sentences.of(path))
        )
    assert Tokenizer(path).backend.decode(list(prompt.token_ids), False).endswith("x<|im_end|>")


@pytest.mark.parametrize("content", ["{", "4", "[4]", '{"a": 1}'])
def test_broken_files_are_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "modules.json").write_text(content)
    with pytest.raises(CheckpointError, match="modules.json or its prompts are of no known form"):
        Sentences.of(tmp_path)
