"""Tables of tiles: what they change, what they must keep, and that they are in the numerics."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from vlm_serve.config import EngineConfig
from vlm_serve.engine.arithmetic import Backend, decide
from vlm_serve.errors import ConfigError
from vlm_serve.kernels import tuning
from vlm_serve.kernels.linear.few_rows_triton import tile_of
from vlm_serve.kernels.paged_attention.tiles_triton import decode_tile
from vlm_serve.kernels.triton_support import Target, record_launches

Write = Callable[[dict[str, Any]], None]
HALF = torch.bfloat16
DECODE = "attention decode, head dim 256"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes the table of sm_90."""
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)

    def written(ops: dict[str, Any]) -> None:
        (tmp_path / "sm_90.json").write_text(json.dumps({"ops": ops}))
        tuning.table.cache_clear()

    tuning.table.cache_clear()
    yield written
    tuning.table.cache_clear()


def tiles(architecture: int = 90) -> tuple[Any, Any]:
    with record_launches(Target("cuda", architecture)):
        return tile_of(HALF, 5000), decode_tile(HALF, 256, 4)


def test_a_table_replaces_the_fields_that_it_names(write: Write) -> None:
    few, decode = tiles()
    write({"few rows": {"depth": 64, "stages": 3}, DECODE: {"warps": 8}})
    assert tiles() == (few._replace(depth=64, stages=3), replace(decode, warps=8))
    # Other architectures and other ops have no part in it.
    assert tiles(80)[0] == few
    with record_launches(Target("cuda", 90)):
        assert tile_of(HALF, 100) != tile_of(HALF, 5000)


@pytest.mark.parametrize(
    ("ops", "said"),
    [
        ({"few rows": {"colums": 32}}, "has no colums"),
        ({"few rows": {"depth": 100}}, "depth cannot be 100"),
        ({"few rows": {"warps": 16}}, "warps cannot be 16"),
        ({"few rows": {"stages": 0}}, "stages cannot be 0"),
        ({"few rows": {"columns": 128, "depth": 512}}, "bytes of shared memory"),
        ({DECODE: {"keys": 128, "stages": 8}}, "bytes of shared memory"),
        ({DECODE: {"rows": 32}}, "has no rows"),
        ({"few rows": 3}, "no table of tiles"),
        ({"few rows": {"depth": "deep"}}, "no table of tiles"),
    ],
)
def test_what_a_table_must_keep(ops: dict[str, Any], said: str, write: Write) -> None:
    write(ops)
    with pytest.raises(ConfigError, match=said):
        tiles()


def test_the_usual_tiles_fit_everywhere() -> None:
    for architecture in (80, 89, 90, 100, 120):
        target = Target("cuda", architecture)
        with record_launches(target):
            for gated in (False, True):
                for columns in (100, 5000):
                    tile = tile_of(HALF, columns, gated)
                    taken = 2 * tile.stages * tile.depth * ((1 + gated) * tile.columns + 16)
                    assert taken <= target.shared_memory


def test_a_table_is_in_the_numerics(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def numerics() -> str:
        return decide(EngineConfig(), torch.bfloat16, Backend(torch.device("cuda", 0))).numerics

    without = numerics()
    names = set()
    for depth in (64, 128):
        write({"few rows": {"depth": depth}})
        assert f"tiles {tuning.digest(90)}" in numerics()
        names.add(numerics())
    assert len(names) == 2 and without not in names and "tiles" not in without
