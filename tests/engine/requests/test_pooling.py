"""Embeddings and scores equal those of transformers' model, pooled as the cards of
Qwen3-VL-Embedding and Qwen3-VL-Reranker do, cold and after hits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import media_reference
import numpy as np
import oracle
import PIL.Image
import pytest
import step_graphs
import torch
from families import SPECS
from make_checkpoint import make_checkpoint
from parity_cases import data_folder, random_ids, text
from prepared_prompts import answer_prepared
from queued_device import QueuedDevice, with_queue
from sweeps import quick

from vlm_serve.commands.plan import make
from vlm_serve.engine.requests import pooling
from vlm_serve.engine.requests.pooling import embedding_of, score_of
from vlm_serve.errors import ConfigError, InvalidRequestError
from vlm_serve.kernels.triton_support import interpreted
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Pipeline
from vlm_serve.preprocess.text.pooled_prompts import embedding_messages, rerank_messages

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")
NAMES = quick(["vl", "vl moe", "dense", "qwen3"], ["vl"])
PLAIN: dict[str, Any] = {"dtype": "float32", "block_size": 16, "cache_memory": "32MiB"}
INSTRUCTION = "Retrieve pictures that show what is asked for"


@pytest.fixture(scope="module", params=NAMES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("pooled"), SPECS[request.param])


@pytest.fixture(scope="module")
def embedder(checkpoint: Path) -> Iterator[Pipeline]:
    with Pipeline(checkpoint, EngineConfig(task="embed", **PLAIN)) as pipe:
        yield pipe


def contents(pipe: Pipeline) -> list[Any]:
    """Texts, and parts with pictures where the model takes some."""
    found: list[Any] = ["a red circle", [text("a blue square"), text("in the corner")]]
    if pipe.engine.preprocessor.takes_media:
        picture = PIL.Image.open(data_folder("skimage", "data") / "cell.png").convert("RGB")
        found.append([{"type": "image", "image": picture}])
        found.append([{"type": "image", "image": picture}, text("under a microscope")])
    return found


@torch.no_grad()
def hidden(path: Path, messages: list[dict[str, Any]], **variables: Any) -> torch.Tensor:
    """The last token's hidden state behind the last norm; `variables`: of the template."""
    inputs = dict(media_reference.inputs(path, messages, **variables))
    return torch.as_tensor(oracle.model(path).model(**inputs).last_hidden_state[0, -1]).float()


def test_embeddings_equal_those_of_transformers(checkpoint: Path, embedder: Pipeline) -> None:
    given = contents(embedder)
    for instruction in (None, INSTRUCTION):
        for _ in range(2):  # cold, then from the cache
            made = embedder.embed(given, instruction)
            for content, vector in zip(given, made, strict=True):
                expected = hidden(checkpoint, embedding_messages(content, instruction))
                expected = torch.nn.functional.normalize(expected, dim=0)
                np.testing.assert_allclose(vector, expected.numpy(), atol=1e-4, rtol=0)
    embedder.engine.check()
    prompt = embedder.engine.preprocessor.prepare(embedding_messages(given[0], INSTRUCTION))
    (again,) = answer_prepared(embedder, [prompt], [pooling.ONE_TOKEN], pooled=True)
    assert again.usage.cached_tokens >= len(prompt) - 16


