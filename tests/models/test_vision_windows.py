"""MiniCPM-V's vision tower equals transformers', alone and in company, in both of its modes."""

from __future__ import annotations

import json
from pathlib import Path

import oracle
import pytest
import torch
from checkpoint_spec import CheckpointSpec
from families import SPECS
from make_checkpoint import make_checkpoint

from vlm_serve.models import load_model
from vlm_serve.models.vision_parts import nested_order

GRIDS = [(1, 4, 8), (1, 8, 8), (1, 8, 8), (1, 12, 4), (1, 4, 4), (1, 8, 8)]
PATCH_DIM = 3 * 8 * 8
MODES = {"16x": 4, "4x": 2}


@pytest.fixture(scope="module", params=["minicpm", "minicpm, 4x, tied"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("vision"), SPECS[request.param])


def random_patches() -> torch.Tensor:
    total = sum(height * width for _, height, width in GRIDS)
    return torch.randn(total, PATCH_DIM, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def expected(path: Path, mode: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """transformers takes `[1, 3, patch, patches * patch]`."""
    pixels = random_patches().view(-1, 3, 8, 8).permute(1, 2, 0, 3).reshape(1, 3, 8, -1)
    sizes = torch.tensor([grid[1:] for grid in GRIDS], dtype=torch.int32)
    model = oracle.model(path, dtype).model
    features = model.get_image_features(pixels.to(dtype), sizes, downsample_mode=mode)
    return torch.cat(features.pooler_output)


@pytest.mark.parametrize("mode", MODES)
def test_equals_transformers(path: Path, mode: str) -> None:
    model = load_model(path, torch.float32, "cpu")
    got = model.encode_media(random_patches(), GRIDS, [MODES[mode]] * len(GRIDS))
    assert [len(one) for one in got] == [h * w // MODES[mode] ** 2 for _, h, w in GRIDS]
    torch.testing.assert_close(torch.cat(got), expected(path, mode), atol=1e-5, rtol=0)


def test_the_mode_of_the_config_is_what_nobody_names(path: Path) -> None:
    model = load_model(path, torch.float32, "cpu")
    mode = json.loads((path / "config.json").read_text())["downsample_mode"]
    one, two = (model.encode_media(random_patches(), GRIDS, m) for m in (None, [MODES[mode]] * 6))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_company_does_not_matter(path: Path, dtype: torch.dtype) -> None:
    """Nor does it matter that some of the others are seen in the other mode."""
    model, patches = load_model(path, dtype, "cpu"), random_patches()
    merges = [4, 2, 4, 4, 2, 4]
    together = model.encode_media(patches, GRIDS, merges, deterministic=True)
    start = 0
    for grid, merge, joint in zip(GRIDS, merges, together, strict=True):
        part = patches[start : start + grid[1] * grid[2]]
        start += grid[1] * grid[2]
        (alone,) = model.encode_media(part, [grid], [merge], deterministic=True)
        assert alone.dtype == dtype
        assert torch.equal(alone, joint)


@pytest.mark.parametrize("mode", MODES)
def test_bfloat16_is_as_good_as_transformers(path: Path, mode: str) -> None:
    exact, theirs = expected(path, mode), expected(path, mode, torch.bfloat16)
    model = load_model(path, torch.bfloat16, "cpu")
    ours = torch.cat(model.encode_media(random_patches(), GRIDS, [MODES[mode]] * len(GRIDS)))
    assert (ours - exact).square().mean() <= 1.2 * (theirs - exact).square().mean()


def test_squares_in_squares() -> None:
    """Worked out by hand: 4x4 patches of one token, then those of the next."""
    order = nested_order(4, 8, 4).tolist()
    assert order[:16] == [0, 1, 8, 9, 2, 3, 10, 11, 16, 17, 24, 25, 18, 19, 26, 27]
    assert order[16:20] == [4, 5, 12, 13]
    assert nested_order(2, 4, 2).tolist() == [0, 1, 4, 5, 2, 3, 6, 7]


def test_misuse(path: Path) -> None:
    model = load_model(path, torch.float32, "cpu")
    assert model.encode_media(torch.zeros(0, PATCH_DIM), []) == []
    with pytest.raises(AssertionError, match="do not fit"):
        model.encode_media(torch.zeros(3, PATCH_DIM), [(1, 4, 4)])
    with pytest.raises(AssertionError, match="whole tokens"):
        model.encode_media(torch.zeros(8, PATCH_DIM), [(1, 2, 4)], [4])


def test_qwens_tower_merges_in_one_way(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, CheckpointSpec(num_layers=1, full_attention_interval=1))
    model = load_model(path, torch.float32, "cpu")
    with pytest.raises(AssertionError, match="one way"):
        model.encode_media(torch.zeros(16, 3 * 2 * 64), [(1, 4, 4)], [4])
