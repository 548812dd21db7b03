"""Blocks as codes: parts of them, columns in another order, and what they take."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_blocks import HALVES, decode, put_scales, random_blocks

from vlm_serve.errors import CheckpointError
from vlm_serve.kernels.linear import Part, Shard
from vlm_serve.kernels.linear.codes import IntegerCodes
from vlm_serve.kernels.linear.packed_codes import PackedCodes
from vlm_serve.kernels.linear.stored_codes import stored
from vlm_serve.models.gguf.blocks import decode as codes_in
from vlm_serve.models.gguf.reader import BY_NAME
from vlm_serve.models.quantization.base import pieces
from vlm_serve.models.quantization.gguf import Blocks, type_rules
from vlm_serve.models.quantization.scheme import QuantScheme

KINDS = [name for name, kind in BY_NAME.items() if kind.quantised]
ROWS, DEPTH = 12, 512
NAME = "layers.0.mlp.up_proj.weight"


class Store:
    """One weight in blocks."""

    def __init__(self, kind: str, order: torch.Tensor | None = None) -> None:
        self.blocks = torch.from_numpy(random_blocks(kind, ROWS, DEPTH))
        self.values = torch.from_numpy(decode(self.blocks.numpy(), Kind[kind]))
        self._all = {f"{NAME}_{kind}": self.blocks, NAME: self.values}
        if order is not None:
            self._all[f"{NAME}_columns"] = order

    def __contains__(self, name: str) -> bool:
        return name in self._all

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        return tuple(self._all[name].shape) if name in self._all else None

    def stored(self, name: str) -> torch.Tensor:
        return self._all[name]


def values(store: Store, kind: str, part: Part, shard: Shard | None = None) -> torch.Tensor:
    opened = Blocks(BY_NAME[kind]).open(store, part)
    return torch.cat([each.values() for each in pieces(opened, part, shard)])


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_a_weight(kind: str) -> None:
    store = Store(kind)
    assert torch.equal(values(store, kind, Part(NAME, (ROWS, DEPTH))), store.values)
    some = Part(NAME, (ROWS, DEPTH), (range(2, 5), range(9, 10)))
    assert torch.equal(values(store, kind, some), store.values[[2, 3, 4, 9]])
    for size in (2, 4):
        for rank in range(size):
            own = Shard(rank, size, 1)
            columns = own.of(DEPTH)
            found = values(store, kind, some, own)
            assert torch.equal(found, store.values[[2, 3, 4, 9]][:, columns.start : columns.stop])


@pytest.mark.parametrize("head", [128, 64, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_columns_in_another_order(kind: str, head: int) -> None:
    order = torch.arange(DEPTH).view(-1, 2, head).transpose(0, 1).reshape(-1)
    store = Store(kind, order)
    wanted = store.values[:, order]
    part = Part(NAME, (ROWS, DEPTH))
    assert torch.equal(values(store, kind, part), wanted)
    assert torch.equal(values(store, kind, part, Shard(1, 4, 1)), wanted[:, 128:256])


@pytest.mark.parametrize("kind", KINDS)
def test_scales_that_are_no_numbers(kind: str) -> None:
    store = Store(kind)
    at = HALVES[kind][0] if HALVES[kind] else -1
    if kind == "IQ1_M":
        put_scales(store.blocks.numpy().reshape(ROWS, -1, 56), np.full((ROWS, 2), np.inf, "<f2"))
    store.blocks[7, max(at, 0) : at + 2] = torch.tensor([255, 127])[: at + 2 - max(at, 0)]
    with pytest.raises(CheckpointError, match="up_proj.weight holds scales that are NaN or inf"):
        values(store, kind, Part(NAME, (ROWS, DEPTH)))


def test_another_shape() -> None:
    with pytest.raises(
        CheckpointError, match=r"has shape \[12, 512\], the config implies \[12, 25"
    ):
        values(Store("Q8_0"), "Q8_0", Part(NAME, (ROWS, 256)))


def test_the_config_of_a_folder() -> None:
    types = {"Q8_0": [NAME], "Q4_K": ["mtp.layers.0.mlp.up_proj.weight"]}
    config = {"quantization_config": {"quant_method": "gguf", "types": types}}
    scheme = QuantScheme.of(config)
    assert scheme is not None
    assert scheme.format_of(f"model.language_model.{NAME}") == Blocks(BY_NAME["Q8_0"])
    assert scheme.format_of("mtp.layers.0.mlp.up_proj.weight") == Blocks(BY_NAME["Q4_K"])
    assert scheme.format_of("layers.1.mlp.up_proj.weight") is None
    with pytest.raises(CheckpointError, match="the unknown type 'Q9'"):
        type_rules({"Q9": []})


@pytest.mark.parametrize("kind", KINDS)
def test_forms_without_a_compiler(kind: str) -> None:
    whole = Blocks(BY_NAME[kind])
    form = whole.without_compiler()
    assert (form is None) == (kind in ("Q4_K", "Q5_K", "Q2_K", "Q4_1", "Q5_1"))
    if kind == "Q6_K":
        assert form is not None and form.nbytes(1, 256) == 256


def codes_of(kind: str) -> IntegerCodes:
    return codes_in(BY_NAME[kind], torch.from_numpy(random_blocks(kind, ROWS, DEPTH)))


def test_a_factor_of_a_whole_weight() -> None:
    """Converters of NVFP4 keep it beside the weight."""
    store = Store("NVFP4")
    store._all[f"{NAME}_factor"] = torch.tensor([0.375])
    part = Part(NAME, (ROWS, DEPTH))
    assert torch.equal(values(store, "NVFP4", part), store.values * 0.375)
    assert torch.equal(values(store, "NVFP4", part), store.values * 0.375)
    store._all[f"{NAME}_factor"] = torch.tensor([float("nan")])
    with pytest.raises(CheckpointError, match="type NVFP4 has a factor of nan"):
        values(store, "NVFP4", part)
    other = Store("Q8_0")
    other._all[f"{NAME}_factor"] = torch.tensor([2.0])
    with pytest.raises(CheckpointError, match=r"type Q8_0 has a factor of 2\.0"):
        values(other, "Q8_0", part)


@pytest.mark.parametrize("kind", KINDS)
def test_experts_in_one_piece(kind: str) -> None:
    """Triton multiplies by codes of eight bits in place of a table's."""
    codes, form = codes_of(kind), Blocks(BY_NAME[kind]).in_one_piece()
    assert (form is None) == codes.floored
    if form is None:
        return
    weight = stored([codes.wide()], ROWS, DEPTH, torch.device("cpu"))
    assert weight.table is None
    assert weight.nbytes == pytest.approx(form.nbytes(ROWS, DEPTH), rel=0.01)
    assert torch.equal(weight.plain(slice(None)), codes.values())


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("kind", KINDS)
def test_what_they_take(kind: str) -> None:
    """Of a whole panel, and what compiled code makes of them."""
    stored = torch.from_numpy(random_blocks(kind, 32, DEPTH))
    name = f"{NAME}_{kind}"
    store = Store(kind)
    store._all |= {name: stored, NAME: torch.from_numpy(decode(stored.numpy(), Kind[kind]))}
    part, form = Part(NAME, (32, DEPTH)), Blocks(BY_NAME[kind])
    codes = pieces(form.open(store, part), part, None)
    weight = PackedCodes.of(codes, 32, DEPTH)
    table = 16 if codes_of(kind).table else 0
    assert weight.nbytes == form.nbytes(32, DEPTH) + table
    x = torch.randn(3, DEPTH, generator=torch.Generator().manual_seed(0))
    exact = x.double() @ store.stored(NAME).double().T
    assert (weight(x).double() - exact).abs().max() < 1e-6 * exact.abs().max()
