"""What weights take, from shapes alone, against what loaded models have."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoint_spec import CheckpointSpec
from make_checkpoint import make_checkpoint

from vlm_serve.kernels.linear import Linear
from vlm_serve.kernels.ranks import Ranks
from vlm_serve.models import Model, load_model, read_spec
from vlm_serve.models.decoder import Decoder
from vlm_serve.models.vision import VisionTower
from vlm_serve.models.weight_sizes import weight_bytes

SPEC = CheckpointSpec(hidden_size=160, num_layers=4, dtype="bfloat16")
SPECS = {
    "dense": SPEC,
    "tied": dataclasses.replace(SPEC, tied_embeddings=True),
    "experts": dataclasses.replace(SPEC, num_experts=6),
    "text": dataclasses.replace(SPEC, vision_depth=0),
    "features": dataclasses.replace(SPEC, family="qwen3_vl", num_experts=6, sparse_step=2),
    "per head": dataclasses.replace(SPEC, family="qwen3_next", num_experts=6, vision_depth=0),
}
# Columns in whole panels, as those of published models are.
QUANTISED = dataclasses.replace(SPEC, hidden_size=128, num_experts=4, gdn_value_heads=8)
KINDS = {
    "compiled": (torch.bfloat16, torch.float32, True),
    "widened": (torch.float32, torch.float32, True),
    "torch": (torch.float32, torch.float32, False),
}


def sizes(part: object) -> Iterator[int]:
    """Bytes of every projection and tensor of a part of a model."""
    if isinstance(part, Linear | torch.Tensor):
        yield part.nbytes
    elif isinstance(part, tuple):
        for each in part:
            yield from sizes(each)
    elif dataclasses.is_dataclass(part):
        for field in dataclasses.fields(part):
            yield from sizes(getattr(part, field.name))
    elif isinstance(part, Model | Decoder | VisionTower):
        for value in vars(part).values():
            yield from sizes(value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SPECS)
def test_sizes_are_those_of_a_loaded_model(tmp_path: Path, name: str, kind: str) -> None:
    path = make_checkpoint(tmp_path, SPECS[name])
    weights, compute, compiled = KINDS[kind]
    model = load_model(path, weights, "cpu", compute_dtype=compute, compiled=compiled)
    expected = weight_bytes(
        read_spec(path),
        weights=weights,
        compute=compute,
        device=torch.device("cpu"),
        compiled=compiled,
    )
    measured = sum(sizes(model))
    total = expected.projections + expected.others + expected.table
    assert measured == pytest.approx(total, rel=0.01)
    assert expected.mapped == (kind == "compiled")
    assert expected.in_memory == total - (expected.table if expected.mapped else 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["dense", "tied"])
@pytest.mark.parametrize("pooled", [(), (3, 7)])
def test_a_pooling_model_has_no_whole_head(
    tmp_path: Path, name: str, kind: str, pooled: tuple[int, ...]
) -> None:
    path = make_checkpoint(tmp_path, SPECS[name])
    weights, compute, compiled = KINDS[kind]
    model = load_model(
        path, weights, "cpu", compute_dtype=compute, compiled=compiled, pooled=pooled
    )
    expected, whole = (
        weight_bytes(
            read_spec(path),
            weights=weights,
            compute=compute,
            device=torch.device("cpu"),
            compiled=compiled,
            head_rows=rows,
        )
        for rows in (len(pooled), None)
    )
    total = expected.projections + expected.others + expected.table
    assert sum(sizes(model)) == pytest.approx(total, rel=0.001)
    assert expected.projections < whole.projections


@pytest.mark.parametrize(
    "kind", ["fp8", "fp8-fused", "gptq-mlp", "awq", "int8", "mixed", "mixed-modelopt"]
)
def test_sizes_of_quantised_weights(tmp_path: Path, kind: str) -> None:
    """From the config alone, and with what a loaded model knows of its checkpoint."""
    path = make_checkpoint(tmp_path, dataclasses.replace(QUANTISED, quantization=kind))
    model = load_model(path, torch.bfloat16, "cpu", compute_dtype=torch.float32, compiled=True)
    expected, known = (
        weight_bytes(
            read_spec(path),
            weights=torch.bfloat16,
            compute=torch.float32,
            device=torch.device("cpu"),
            compiled=True,
            quantised=quantised,
        )
        for quantised in (None, model.quantised)
    )
    assert expected == known
    measured = sum(sizes(model))
    assert measured == pytest.approx(known.in_memory + known.table, rel=0.02)
    named = dict(known.formats)
    assert sum(named.values()) == known.projections and named.pop("bfloat16") > 0
    assert len(named) == (2 if "mixed" in kind else 1)
    for name, size in named.items():
        assert size > 0 and name in str(known)


def test_dense_tensors_of_a_quantised_checkpoint_are_counted_as_such(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, dataclasses.replace(QUANTISED, quantization="gptq"))
    spec = read_spec(path)
    found, dense = (
        weight_bytes(
            spec,
            weights=torch.bfloat16,
            compute=torch.float32,
            device=torch.device("cpu"),
            compiled=True,
            quantised=quantised,
        )
        for quantised in (None, ())
    )
    assert not dense.formats and dense.projections > 1.5 * found.projections


def test_ranks_share_the_language_model(tmp_path: Path) -> None:
    config = read_spec(make_checkpoint(tmp_path, SPECS["text"]))
    whole, half = (
        weight_bytes(
            config,
            weights=torch.bfloat16,
            compute=torch.bfloat16,
            device=torch.device("cuda"),
            compiled=False,
            tensor_parallel=ranks,
        )
        for ranks in (1, 2)
    )
    assert (half.projections, half.table) == (whole.projections // 2, whole.table // 2)
    assert whole.others // 2 < half.others < whole.others
    assert not whole.mapped


@pytest.mark.parametrize("name", SPECS)
def test_a_rank_has_what_was_foreseen(tmp_path: Path, name: str) -> None:
    """Of four, which repeat the two heads of keys and values."""
    spec = dataclasses.replace(
        SPECS[name], gdn_key_heads=4, gdn_value_heads=8, moe_intermediate_size=64
    )
    path, size = make_checkpoint(tmp_path, spec), 4
    model = load_model(path, torch.float32, "cpu", ranks=Ranks(size - 1, size))
    expected = weight_bytes(
        read_spec(path),
        weights=torch.float32,
        compute=torch.float32,
        device=torch.device("cpu"),
        compiled=False,
        tensor_parallel=size,
    )
    assert sum(sizes(model)) == pytest.approx(expected.in_memory, rel=0.01)
    assert sum(sizes(model)) < 0.6 * sum(sizes(load_model(path, torch.float32, "cpu")))
