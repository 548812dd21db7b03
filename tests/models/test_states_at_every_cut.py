"""A prompt that goes on from a snapshot has the bits of the whole, wherever the snapshot lies: in
every family whose layers keep a state of their own, at every offset within chunks and blocks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from families import SPECS
from make_checkpoint import make_checkpoint
from model_driver import Driver, text_sequence

from vlm_serve.models import load_model

pytestmark = pytest.mark.usefixtures("compiler")

NAMES = (
    "lfm2",
    "lfm2 moe",
    "granite h",
    "granite h, dense, tied, ends with mamba",
    "nemotron",
    "nemotron, dense, three heads a group, ends with mamba",
)
LENGTH, TAIL, MOST = 37, 3, 4
TOKENS = Random(5).choices(range(100), k=LENGTH + TAIL)


def driver_of(path: Path, *, compiled: bool, dtype: torch.dtype) -> Driver:
    model = load_model(path, dtype, "cpu", compiled=compiled)
    driver = Driver(
        model, num_blocks=400, num_rows=200, most_drafts=MOST, deterministic=True, block_size=16
    )
    if compiled:
        model.compile_steps(driver.caches)
    return driver


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiled", [False, True], ids=["ops", "compiled"])
@pytest.mark.parametrize("name", NAMES)
def test_every_cut_goes_on_with_the_bits_of_the_whole(
    tmp_path: Path, name: str, compiled: bool, dtype: torch.dtype
) -> None:
    """Run all at once in a step: prompts of a token and more, whose rows are snapshots afterwards,
    then what follows each of them, by slices, by decoding and as drafts that hold. Products of
    torch promise no bits to tokens that are decoded in company."""
    path = make_checkpoint(tmp_path, replace(SPECS[name], dtype=str(dtype)[6:]))
    driver = driver_of(path, compiled=compiled, dtype=dtype)
    whole = text_sequence(TOKENS[:LENGTH])
    expected = [driver.step(prefills=[(whole, 0, LENGTH)]).logits]
    for token in TOKENS[LENGTH:]:
        whole.tokens.append(token)
        expected.append(driver.step(decodes=[whole]).logits)
    logits = torch.cat(expected)

    cuts = range(1, LENGTH)
    ones = [text_sequence(TOKENS[:LENGTH]) for _ in cuts]
    kept = [driver.take_row() for _ in cuts]
    slices = [(one, 0, cut) for one, cut in zip(ones, cuts, strict=True)]
    found = driver.step(
        prefills=slices,
        snapshots=[(one, cut, row) for (one, _, cut), row in zip(slices, kept, strict=True)],
    ).logits
    for cut, part in zip(cuts, torch.split(found, list(cuts)), strict=True):
        assert torch.equal(part, logits[:cut]), cut
    for one, row in zip(ones, kept, strict=True):
        one.row = row

    rest = [LENGTH - cut for cut in cuts]
    slices = [(one, cut, LENGTH) for one, cut in zip(ones, cuts, strict=True)]
    found = driver.step(prefills=slices).logits
    for cut, part in zip(cuts, torch.split(found, rest), strict=True):
        assert torch.equal(part, logits[cut:LENGTH]), cut

    if not compiled:
        return
    decoded, drafted = ones[::2], ones[1::2]
    for one in drafted:
        one.tokens += TOKENS[LENGTH:]
    for at in range(LENGTH, LENGTH + TAIL):
        for one in decoded:
            one.tokens.append(TOKENS[at])
        assert (driver.step(decodes=decoded).logits == logits[at]).all(), at
    verified = driver.step(drafts=[(one, LENGTH, 0) for one in drafted]).logits
    for part in torch.split(verified, TAIL):
        assert torch.equal(part, logits[LENGTH:])


@pytest.mark.parametrize("compiled", [False, True], ids=["ops", "compiled"])
@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_of_a_token_is_prefilled_decoded_and_drafted_alike(
    tmp_path: Path, name: str, compiled: bool
) -> None:
    driver = driver_of(
        make_checkpoint(tmp_path, SPECS[name]), compiled=compiled, dtype=torch.float32
    )
    first, second = text_sequence(TOKENS[:1]), text_sequence(TOKENS[:1])
    prefilled = driver.step(prefills=[(first, 0, 1)]).logits
    decoded = driver.step(decodes=[second]).logits
    assert torch.equal(prefilled, decoded)
    for pool in driver.caches.of_unit("row"):
        assert torch.equal(pool[first.row], pool[second.row])
