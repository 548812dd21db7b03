"""Launches of every family's steps on a GPU stay below their ceilings, which only fall."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_spec import CheckpointSpec
from families import FAMILIES
from launch_counts import PARTS, Kind, Launches, Operations, count
from make_checkpoint import make_checkpoint

from vlm_serve.kernels.linear.few_rows import MOST_ROWS
from vlm_serve.kernels.triton_support import Target, record_launches
from vlm_serve.models import Model, load_model
from vlm_serve.models.adapters.changes import is_vision
from vlm_serve.models.parts.feed_forward import LoadedMlp

TABLE = Path(__file__).resolve().parents[1] / "data" / "launches.toml"
CEILINGS = tomllib.loads(TABLE.read_text(encoding="utf-8"))
KINDS: tuple[Kind, ...] = ("decode", "drafts", "prefill")


def model_of(family: str, folder: Path) -> Model:
    checkpoint = make_checkpoint(folder, next(iter(FAMILIES[family].values())))
    return load_model(checkpoint, torch.bfloat16, "meta")


def largest(found: dict[str, list[Launches]]) -> dict[str, list[int]]:
    return {part: max(each.numbers for each in own) for part, own in found.items()}


def test_the_table_has_every_family_and_gives_reasons() -> None:
    assert CEILINGS.keys() == {"why", *FAMILIES}
    assert CEILINGS["why"].keys() == {"step", *PARTS}


@pytest.mark.parametrize("family", FAMILIES)
def test_no_step_launches_more(family: str, tmp_path: Path) -> None:
    model = model_of(family, tmp_path)
    for kind in KINDS:
        found, ceilings = count(model, kind), CEILINGS[family][kind]
        for part, numbers in largest(found).items():
            names = [(dict(each.triton), dict(each.torch)) for each in found[part]]
            more = any(own > most for own, most in zip(numbers, ceilings[part], strict=True))
            assert not more, f"{kind}, {part}: more than {ceilings[part]}, namely {names}"
            assert numbers == ceilings[part], f"{kind}, {part}: lower the ceiling to {numbers}"
        assert found.keys() == ceilings.keys()


def test_a_launch_more_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, apply = model_of("qwen3", tmp_path), LoadedMlp.apply
    before = largest(count(model, "decode"))
    monkeypatch.setattr(
        LoadedMlp,
        "apply",
        lambda self, x, residual, step: apply(self, x, residual.clone(), step),
    )
    after = largest(count(model, "decode"))
    assert after["MLP"] == [before["MLP"][0], before["MLP"][1] + 1]
    assert after["attention"] == before["attention"]
    assert after["step"][1] == before["step"][1] + len(model._decoder.layers)


@pytest.mark.parametrize(
    ("copies", "operation"),
    [
        (True, lambda x: x.to(torch.float32)),
        (True, lambda x: x.t().contiguous()),
        (True, lambda x: x.t().reshape(-1)),
        (True, lambda x: x.add_(1)),
        (False, lambda x: x.to(torch.bfloat16)),
        (False, lambda x: x.contiguous()),
        (False, lambda x: x.reshape(-1)[2:].view(1, -1)),
        (False, lambda x: x.split(1)),
        (False, lambda x: torch.empty_like(x)),
    ],
)
@pytest.mark.parametrize("inference", [True, False])
def test_copies_that_are_called_views_are_seen(
    copies: bool, operation: Callable[[torch.Tensor], object], inference: bool
) -> None:
    with torch.inference_mode(inference), Operations() as found:
        operation(torch.empty(2, 3, dtype=torch.bfloat16, device="meta"))
    assert found.counts.total() == copies


@pytest.mark.parametrize(
    ("layers", "experts", "most"), [(32, 0, 240), (40, 8, 720)], ids=["4B", "35B-A3B"]
)
def test_a_decode_step_of_as_many_layers_as_a_published_model_has(
    layers: int, experts: int, most: int, tmp_path: Path
) -> None:
    spec = CheckpointSpec(num_layers=layers, num_experts=experts, vision_depth=0)
    model = load_model(make_checkpoint(tmp_path, spec), torch.bfloat16, "meta")
    for batch in (1, MOST_ROWS):
        (found,) = count(model, "decode", batch)["step"]
        assert sum(found.numbers) <= most, found
    # With more rows the products are the library's, and what is around them is apart.
    (found,) = count(model, "decode", MOST_ROWS + 1)["step"]
    assert sum(found.numbers) <= 1.5 * most, found


def changed_sites(model: Model) -> int:
    """Projections of the text model but for those of experts in one piece."""
    return sum(
        not is_vision(rows[0].module) and number not in model.modules.stacked
        for number, (rows, _) in enumerate(model.modules.sites, 1)
    )


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_adapters_take_a_launch_for_each_projection_of_a_few_rows(
    family: str, tmp_path: Path
) -> None:
    """Compute u in a launch of its own; the kernel of the product adds the change, and so does the
    fixed product. Where that of more rows is the library's, rows with an adapter have another."""
    model = model_of(family, tmp_path)
    sites = changed_sites(model)
    for rows in (1, MOST_ROWS, MOST_ROWS + 1):
        for fixed in (False, True):
            plain, changed = (
                count(model, "decode", rows, adapters=each, deterministic=fixed)["step"][0]
                for each in (False, True)
            )
            more, few = changed.minus(plain), rows <= MOST_ROWS
            assert more.triton["_down_kernel"] == sites, changed
            assert more.triton["_fixed_kernel"] == (0 if few or fixed else sites)
            assert not more.triton["_up_kernel"]
            assert changed.torch.total() == plain.torch.total(), changed