def test_scores_equal_those_of_transformers(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Tokens that small vocabularies have too.
    words = ("a", "b")
    monkeypatch.setattr(pooling, "JUDGEMENTS", words)
    with Pipeline(checkpoint, EngineConfig(task="rerank", **PLAIN)) as pipe:
        given, query = contents(pipe), "What is red?"
        yes, no = (pipe.engine.preprocessor.tokenizer.encode(each) for each in words)
        head = oracle.model(checkpoint).lm_head.weight.detach()
        rows = head[yes[0]] - head[no[0]]
        for instruction in (None, INSTRUCTION):
            made = pipe.rerank(query, given, instruction)
            for content, score in zip(given, made, strict=True):
                plain = not pipe.engine.preprocessor.takes_media
                messages = rerank_messages(query, content, instruction, plain=plain)
                last = hidden(checkpoint, messages, **({"enable_thinking": False} if plain else {}))
                assert score == pytest.approx(float(torch.sigmoid(last @ rows)), abs=1e-4)


def test_pooling_engines_generate_nothing_and_others_pool_nothing(
    checkpoint: Path, embedder: Pipeline
) -> None:
    with pytest.raises(InvalidRequestError, match="started with --task embed"):
        embedder.generate(random_ids(20, 1))
    with (
        Pipeline(checkpoint, EngineConfig(**PLAIN)) as pipe,
        pytest.raises(InvalidRequestError, match="start another one with --task embed"),
    ):
        pipe.embed(["a"])


def test_a_vocabulary_without_yes_reranks_nothing(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="needs a token for 'yes'"):
        Pipeline(checkpoint, EngineConfig(task="rerank", **PLAIN))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"tensor_parallel_size": 2}, "task 'embed' runs on one rank"),
        ({"speculative": "suffix"}, "task 'embed' makes no tokens to draft"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    checkpoint: Path, options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Pipeline(checkpoint, EngineConfig(task="embed", **PLAIN, **options))


def test_a_plan_counts_what_the_task_loads(checkpoint: Path, embedder: Pipeline) -> None:
    planned = make(str(checkpoint), EngineConfig(task="embed", **PLAIN)).weights
    loaded = embedder.engine.weights
    assert (planned.projections, planned.table) == (loaded.projections, loaded.table)
    scoring = make(str(checkpoint), EngineConfig(task="rerank", **PLAIN)).weights
    answering = make(str(checkpoint), EngineConfig(**PLAIN)).weights
    assert max(scoring.projections, planned.projections) < answering.projections
    with pytest.raises(ConfigError, match="task 'embed' runs on one rank"):
        make(str(checkpoint), EngineConfig(task="embed", tensor_parallel_size=2, **PLAIN))


def test_embeddings_are_cut_before_they_are_normalised() -> None:
    vector = np.arange(1, 9, dtype=np.float32)
    cut = embedding_of(vector, 4)
    assert cut.shape == (4,)
    assert float(np.linalg.norm(cut)) == pytest.approx(1.0)
    assert not embedding_of(np.zeros(3, np.float32)).any()


def test_scores_are_probabilities() -> None:
    for logits in ([0.0, 0.0], [1000.0, -1000.0], [-1000.0, 1000.0]):
        assert 0.0 <= score_of(np.array(logits, np.float32)) <= 1.0
    assert score_of(np.array([2.0, 0.5], np.float32)) == pytest.approx(1 / (1 + np.exp(-1.5)))


def test_what_is_no_content_is_explained(embedder: Pipeline) -> None:
    wrong: Any
    for wrong in ("a red circle", {"type": "text", "text": "a"}, 5):
        with pytest.raises(InvalidRequestError, match="contents must be a list"):
            embedder.embed(wrong)
        with pytest.raises(InvalidRequestError, match="contents must be a list"):
            embedder.rerank("red", wrong)
    for wrong in ([5], [["a"]], [None]):
        with pytest.raises(InvalidRequestError, match="a content must be a text, or a list"):
            embedder.embed(wrong)


def test_instructions_end_in_punctuation() -> None:
    for given, told in ((None, "Represent the user's input."), (" Find cats ", "Find cats.")):
        assert embedding_messages("x", given)[0]["content"][0]["text"] == told
    assert embedding_messages("", "Why?")[1]["content"] == [text("NULL")]


@pytest.mark.interpreter
@pytest.mark.skipif(not interpreted(), reason="needs Triton's interpreter")
@pytest.mark.parametrize("task", ["embed", "rerank"])
def test_vectors_come_from_captured_steps(
    task: Literal["embed", "rerank"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their results have other columns than logits."""
    monkeypatch.setattr(pooling, "JUDGEMENTS", ("a", "b"))
    checkpoint = make_checkpoint(tmp_path, step_graphs.SPECS["attention alone"])
    config = EngineConfig(
        task=task, max_num_seqs=1, max_model_len=64, compiled_kernels=False, **PLAIN
    )
    ids = [7 * place % 301 for place in range(20)]

    def vector(pipe: Pipeline) -> np.ndarray[Any, Any]:
        prompt = pipe.engine.preprocessor.prepare_tokens(ids)
        (made,) = answer_prepared(pipe, [prompt], [pooling.ONE_TOKEN], pooled=True)
        pipe.engine.check()
        assert made.vector is not None
        return made.vector

    with Pipeline(checkpoint, config) as pipe:
        expected = vector(pipe)
    device = QueuedDevice()
    with_queue(monkeypatch, device)
    with Pipeline(checkpoint, config) as pipe:
        np.testing.assert_allclose(vector(pipe), expected, atol=1e-4, rtol=0)
    assert device.calls
