"""Tables of tiles: what they change, what they must keep, and that they are in the numerics."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.common.gpu_table import LEAST_GAIN, Timed, best_tiles, write_table
from vlm_serve.engine.numerics.arithmetic import Backend, decide
from vlm_serve.engine.numerics.dependence import USUAL
from vlm_serve.engine.numerics.invariance import promise
from vlm_serve.errors import ConfigError
from vlm_serve.kernels import tuning
from vlm_serve.kernels.linear import few_codes_triton
from vlm_serve.kernels.linear.few_rows_triton import tile_of
from vlm_serve.kernels.paged_attention.tiles_triton import decode_tile
from vlm_serve.kernels.triton_support import Target, record_launches
from vlm_serve.kernels.tuning import FIXED_STEPS
from vlm_serve.kernels.tuning_check import check_table
from vlm_serve.options.config import EngineConfig

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
        ({"few rows of codes, narrow": {"lanes": 24}}, "lanes cannot be 24"),
        ({"few rows of codes": {"columns": 256, "stages": 8}}, "bytes of shared memory"),
        ({"few rows": {"depth": "deep"}}, "no table of tiles"),
    ],
)
def test_what_a_table_must_keep(ops: dict[str, Any], said: str, write: Write) -> None:
    write(ops)
    with pytest.raises(ConfigError, match=said):
        check_table(90)


@pytest.mark.parametrize(
    "op", ["few row", "few rows, wide", "few rows, narrow, narrow", "attention decode", "scan"]
)
def test_an_unknown_op_is_named_at_start(op: str, write: Write, on_h100: None) -> None:
    write({op: {"warps": 4}})
    with pytest.raises(ConfigError, match=f"sm_90.json: no op has the name '{op}'"):
        decide(EngineConfig(), HALF, Backend(torch.device("cuda", 0)))


def test_what_no_launch_has_read_is_checked_at_start(write: Write, on_h100: None) -> None:
    write({"few rows": {"depth": 64}, "attention decode, head dim 128": {"stages": 9}})
    with pytest.raises(ConfigError, match="head dim 128: stages cannot be 9"):
        decide(EngineConfig(), HALF, Backend(torch.device("cuda", 0)))


def test_the_usual_tiles_fit_everywhere() -> None:
    for architecture in (80, 89, 90, 100, 120):
        target = Target("cuda", architecture)
        with record_launches(target):
            for gated in (False, True):
                for columns in (100, 5000):
                    tile = tile_of(HALF, columns, gated)
                    taken = 2 * tile.stages * tile.depth * ((1 + gated) * tile.columns + 16)
                    assert taken <= target.shared_memory


@pytest.fixture
def on_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def test_a_table_is_in_the_numerics(write: Write, on_h100: None) -> None:
    def numerics() -> str:
        return decide(EngineConfig(), torch.bfloat16, Backend(torch.device("cuda", 0))).numerics

    without = numerics()
    names = set()
    for depth in (64, 128):
        write({"few rows": {"depth": depth}})
        assert f"tiles {tuning.digest(90)}" in numerics()
        names.add(numerics())
    assert len(names) == 2 and without not in names and "tiles" not in without


def timed(fields: dict[str, int], us: float | None, **more: Any) -> Timed:
    return Timed("few rows", fields, more.pop("usual", False), us, **more)


def test_a_table_is_written_from_what_was_measured_and_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [
        timed({"columns": 32, "depth": 128}, 10.0, usual=True),
        timed({"columns": 16, "depth": 256}, 8.0),
        timed({"columns": 16, "depth": 64}, 5.0, difference=0.5),
        timed({"columns": 64, "depth": 64}, None),
        Timed("", {"warps": 8}, False, 1.0),
    ]
    before = {DECODE: {"keys": 64}}
    ops = best_tiles(runs, before)
    assert ops == {DECODE: {"keys": 64}, "few rows": {"columns": 16, "depth": 256}}
    folder = tmp_path / "new"
    path = write_table(folder, 90, ops, {"card": "NVIDIA H100 80GB HBM3"})
    assert path.name == "sm_90.json"
    monkeypatch.setattr(tuning, "FOLDER", folder)
    tuning.table.cache_clear()
    check_table(90)
    few, decode = tiles()
    assert (few.columns, few.depth, decode.keys) == (16, 256, 64)
    tuning.table.cache_clear()


def test_a_tile_that_is_hardly_faster_stays_out_of_the_table() -> None:
    usual = timed({"columns": 32}, 100.0, usual=True)
    close = timed({"columns": 16}, 100.0 * (1 - LEAST_GAIN) + 0.1)
    assert best_tiles([usual, close], {}) == {}
    assert best_tiles([usual, close], {"few rows": {"warps": 8}}) == {"few rows": {"warps": 8}}
    # Without the usual tile's time nothing is known to be faster.
    assert best_tiles([close], {}) == {}


def test_products_of_codes_have_tiles_in_tables(write: Write) -> None:
    with record_launches(Target("cuda", 90)):
        usual = few_codes_triton.tile_of(HALF, 5000)
        write({"few rows of codes": {"columns": 8, "stages": 6}})
        assert few_codes_triton.tile_of(HALF, 5000) == usual._replace(columns=8, stages=6)
        assert few_codes_triton.tile_of(HALF, 4095) != few_codes_triton.tile_of(HALF, 4096)


def test_a_table_may_choose_the_fixed_product(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "architecture_of", lambda device: 90)
    device = torch.device("cuda")
    for fixed, reach in ((0, "none"), (1, "prompts")):
        write({FIXED_STEPS: {"fixed": fixed}})
        check_table(90)
        assert tuning.fixed_steps(device) == bool(fixed)
        assert promise(device, compiled=False, wanted=False).reach == reach
    seeing = promise(device, compiled=False, wanted=False, parts=USUAL | {"tower"})
    assert seeing.reach == "none" and len(seeing.blamed) == 1
    write({FIXED_STEPS: {"fixed": 2}})
    with pytest.raises(ConfigError, match="no op has the name 'steps with prompts'"):
        check_table(90)
    monkeypatch.setattr(tuning, "architecture_of", lambda device: None)
    assert not tuning.fixed_steps(device)


@pytest.mark.parametrize(
    ("fixed", "difference", "chosen"),
    [(109, 0.0, 1), (111, 0.0, 0), (50, 0.1, 0), (None, 0.0, None)],
)
def test_the_fixed_product_may_be_a_tenth_slower(
    fixed: float | None, difference: float, chosen: int | None
) -> None:
    timed = [
        Timed(FIXED_STEPS, {"fixed": 0}, False, 100.0),
        Timed(FIXED_STEPS, {"fixed": 1}, False, fixed, difference),
    ]
    assert best_tiles(timed, {}) == ({} if chosen is None else {FIXED_STEPS: {"fixed": chosen}})
