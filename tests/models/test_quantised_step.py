"""Models that are quantised while they are loaded: compiled steps against torch with the same
codes, which projections have how many bits, and what that takes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_spec import CheckpointSpec
from make_checkpoint import make_checkpoint
from model_driver import Driver, text_sequence
from quantised_codes import widened

from vlm_serve.kernels.linear import Joined, Linear
from vlm_serve.kernels.linear.codes import IntegerCodes
from vlm_serve.kernels.linear.packed_codes import PackedCodes
from vlm_serve.kernels.linear.quantising import quantised
from vlm_serve.kernels.native_layout import constant
from vlm_serve.models import Model, load_model, read_spec, weights
from vlm_serve.models.parts.feed_forward import LoadedExperts
from vlm_serve.models.weight_sizes import weight_bytes

SPECS = {
    "dense": CheckpointSpec(hidden_size=128, dtype="bfloat16"),
    "experts": CheckpointSpec(
        hidden_size=128, dtype="bfloat16", num_experts=6, experts_per_token=3
    ),
    "per head": CheckpointSpec(
        hidden_size=128, dtype="bfloat16", family="qwen3_next", num_experts=6, vision_depth=0
    ),
}

pytestmark = pytest.mark.usefixtures("compiler")


@pytest.fixture(scope="module", params=SPECS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("quantised"), SPECS[request.param])


def loaded(path: Path, bits: int | None, *, compiled: bool = True, dynamic: bool = False) -> Model:
    return load_model(
        path,
        torch.bfloat16 if compiled else torch.float32,
        "cpu",
        compute_dtype=torch.float32,
        compiled=compiled,
        bits=bits,
        dynamic=dynamic,
    )


def logits(model: Model, *, step: bool) -> torch.Tensor:
    """Of a prefill and of decode steps behind it."""
    driver = Driver(model, num_rows=8, num_blocks=32, block_size=16)
    if step:
        model.compile_steps(driver.caches)
    sequence = text_sequence(random.Random(0).choices(range(400), k=70))
    found = [driver.step(prefills=[(sequence, 0, 70)]).logits]
    for token in (5, 9, 2):
        sequence.tokens.append(token)
        found.append(driver.step([sequence]).logits)
    return torch.cat(found)


@pytest.mark.parametrize("bits", [8, 4])
def test_compiled_steps_equal_torch_with_the_same_codes(checkpoint: Path, bits: int) -> None:
    expected = logits(loaded(checkpoint, bits, compiled=False), step=False)
    size = float(expected.abs().max())
    for step in (False, True):
        got = logits(loaded(checkpoint, bits), step=step)
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4 * size)


@pytest.mark.parametrize("dynamic", [False, True])
def test_scales_of_one_byte_have_the_bits_of_those_in_float32(
    checkpoint: Path, dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [logits(loaded(checkpoint, 4, dynamic=dynamic), step=step) for step in (False, True)]

    def widely(*arguments: Any) -> Iterator[IntegerCodes]:
        for codes in quantised(*arguments):
            yield codes if codes.factors is None else widened(codes)

    size = bytes_of_codes(loaded(checkpoint, 4))
    monkeypatch.setattr(weights, "quantised", widely)
    assert bytes_of_codes(loaded(checkpoint, 4)) > size
    for step, narrow in zip((False, True), found, strict=True):
        assert torch.equal(logits(loaded(checkpoint, 4, dynamic=dynamic), step=step), narrow)


@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_activations_change_little(checkpoint: Path, bits: int) -> None:
    exact = logits(loaded(checkpoint, bits), step=True)
    dynamic = logits(loaded(checkpoint, bits, dynamic=True), step=True)
    difference = float((dynamic - exact).norm() / exact.norm())
    assert 0 < difference < 0.1


def bits_of(weight: Linear) -> list[int]:
    parts = weight.parts if isinstance(weight, Joined) else (weight,)
    wide = {constant("INT8"): 8, constant("INT6"): 6, constant("INT4"): 4}
    return [wide[part.record().type] if isinstance(part, PackedCodes) else 16 for part in parts]


def test_roles_decide_the_bits(checkpoint: Path) -> None:
    model = loaded(checkpoint, 4)
    decoder = model._decoder
    assert bits_of(decoder.head) == [6]
    for layer in decoder.layers:
        # What follows the codes are b and a.
        mixer, feed_forward = (branch.part for branch in layer.branches)
        expected = [4, 16] if hasattr(mixer, "conv") else [4]
        assert bits_of(mixer.in_proj) == expected  # type: ignore[union-attr]
        if isinstance(feed_forward, LoadedExperts):
            assert bits_of(feed_forward.router) == [16]
            down = feed_forward.down
            assert isinstance(down, tuple)
            assert {bits for each in down for bits in bits_of(each)} == {4}


@pytest.mark.parametrize("bits", [8, 4])
def test_what_they_take_is_foreseen(checkpoint: Path, bits: int) -> None:
    model = loaded(checkpoint, bits)
    spec = replace(read_spec(checkpoint), quantization=None)
    known = weight_bytes(
        spec,
        weights=torch.bfloat16,
        compute=torch.float32,
        device=torch.device("cpu"),
        compiled=True,
        bits=bits,
    )
    measured = bytes_of_codes(model)
    assert 0 < measured <= sum(size for name, size in known.formats if name.startswith("int"))


def bytes_of_codes(model: Model) -> int:
    """With the head's."""
    total = model._decoder.head.nbytes
    for layer in model._decoder.layers:
        for branch in layer.branches:
            total += sum(
                each.nbytes for each in vars_of(branch.part) if isinstance(each, PackedCodes)
            )
    return total


def vars_of(part: object) -> list[object]:
    """The projections of a part, one by one."""
    found: list[object] = []
    for name in part.__dataclass_fields__:  # type: ignore[attr-defined]
        value = getattr(part, name)
        for each in value if isinstance(value, tuple) else (value,):
            found += each.parts if isinstance(each, Joined) else (each,)
    return found