def test_rows_with_adapters_in_a_crowd_of_a_model_as_large_as_a_published_one(
    tmp_path: Path,
) -> None:
    spec = CheckpointSpec(num_layers=32, vision_depth=0)
    model = load_model(make_checkpoint(tmp_path, spec), torch.bfloat16, "meta")
    for fixed, most in ((False, 1.8), (True, 1.4)):
        for rows in (MOST_ROWS + 1, 64):
            plain, changed = (
                sum(
                    count(model, "decode", rows, adapters=each, deterministic=fixed)["step"][
                        0
                    ].numbers
                )
                for each in (False, True)
            )
            assert changed <= most * plain, (changed, plain)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_weights_take_their_norm_apart_and_nothing_else(
    bits: int, tmp_path: Path
) -> None:
    spec = CheckpointSpec(num_layers=4, vision_depth=0)
    path = make_checkpoint(tmp_path, spec)
    plain, quantised = (
        count(load_model(path, torch.bfloat16, "meta", bits=each), "decode", MOST_ROWS)
        for each in (None, bits)
    )
    for part in ("attention", "MLP"):
        usual, own = plain[part][-1], quantised[part][-1]
        assert usual.triton["_few_rows_kernel"] == own.triton["_few_codes_kernel"] == 2
        assert own.triton["_rms_kernel"] == 1
        assert own.triton.total() == usual.triton.total() + 1 and own.torch == usual.torch


def test_the_tower_of_a_megapixel(tmp_path: Path) -> None:
    """Count a tower as deep as the published ones. Rotation and activation took ten launches more a
    block."""
    model = load_model(
        make_checkpoint(tmp_path, CheckpointSpec(vision_depth=24)), torch.bfloat16, "meta"
    )
    patches = 4096
    tower = model.fixed_tower(patches)
    assert tower is not None
    tiles = torch.zeros(patches // 64, 3, dtype=torch.int32, device="meta")
    with record_launches(Target("cuda", 90)) as launches, Operations() as operations:
        tower.run(patches, tiles)
    assert not operations.hidden.total()
    assert len(launches) + operations.counts.total() <= 260, (len(launches), operations.counts)
