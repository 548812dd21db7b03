"""Blocks are taken apart as `gguf` does it, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_blocks import decode, encode, random_blocks

from vlm_serve.kernels.linear.packed_codes import PackedCodes
from vlm_serve.kernels.linear.torch_quantised import TorchQuantised
from vlm_serve.models.gguf.blocks import decode as taken_apart
from vlm_serve.models.gguf.decoded import finite
from vlm_serve.models.gguf.reader import BY_NAME
from vlm_serve.models.quantization.gguf import Blocks

KINDS = [name for name, kind in BY_NAME.items() if kind.quantised]
ENCODED = ["Q8_0", "Q4_0", "Q5_0", "Q4_1", "Q5_1", "MXFP4", "Q4_K", "Q5_K", "Q6_K"]


@pytest.mark.parametrize("name", KINDS)
def test_random_bytes(name: str) -> None:
    kind, stored = BY_NAME[name], random_blocks(name, 5, 768)
    found = taken_apart(kind, torch.from_numpy(stored))
    assert finite(found)
    assert np.array_equal(found.values().numpy(), decode(stored, Kind[name]))
    assert gguf.GGML_QUANT_SIZES[Kind[name]] == (kind.values, kind.nbytes)


@pytest.mark.parametrize("name", KINDS)
def test_one_block(name: str) -> None:
    """A part of a row begins at any byte."""
    kind, stored = BY_NAME[name], random_blocks(name, 1, 512)
    found = taken_apart(kind, torch.from_numpy(stored[:, -kind.nbytes :]))
    wanted = decode(stored[:, -kind.nbytes :].copy(), Kind[name])
    assert np.array_equal(found.values().numpy(), wanted)


@pytest.mark.parametrize("name", KINDS)
def test_memory_is_at_most_twice_the_files(name: str) -> None:
    """Compiled code is meant; IQ1_M takes 2.04 times as much, and a row a number for itself."""
    kind, depth = BY_NAME[name], 4096
    bits = Blocks(kind).nbytes(32, depth) / (32 * depth) * 8
    assert bits <= (2.05 if name == "IQ1_M" else 2) * 8 * kind.nbytes / kind.values
    codes = taken_apart(kind, torch.from_numpy(random_blocks(name, 32, depth)))
    packed = PackedCodes.of([codes], 32, depth).nbytes
    assert packed == pytest.approx(Blocks(kind).nbytes(32, depth), abs=16)
    plain = Blocks(kind).without_compiler()
    if plain is not None:
        stored = TorchQuantised.of([codes], 32, depth).nbytes
        assert stored == pytest.approx(plain.nbytes(32, depth), rel=0.031)
    assert (plain is None) == codes.floored


@pytest.mark.parametrize("name", ENCODED)
def test_the_encoders_of_tests(name: str) -> None:
    values = np.random.default_rng(1).normal(size=(4, 512)).astype(np.float32)
    near = decode(encode(values, Kind[name]), Kind[name])
    allowed = 0.35 if name == "MXFP4" else 2.0 / (1 << int(name[1]))
    assert np.abs(near - values).max() < allowed * np.abs(values).max()


def test_a_scale_that_is_no_number() -> None:
    stored = torch.zeros(1, 34, dtype=torch.uint8)
    stored[0, 1] = 0x7E
    assert not finite(taken_apart(BY_NAME["Q8_0"], stored))
