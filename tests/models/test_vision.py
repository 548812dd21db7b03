"""The vision tower equals transformers', alone and in company."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from checkpoint_spec import CheckpointSpec
from make_checkpoint import make_checkpoint

from vlm_serve.kernels import native_library
from vlm_serve.models import Model, load_model, vision

SPEC = CheckpointSpec(num_layers=4, vision_depth=3, vision_heads=4, vision_hidden_size=48)
SPECS = {
    "plain": SPEC,
    "deepstack": replace(SPEC, family="qwen3_vl"),
    "heads of whole vectors": replace(SPEC, vision_hidden_size=64),
}
PATCH_DIM = 3 * 2 * 8 * 8
GRIDS = [(1, 2, 2), (1, 4, 6), (1, 4, 6), (1, 6, 4), (1, 2, 20), (1, 4, 6)]


@pytest.fixture(scope="module", params=SPECS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("vision"), SPECS[request.param])


@pytest.fixture(scope="module", params=["compiled", "by ops"])
def compiled(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "compiled")


@pytest.fixture(scope="module")
def model(path: Path, compiled: bool) -> Model:
    return load_model(path, torch.float32, "cpu", compiled=compiled)


def test_compiled_code_is_called_once(
    path: Path, model: Model, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []

    def counted(name: str, *arguments: Any) -> None:
        names.append(name)
        native_library.call(name, *arguments)

    monkeypatch.setattr(vision, "call", counted)
    patches = random_patches(GRIDS)
    model.encode_media(patches, GRIDS)
    assert names == ["vlm_step"] * compiled


def random_patches(grids: list[tuple[int, int, int]]) -> torch.Tensor:
    total = sum(height * width for _, height, width in grids)
    return torch.randn(total, PATCH_DIM, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def expected(path: Path, patches: torch.Tensor, grids: list[tuple[int, int, int]]) -> torch.Tensor:
    return encoded(oracle.model(path).model.visual, patches, grids)


def encoded(tower: Any, patches: torch.Tensor, grids: list[tuple[int, int, int]]) -> torch.Tensor:
    """Embeddings, and features behind them."""
    output = tower(patches, grid_thw=torch.tensor(grids))
    return torch.cat([output.pooler_output, *getattr(output, "deepstack_features", ())], dim=1)


def test_equals_transformers(path: Path, model: Model) -> None:
    patches = random_patches(GRIDS)
    got = model.encode_media(patches, GRIDS)
    assert [len(one) for one in got] == [h * w // 4 for _, h, w in GRIDS]
    torch.testing.assert_close(torch.cat(got), expected(path, patches, GRIDS), atol=1e-5, rtol=0)


def test_a_video_is_its_temporal_patches(path: Path, model: Model) -> None:
    grids = [(1, 4, 4)] * 3
    patches = random_patches(grids)
    got = torch.cat(model.encode_media(patches, grids))
    torch.testing.assert_close(got, expected(path, patches, [(3, 4, 4)]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_company_does_not_matter(path: Path, dtype: torch.dtype, compiled: bool) -> None:
    model = load_model(path, dtype, "cpu", compiled=compiled)
    patches = random_patches(GRIDS)
    together = model.encode_media(patches, GRIDS, deterministic=True)
    start = 0
    for grid, joint in zip(GRIDS, together, strict=True):
        part = patches[start : start + grid[1] * grid[2]]
        start += grid[1] * grid[2]
        (alone,) = model.encode_media(part, [grid], deterministic=True)
        assert alone.dtype == dtype
        assert torch.equal(alone, joint)


def test_other_patch_and_merge_sizes(tmp_path: Path, compiled: bool) -> None:
    spec = CheckpointSpec(
        num_layers=1, full_attention_interval=1, patch_size=4, spatial_merge_size=3, vision_depth=1
    )
    path = make_checkpoint(tmp_path, spec)
    grids = [(1, 3, 6), (1, 9, 3)]
    patches = torch.randn(45, 3 * 2 * 4 * 4)
    model = load_model(path, torch.float32, "cpu", compiled=compiled)
    got = model.encode_media(patches, grids)
    assert [len(one) for one in got] == [2, 3]
    torch.testing.assert_close(torch.cat(got), expected(path, patches, grids), atol=1e-5, rtol=0)


def test_bfloat16_is_as_good_as_transformers(path: Path, compiled: bool) -> None:
    patches = random_patches(GRIDS)
    exact = expected(path, patches, GRIDS)
    tower = oracle.model(path, torch.bfloat16).model.visual
    with torch.no_grad():
        theirs = encoded(tower, patches.bfloat16(), GRIDS)
    model = load_model(path, torch.bfloat16, "cpu", compiled=compiled)
    ours = torch.cat(model.encode_media(patches, GRIDS))
    assert (ours - exact).square().mean() <= 1.2 * (theirs - exact).square().mean()


def test_misuse(model: Model, tmp_path: Path) -> None:
    assert model.encode_media(torch.zeros(0, PATCH_DIM), []) == []
    with pytest.raises(AssertionError, match="do not fit"):
        model.encode_media(torch.zeros(3, PATCH_DIM), [(1, 2, 2)])
    with pytest.raises(AssertionError, match="one temporal patch"):
        model.encode_media(torch.zeros(8, PATCH_DIM), [(2, 2, 2)])
    text_only = make_checkpoint(tmp_path, CheckpointSpec(num_layers=1, vision_depth=0))
    with pytest.raises(AssertionError, match="no vision tower"):
        load_model(text_only, torch.float32, "cpu").encode_media(torch.zeros(0, 1), [])
