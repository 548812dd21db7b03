"""Republications of the text part of a vision-language model are served as text."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path

import oracle
import pytest
import torch
from families import SPECS
from make_checkpoint import make_checkpoint
from model_driver import Driver, text_sequence
from parity import greedy
from parity_cases import photograph, random_ids, user
from safetensors.torch import load_file, save_file

from vlm_serve.errors import CheckpointError, InvalidRequestError
from vlm_serve.models import load_model, read_spec
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Pipeline

TOKENS = [(7 * index * index + 3) % 300 for index in range(60)]


def without_tower(path: Path) -> Path:
    """Take the tensors of the tower out, wherever they are stored."""
    for file in path.glob("*.safetensors"):
        kept = {k: v for k, v in load_file(file).items() if "visual" not in k and "vpm" not in k}
        kept = {k: v for k, v in kept.items() if "language_model" in k or k.startswith("lm_head")}
        save_file(kept, file)
    index = path / "model.safetensors.index.json"
    if index.is_file():
        found = json.loads(index.read_text())
        known = {k: v for k, v in found["weight_map"].items() if "language_model" in k}
        known |= {k: v for k, v in found["weight_map"].items() if k.startswith("lm_head")}
        index.write_text(json.dumps(found | {"weight_map": known}))
    return path


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("name", ["dense", "vl", "vl moe", "minicpm"])
def test_text_is_answered_as_by_the_whole_model(tmp_path: Path, name: str, shards: int) -> None:
    spec = dataclasses.replace(SPECS[name], shards=shards)
    whole = make_checkpoint(tmp_path / "whole", spec)
    path = without_tower(make_checkpoint(tmp_path / "text", spec))
    expected = oracle.logits(whole, {"input_ids": torch.tensor([TOKENS])})
    got = Driver(load_model(path, torch.float32, "cpu")).prefill(text_sequence(TOKENS))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    assert read_spec(path).vision is None and read_spec(whole).vision is not None


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("name", ["dense", "vl", "vl moe"])
def test_the_section_of_text_is_a_model(tmp_path: Path, name: str, flat: bool) -> None:
    """The file names its own type, or the whole's."""
    whole = make_checkpoint(tmp_path / "whole", SPECS[name])
    path = without_tower(make_checkpoint(tmp_path / "text", SPECS[name]))
    raw = json.loads((path / "config.json").read_text())
    text = raw["text_config"] | {"tie_word_embeddings": raw["tie_word_embeddings"]}
    text |= {"model_type": raw["model_type"]} if flat else {}
    (path / "config.json").write_text(json.dumps(text))
    expected = oracle.logits(whole, {"input_ids": torch.tensor([TOKENS])})
    got = Driver(load_model(path, torch.float32, "cpu")).prefill(text_sequence(TOKENS))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    options = EngineConfig(dtype="float32", block_size=16, cache_memory="16MiB")
    with Pipeline(path, options) as pipe:
        assert not pipe.engine.preprocessor.takes_media


def test_the_start_says_so_and_pictures_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = without_tower(make_checkpoint(tmp_path, SPECS["dense"]))
    options = EngineConfig(dtype="float32", block_size=16, cache_memory="16MiB")
    with caplog.at_level(logging.WARNING, logger="vlm_serve"), Pipeline(path, options) as pipe:
        told = [each for each in caplog.messages if "served as text alone" in each]
        assert len(told) == 1
        first, again = (pipe.generate(random_ids(100, 1), greedy(8)) for _ in range(2))
        assert again.token_ids == first.token_ids and again.usage.cached_tokens
        with pytest.raises(InvalidRequestError, match="takes no images"):
            pipe.chat([user(photograph("cell.png"), "What is this?")], greedy(4))


def test_a_tower_that_lacks_one_tensor_is_an_error(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, SPECS["dense"])
    tensors = load_file(path / "model.safetensors")
    tensors.pop("model.visual.merger.norm.weight")
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no model\.visual\.merger\.norm\.weight"):
        load_model(path, torch.float32, "cpu")


def test_an_adapter_is_named_as_one(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="this is an adapter: merge it into its model"):
        read_spec(tmp_path)


def test_names_of_an_adapter_that_was_not_merged_are_named(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, SPECS["qwen3"])
    tensors = {
        name.replace(".o_proj.", ".o_proj.base_layer."): each
        for name, each in load_file(path / "model.safetensors").items()
    }
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"o_proj\.base_layer\.weight is part of an adapter"):
        load_model(path, torch.float32, "cpu")
