"""Classifiers and reward models give transformers' logits, and generate nothing."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from classifiers import CLASSES, logits, make_classifier
from families import FAMILIES, SPECS
from make_checkpoint import make_checkpoint
from parity_cases import random_ids
from prepared_prompts import answer_prepared
from sweeps import quick

from vlm_serve.commands.plan import make
from vlm_serve.engine.requests.pooling import ONE_TOKEN, score_of
from vlm_serve.errors import CheckpointError, ConfigError, InvalidRequestError
from vlm_serve.models.classifier import Classifier
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Pipeline
from vlm_serve.preprocess.text.pooled_prompts import rerank_messages

PLAIN: dict[str, Any] = {"dtype": "float32", "block_size": 16, "cache_memory": "32MiB"}
KINDS = quick(list(CLASSES), ["qwen3"])


def vectors(pipe: Pipeline, token_ids: list[int]) -> torch.Tensor:
    prompt = pipe.engine.preprocessor.prepare_tokens(token_ids)
    (made,) = answer_prepared(pipe, [prompt], [ONE_TOKEN], pooled=True)
    assert made.vector is not None
    return torch.from_numpy(np.array(made.vector))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_those_of_transformers(tmp_path: Path, kind: str, tied: bool) -> None:
    """Cold and after a hit; the head is in the file whether embeddings are tied or not."""
    spec = next(iter(FAMILIES[kind].values()))
    path = make_classifier(tmp_path, spec, ["bad", "good", "best"], tie_word_embeddings=tied)
    ids = random_ids(40, 1)
    expected = logits(path, ids)
    with Pipeline(path, EngineConfig(**PLAIN)) as pipe:
        assert pipe.engine.config.task == "classify"
        for _ in range(2):
            torch.testing.assert_close(vectors(pipe, ids), expected, atol=1e-4, rtol=0)
        pipe.engine.check()
        with pytest.raises(InvalidRequestError, match="started with --task classify"):
            pipe.generate(ids)
    planned = make(str(path), EngineConfig(**PLAIN)).weights
    assert planned.projections == pipe.engine.weights.projections


def test_one_label_scores_pairs(tmp_path: Path) -> None:
    """The head is that of a converted Qwen3-Reranker, the difference of two rows."""
    path = make_classifier(tmp_path, SPECS["qwen3"], ["LABEL_0"])
    for task in ("auto", "rerank", "classify"):
        with Pipeline(path, EngineConfig(task=task, **PLAIN)) as pipe:
            (score,) = pipe.rerank("What is red?", ["a circle"])
            prompt = pipe.engine.preprocessor.prepare(
                rerank_messages("What is red?", "a circle", plain=True),
                chat_template_kwargs={"enable_thinking": False},
            )
        expected = torch.sigmoid(logits(path, list(prompt.token_ids)))
        assert score == pytest.approx(float(expected), abs=1e-4)


def test_what_a_model_cannot_do_is_refused(tmp_path: Path) -> None:
    path = make_classifier(tmp_path / "labels", SPECS["qwen3"], ["a", "b"])
    with pytest.raises(ConfigError, match="task 'generate': .*Qwen3ForSequenceClassification"):
        Pipeline(path, EngineConfig(task="generate", **PLAIN))
    with pytest.raises(ConfigError, match="task 'generate'"):
        make(str(path), EngineConfig(task="generate", **PLAIN))
    with (
        Pipeline(path, EngineConfig(**PLAIN)) as pipe,
        pytest.raises(InvalidRequestError, match="2 labels: use /classify"),
    ):
        pipe.rerank("a", ["b"])
    plain = make_checkpoint(tmp_path / "plain", SPECS["qwen3"])
    with pytest.raises(ConfigError, match="task 'classify': .* name no classifier"):
        Pipeline(plain, EngineConfig(task="classify", **PLAIN))


def head(**fields: Any) -> Classifier:
    found = Classifier.of({"architectures": ["Qwen3ForSequenceClassification"], **fields})
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("fields", "activation"),
    [
        ({"num_labels": 1}, "sigmoid"),
        ({}, "softmax"),
        ({"id2label": {"0": "a", "1": "b", "2": "c"}}, "softmax"),
        ({"problem_type": "single_label_classification", "num_labels": 1}, "sigmoid"),
        ({"problem_type": "single_label_classification"}, "softmax"),
        ({"problem_type": "multi_label_classification"}, "sigmoid"),
        ({"problem_type": "regression"}, "identity"),
        ({"problem_type": "regression", "num_labels": 1}, "identity"),
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
            "identity",
        ),
    ],
)
def test_what_makes_probabilities(fields: dict[str, Any], activation: str) -> None:
    """vLLM's poolers decide alike."""
    found, wide = head(**fields), torch.tensor([0.5, -800.0, 700.0])
    assert found.activation == activation
    expected = {
        "identity": wide,
        "sigmoid": wide.sigmoid(),
        "softmax": wide.softmax(0),
    }[activation]
    torch.testing.assert_close(torch.tensor(found.values(wide.numpy())), expected)
    assert found.values(wide.numpy(), activated=False) == pytest.approx(wide.tolist())


def test_labels_have_names() -> None:
    assert head().labels == ("LABEL_0", "LABEL_1")
    assert head(id2label={"0": "no", "1": "yes"}).labels == ("no", "yes")
    assert head(text_config={"pad_token_id": 7}).pad == 7
    assert Classifier.of({"architectures": ["Qwen3ForCausalLM"]}) is None
    for architectures in (None, 5, "Qwen3ForSequenceClassification"):
        assert Classifier.of({"architectures": architectures}) is None


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"problem_type": "other"}, "problem_type 'other'"),
        ({"num_labels": -1}, "num_labels -1"),
        ({"num_labels": "two"}, "num_labels 'two'"),
        ({"id2label": ["a"]}, "num_labels"),
        ({"problem_type": ["a"]}, "problem_type"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.Tanh"}}, "'torch.nn.Tanh'"),
    ],
)
def test_unknown_values_are_refused(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(CheckpointError, match=complaint):
        head(**fields)


def test_a_head_of_another_size_is_refused(tmp_path: Path) -> None:
    names = {str(index): f"L{index}" for index in range(3)}
    path = make_classifier(tmp_path, SPECS["qwen3"], ["a"], id2label=names)
    with pytest.raises(CheckpointError, match=r"score.weight has shape \[1, 64\]"):
        Pipeline(path, EngineConfig(**PLAIN))


def test_scores_without_activation() -> None:
    assert score_of(np.array([2.0, 0.5], np.float32), activated=False) == 1.5


def test_tensors_that_are_not_read_are_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as a head that the architecture of config.json does not have."""
    causal = ["Qwen3ForCausalLM"]
    spec = SPECS["qwen3, tied, three heads of a kv head"]
    spec = type(spec)(**spec.__dict__ | {"shards": 1})
    path = make_classifier(tmp_path, spec, ["a"], architectures=causal, tie_word_embeddings=True)
    with caplog.at_level(logging.WARNING, "vlm_serve"), Pipeline(path, EngineConfig(**PLAIN)):
        pass
    said = [each.message for each in caplog.records if "not read" in each.message]
    assert said == ["1 tensors are not read: score.weight"]
