"""Files whose numbers are larger than they are: one sentence, before anything is as large."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf_writer
import pytest

import vlm_serve
from vlm_serve.commands.plan import make
from vlm_serve.errors import CheckpointError, ConfigError
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Pipeline

DEMO = Path(vlm_serve.__file__).parent / "demo"
CONFIG = EngineConfig(cache_memory="32MiB", threads=1)
HUGE = (1 << 31) - 1
LONGEST = 400
NAMELESS = ("token_id", "max_position_embeddings", "interval", "num_experts_per_tok")
"""Numbers of config.json that are no sizes of tensors."""


def sizes(fields: Mapping[str, Any], place: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the places of all whole numbers that are sizes."""
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from sizes(value, (*place, name))
        elif type(value) is int and not any(part in name for part in NAMELESS):
            yield (*place, name)


def raw(demo: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((DEMO / demo / "config.json").read_text())
    return content


SIZES = [(demo, place) for demo in ("dense", "moe") for place in sizes(raw(demo))]


def changed(demo: str, place: tuple[str, ...], value: int, folder: Path) -> Path:
    """The demo model with a number in config.json changed."""
    config = raw(demo)
    fields = config
    for name in place[:-1]:
        fields = fields[name]
    fields[place[-1]] = value
    if place[-1] == "num_hidden_layers":
        fields.pop("layer_types", None)
    for file in (DEMO / demo).iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("value", [HUGE, 1 << 62, 4000])
@pytest.mark.parametrize(("demo", "place"), SIZES, ids=lambda each: str(each))
def test_sizes_of_config_json_are_compared_with_the_weights(
    demo: str, place: tuple[str, ...], value: int, tmp_path: Path
) -> None:
    folder = changed(demo, place, value, tmp_path)
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        make(str(folder), CONFIG)
        with Pipeline(folder, CONFIG):  # A size that the weights could have is found with them.
            pass
    assert len(caught.value.message) < LONGEST and "\n" not in caught.value.message


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return gguf_writer.write_model(
        DEMO / "dense", tmp_path_factory.mktemp("gguf") / "model.gguf"
    ).read_bytes()


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return gguf_writer.write_tower(
        DEMO / "dense", tmp_path_factory.mktemp("tower") / "mmproj.gguf"
    ).read_bytes()


def lying(content: bytes, key: str, value: int) -> bytes:
    """A file with another number for a key."""
    place = content.index(key.encode() + struct.pack("<I", 4)) + len(key) + 4
    return content[:place] + struct.pack("<I", value) + content[place + 4 :]


def refused(model: bytes, folder: Path, tower: bytes | None = None) -> str:
    (folder / "model.gguf").write_bytes(model)
    if tower is not None:
        (folder / "mmproj.gguf").write_bytes(tower)
    name = None if tower is None else str(folder / "mmproj.gguf")
    with pytest.raises(CheckpointError) as caught:
        make(str(folder / "model.gguf"), EngineConfig(cache_memory="32MiB", mmproj=name))
    assert len(caught.value.message) < LONGEST and "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize(
    "key",
    [
        *("block_count", "embedding_length", "feed_forward_length", "attention.head_count"),
        *("attention.head_count_kv", "attention.key_length", "ssm.conv_kernel", "ssm.state_size"),
        *("ssm.group_count", "ssm.time_step_rank", "ssm.inner_size"),
    ],
)
def test_sizes_of_a_gguf_file_are_compared_with_its_tensors(
    model: bytes, key: str, tmp_path: Path
) -> None:
    assert "model.gguf" in refused(lying(model, f"qwen35.{key}", HUGE), tmp_path)


def test_layers_of_a_gguf_file_are_counted(model: bytes, tmp_path: Path) -> None:
    """Also without the list of those with a state, which is as long as there are layers."""
    listed = b"attention.recurrent_layers"
    content = model.replace(listed, b"attention.recurrent_layerz")
    assert content != model
    told = refused(lying(content, "qwen35.block_count", HUGE), tmp_path)
    assert told == f"model.gguf says that it has {HUGE} layers, but has tensors blk.N of 4"


@pytest.mark.parametrize(
    "key",
    [
        *("block_count", "patch_size", "embedding_length", "feed_forward_length"),
        *("attention.head_count", "projection_dim", "spatial_merge_size"),
    ],
)
def test_sizes_of_a_tower_are_compared_with_its_tensors(
    model: bytes, tower: bytes, key: str, tmp_path: Path
) -> None:
    assert "mmproj.gguf" in refused(model, tmp_path, lying(tower, f"clip.vision.{key}", HUGE))
