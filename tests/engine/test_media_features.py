"""What a vision tower adds behind the decoder's first layers is kept, counted and reused with the
embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from families import SPECS
from make_checkpoint import make_checkpoint
from parity import executor_of, greedy
from parity_cases import photograph, user

from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Pipeline

SPEC = SPECS["vl, features behind all layers but the last"]


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Pipeline]:
    config = EngineConfig(dtype="float32", block_size=16, cache_memory="64MiB")
    with Pipeline(make_checkpoint(tmp_path, SPEC), config) as made:
        yield made


def test_the_embedding_cache_counts_every_byte(pipe: Pipeline) -> None:
    output = pipe.chat([user(photograph("coffee.png"), "How many?")], greedy(2))
    pad = pipe.engine.preprocessor.tokenizer.special_tokens["<|image_pad|>"]
    tokens = output.prompt_token_ids.count(pad)
    kept = executor_of(pipe.engine)._embeddings.values()
    assert [tuple(rows.shape) for rows in kept] == [(tokens, (1 + 3) * SPEC.hidden_size)]
    assert pipe.engine._media.cache.used == sum(rows.nbytes for rows in kept)


def test_an_embedding_keeps_no_other_alive(pipe: Pipeline) -> None:
    """Two pictures encoded in one step leave the cache one by one."""
    pictures = (photograph("coffee.png"), photograph("rocket.jpg"))
    pipe.chat([user(*pictures, "What are these?")], greedy(1))
    kept = list(executor_of(pipe.engine)._embeddings.values())
    assert len(kept) == 2
    assert [rows.untyped_storage().nbytes() for rows in kept] == [rows.nbytes for rows in kept]


def test_features_survive_without_their_kv(pipe: Pipeline) -> None:
    """Behind other text the KV of a picture is of no use, but what the tower made is."""
    picture = photograph("coffee.png")
    cold = pipe.chat([user("Say:", picture, "How many?")], greedy(16))
    pipe.engine.flush()
    pipe.chat([user("Before that:", picture, "Which colours?")], greedy(1))
    warm = pipe.chat([user("Say:", picture, "How many?")], greedy(16))
    assert warm.cache_report.media_encoded == 0
    assert warm.usage.cached_tokens < len(cold.prompt_token_ids) // 2
    assert warm.token_ids == cold.token_ids
