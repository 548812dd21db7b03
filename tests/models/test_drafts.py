"""Drafted tokens against the same tokens decoded one by one: logits, and the state they leave."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from checkpoint_spec import CheckpointSpec
from families import SPECS as FAMILIES
from make_checkpoint import make_checkpoint
from model_driver import Driver, Sequence_, text_sequence

from vlm_serve.kernels.checks import KernelArgumentError
from vlm_serve.models import load_model

SPECS = {
    "dense": CheckpointSpec(vision_depth=0, dtype="bfloat16"),
    "experts": CheckpointSpec(vision_depth=0, num_experts=6, dtype="bfloat16"),
    "wide": CheckpointSpec(
        vision_depth=0,
        dtype="bfloat16",
        hidden_size=80,
        gdn_key_heads=1,
        gdn_value_heads=3,
        gdn_key_dim=48,
        gdn_value_dim=80,
        conv_kernel=3,
        full_attention_interval=2,
    ),
    "convolutions": replace(FAMILIES["lfm2, tied, biased, four taps"], dtype="bfloat16"),
}
MOST = 6
STATES = {"recurrent", "conv"}


@dataclass(frozen=True)
class Path_:
    """How a model is computed, and whether its bits say so."""

    compiled: bool
    compute: torch.dtype = torch.float32
    state: torch.dtype = torch.float32
    kv: torch.dtype | None = None


PATHS = {
    "compiled": Path_(True),
    "compiled bfloat16": Path_(True, torch.bfloat16),
    "compiled, states in bfloat16": Path_(True, state=torch.bfloat16),
    "compiled, pages of int8": Path_(True, kv=torch.uint8),
    "compiled, pages of float8": Path_(True, torch.bfloat16, kv=torch.float8_e4m3fn),
    "torch": Path_(False),
    "torch, states in bfloat16": Path_(False, state=torch.bfloat16),
}


@pytest.fixture(scope="module", params=SPECS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("drafts"), SPECS[request.param])


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> Path_:
    found = PATHS[request.param]
    if found.compiled:
        request.getfixturevalue("compiler")
    return found


def drivers(checkpoint: Path, path: Path_) -> tuple[Driver, Driver]:
    """One that decodes and one that verifies."""
    made = []
    for _ in range(2):
        weights = torch.bfloat16 if path.compiled else torch.float32
        model = load_model(
            checkpoint, weights, "cpu", compute_dtype=path.compute, compiled=path.compiled
        )
        driver = Driver(
            model,
            deterministic=not path.compiled,
            state=path.state,
            kv=path.kv,
            most_drafts=MOST,
        )
        if path.compiled:
            model.compile_steps(driver.caches)
        made.append(driver)
    return made[0], made[1]


def same(path: Path_, ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Compiled steps have one arithmetic; on some processors products of torch depend on the number
    of rows even in tiles, and a state that is rounded after every token may round otherwise."""
    if path.compiled:
        return torch.equal(ours, theirs)
    slack = 1e-4 if path.state == torch.float32 else 3e-2
    return torch.allclose(ours, theirs, rtol=slack, atol=slack * float(theirs.abs().max()))


def test_equals_decoding(checkpoint: Path, path: Path_) -> None:
    """Random numbers of drafts, of which a random number holds, in company of decode tokens, of
    other drafts and of a prefill."""
    draw = random.Random(3)
    decoding, verifying = drivers(checkpoint, path)
    texts = [draw.choices(range(400), k=n + 60) for n in (5, 40, 17)]
    starts = [5, 40, 17]
    ours = [text_sequence(text[:n]) for text, n in zip(texts, starts, strict=True)]
    theirs = [text_sequence(text[:n]) for text, n in zip(texts, starts, strict=True)]
    for driver, sequences in ((verifying, ours), (decoding, theirs)):
        driver.step(prefills=[(one, 0, len(one.tokens)) for one in sequences])
    done, pending = list(starts), [0, 0, 0]
    for turn in range(8):
        kept = [draw.randint(1, MOST) for _ in ours]
        wrong = [draw.randint(0, MOST - count) for count in kept]
        for one, text, at, count, junk in zip(ours, texts, done, kept, wrong, strict=True):
            one.tokens[at:] = text[at : at + count] + draw.choices(range(400), k=junk)
        company = text_sequence(draw.choices(range(400), k=9))
        logits = verifying.step(
            prefills=[(company, 0, 9)] if turn % 2 else (),
            drafts=list(zip(ours, done, pending, strict=True)),
        ).logits
        row = 9 if turn % 2 else 0
        for index, count in enumerate(kept):
            expected = decoded(decoding, theirs[index], texts[index], done[index], count)
            assert same(path, logits[row : row + count], expected)
            row += count + wrong[index]
            done[index] += count
        pending = kept
    for index in range(3):
        verifying.fold(ours[index], pending[index])
        for pool in STATES & verifying.caches.tensors.keys():
            sides = ((verifying, ours), (decoding, theirs))
            rows = [driver.caches[pool][them[index].row] for driver, them in sides]
            assert same(path, *(row.float() for row in rows))


def decoded(driver: Driver, one: Sequence_, text: list[int], at: int, count: int) -> torch.Tensor:
    rows = []
    for position in range(at, at + count):
        one.tokens[position:] = [text[position]]
        rows.append(driver.step(decodes=[one]).logits)
    return torch.cat(rows)


def test_leaves_the_row_alone(checkpoint: Path, path: Path_) -> None:
    """Until something holds, drafts change no state."""
    _, driver = drivers(checkpoint, path)
    one = text_sequence(range(20))
    driver.prefill(one)
    states = sorted(STATES & driver.caches.tensors.keys())
    before = [driver.caches[pool][one.row].clone() for pool in states]
    one.tokens += [1, 2, 3]
    driver.step(drafts=[(one, 20, 0)])
    after = [driver.caches[pool][one.row] for pool in states]
    assert all(map(torch.equal, before, after))


def test_refuses_updates_that_overlap(checkpoint: Path) -> None:
    model = load_model(checkpoint, torch.float32, "cpu")
    driver = Driver(model, most_drafts=MOST)
    last = driver.caches.num_updates - 1
    with pytest.raises(KernelArgumentError, match="updates"):
        model.fold(driver.caches, [(0, last, 2)])
    with pytest.raises(KernelArgumentError, match="updates"):
        model.fold(driver.caches, [(0, 0, 3), (1, 2, 1)])
    with pytest.raises(KernelArgumentError, match="twice"):
        model.fold(driver.caches, [(0, 0, 1), (0, 2, 1)])
