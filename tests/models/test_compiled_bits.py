"""Compiled steps have the same bits in any company, however cut, and on any number of threads."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compiled_cases import POOLS, ROUNDED, SPECS, TYPES
from make_checkpoint import make_checkpoint
from model_driver import Driver, text_sequence

from vlm_serve.kernels.kv_quant import quantise, to_float8
from vlm_serve.models import load_model

pytestmark = pytest.mark.usefixtures("compiler")


@pytest.mark.parametrize("kind", ["float32", "bfloat16 in float32"])
def test_pages_hold_what_the_ops_would_write(tmp_path: Path, kind: str) -> None:
    """Bit for bit: keys and values of the first layer, which no page has had a part in."""
    weights, activations = TYPES[kind]
    path = make_checkpoint(tmp_path, replace(SPECS["features"], dtype="bfloat16"))
    model = load_model(path, weights, "cpu", compute_dtype=activations, compiled=True)
    tokens = random.Random(6).choices(range(400), k=100)

    def first_layer(kv: torch.dtype | None) -> list[torch.Tensor]:
        driver, one = Driver(model, kv=kv), text_sequence(tokens)
        model.compile_steps(driver.caches)
        driver.step(prefills=[(one, 0, 100)])
        pools = driver.caches.of_unit("block")
        return [pool[one.blocks[:-1], 0] for pool in pools]

    (plain,) = first_layer(None)
    assert not plain.isnan().any()
    (float8,) = first_layer(torch.float8_e4m3fn)
    assert torch.equal(_bytes(float8), _bytes(to_float8(plain)))
    codes, scales = first_layer(torch.uint8)
    for got, expected in zip(
        (codes, scales[:, ::2], scales[:, 1::2]), quantise(plain), strict=True
    ):
        assert torch.equal(got, expected)


@pytest.fixture(scope="module", params=SPECS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = replace(SPECS[request.param], dtype="bfloat16")
    return make_checkpoint(tmp_path_factory.mktemp("small"), spec)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_company_and_threads_leave_no_trace(checkpoint: Path, threads: int) -> None:
    model = load_model(checkpoint, torch.bfloat16, "cpu", compiled=True)
    before = torch.get_num_threads()

    def logits(lengths: list[int], count: int) -> torch.Tensor:
        torch.set_num_threads(count)
        driver = Driver(model, num_blocks=200, num_rows=40)
        model.compile_steps(driver.caches)
        own = [text_sequence([n, *range(n - 1)]) for n in lengths]
        first = driver.step(prefills=[(one, 0, len(one.tokens)) for one in own]).logits
        for one in own:
            one.tokens.append(9)
        second = driver.step(own).logits
        return torch.cat([first[: lengths[0]], second[:1]])

    try:
        alone = logits([19], 1)
        assert torch.equal(logits([19, 1, 7, 30], threads), alone)
    finally:
        torch.set_num_threads(before)


CUT = [(name, kind, "plain") for name in SPECS for kind in TYPES] + [
    (name, kind, pools)
    for name in ("experts", "wide")
    for kind in ("float32", "bfloat16", "float16 in float32")
    for pools in ROUNDED
]


@pytest.mark.parametrize(("name", "kind", "pools"), CUT)
def test_what_decoding_has_written_is_what_a_prefill_writes(
    tmp_path: Path, name: str, kind: str, pools: str
) -> None:
    """Logits, pages and states have the same bits, wherever prompts end and slices are cut."""
    weights, activations = TYPES[kind]
    path = make_checkpoint(tmp_path, replace(SPECS[name], dtype="bfloat16"))
    model = load_model(path, weights, "cpu", compute_dtype=activations, compiled=True)
    tokens = random.Random(2).choices(range(400), k=620)
    kv, state = POOLS[pools]
    driver = Driver(model, num_rows=40, num_blocks=200, kv=kv, state=state)
    model.compile_steps(driver.caches)
    cold, slow = text_sequence(tokens), text_sequence(tokens[:500])
    whole = driver.step(prefills=[(cold, 0, 620)]).logits
    parts = [driver.step(prefills=[(slow, 0, 500)]).logits]
    company = text_sequence([3] * 40)
    driver.step(prefills=[(company, 0, 40)])
    for token in tokens[500:530]:
        slow.tokens.append(token)
        company.tokens.append(9)
        parts.append(driver.step([company, slow]).logits[1:])
    slow.tokens.extend(tokens[530:])
    parts.append(driver.step([], [(slow, 530, 533), (text_sequence([1] * 70), 0, 70)]).logits[:3])
    parts.append(driver.step(prefills=[(slow, 533, 620)]).logits)
    assert torch.equal(torch.cat(parts), whole)
    caches = driver.caches
    for pool in caches.of_unit("row"):
        assert torch.equal(pool[slow.row], pool[cold.row])
    last = len(cold.blocks) - 1
    for pool in caches.of_unit("block"):
        assert torch.equal(_bytes(pool[slow.blocks[:last]]), _bytes(pool[cold.blocks[:last]]))


def _bytes(pool: torch.Tensor) -> torch.Tensor:
    return pool.view(torch.uint8)
