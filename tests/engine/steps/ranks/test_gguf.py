"""Models in GGUF files over two ranks, which cut rows of columns inside of a block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoint_spec import CheckpointSpec
from exactness import next_turn_pairs, random_pairs
from gguf import GGMLQuantizationType as Kind
from gguf_writer import WIDE, blocks, write_model
from make_checkpoint import make_checkpoint
from parity import greedy
from parity_cases import conversations, random_ids
from rank_processes import on_ranks_of, rank_processes
from sweeps import quick

from vlm_serve.commands.plan import make
from vlm_serve.engine.steps.ranks.process import RankProcesses
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Pipeline

pytestmark = pytest.mark.usefixtures("compiler")
TEXT: dict[str, Any] = WIDE | {"vision_depth": 0}
SPECS = {
    "qwen3": CheckpointSpec(family="qwen3", **TEXT),
    "qwen3_5": CheckpointSpec(gdn_key_heads=2, gdn_value_heads=4, **TEXT),
    "qwen3_5 moe": CheckpointSpec(gdn_key_heads=2, gdn_value_heads=4, num_experts=4, **TEXT),
}
CONFIG = EngineConfig(
    dtype="float32",
    block_size=16,
    cache_memory="64MiB",
    tensor_parallel_size=2,
    threads=1,
    quantized_activations="none",
    prefix_cache_decode_state_interval=16,
)
CASES = [(name, kind) for name in SPECS for kind in ("Q4_K", "Q6_K", "Q5_K", "Q8_0")]


@pytest.fixture(scope="module")
def processes() -> Iterator[RankProcesses]:
    with rank_processes(2) as started:
        yield started


@pytest.mark.parametrize(
    ("name", "kind"), quick(CASES, [("qwen3", "Q4_K"), ("qwen3_5", "Q6_K")], several=True)
)
def test_answers_and_hits(processes: RankProcesses, tmp_path: Path, name: str, kind: str) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", SPECS[name])
    file = write_model(checkpoint, tmp_path / "model.gguf", blocks(Kind[kind]))
    chats = list(conversations(media=False).values())[:4]
    alone = replace(CONFIG, tensor_parallel_size=1)
    with Pipeline(file, alone) as pipe:
        expected = [each.token_ids for each in pipe.chat_many(chats, greedy(24))]
        expected.append(pipe.generate(random_ids(150, 5), greedy(24)).token_ids)
    with on_ranks_of(processes, file, CONFIG) as pipe:
        found = [each.token_ids for each in pipe.chat_many(chats, greedy(24))]
        found.append(pipe.generate(random_ids(150, 5), greedy(24)).token_ids)
        assert found == expected
        pairs = [*random_pairs(pipe, 8, seed=1)]
        pairs += [pair for pair, _ in next_turn_pairs(pipe, 4, seed=2)]
        assert all(pair.same_bits and pair.same_tokens for pair in pairs)
        shared = pipe.engine.weights
    planned = make(str(file), CONFIG).weights
    whole = make(str(file), alone).weights
    assert shared == planned and shared.projections < 0.6 * whole.projections
