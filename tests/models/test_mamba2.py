"""A model of Mamba2 layers: a prompt cut anywhere, drafted tokens, and ranks give what it gives in
one piece, token by token and alone. What transformers computes: `test_new_architecture.py`."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from model_driver import Driver, Sequence_, text_sequence
from patchwork import MAMBA2, SERVED, write_checkpoint
from rank_threads import on_ranks

from vlm_serve.errors import ConfigError
from vlm_serve.kernels.ranks import ALONE, Ranks
from vlm_serve.models import load_model, read_spec
from vlm_serve.models.parts.mamba2 import Mamba2
from vlm_serve.models.registry import FAMILIES

pytestmark = pytest.mark.usefixtures("compiler")

MOST = 5
ONE = {"mamba_groups": 1}
TOKENS = random.Random(0).choices(range(384), k=90)
ROWS = ("recurrent", "conv")


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "patchwork", SERVED)


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def driver_of(
    path: Path,
    compiled: bool = True,
    ranks: Ranks = ALONE,
    dtype: torch.dtype = torch.float32,
    state: torch.dtype = torch.float32,
) -> Driver:
    model = load_model(path, dtype, "cpu", compiled=compiled, ranks=ranks)
    driver = Driver(model, ranks=ranks.size, most_drafts=MOST, deterministic=True, state=state)
    if compiled:
        model.compile_steps(driver.caches)
    return driver


def rows(driver: Driver, one: Sequence_) -> list[torch.Tensor]:
    return [driver.caches[pool][one.row] for pool in ROWS]


@pytest.mark.parametrize(
    ("groups", "dtype", "state"),
    [
        (1, torch.float32, torch.float32),
        (2, torch.float32, torch.bfloat16),
        (2, torch.bfloat16, torch.float32),
    ],
)
def test_a_prompt_cut_anywhere_has_the_bits_of_the_whole(
    tmp_path: Path, groups: int, dtype: torch.dtype, state: torch.dtype
) -> None:
    """Prompts run in slices of any length beside others, and token by token at the end."""
    path = write_checkpoint(tmp_path, MAMBA2 | {"mamba_groups": groups})
    driver = driver_of(path, dtype=dtype, state=state)
    whole, cut, draw = text_sequence(TOKENS), text_sequence(TOKENS[:80]), random.Random(1)
    expected, kept = driver.take_row(), driver.take_row()
    logits = driver.step(prefills=[(whole, 0, 90)], snapshots=[(whole, 80, expected)]).logits
    found, at = [], 0
    while at < 80:
        end = min(80, at + draw.randint(1, 30))
        other = text_sequence(draw.choices(range(384), k=draw.randint(1, 20)))
        company = [(other, 0, len(other.tokens))] if draw.random() < 0.5 else []
        last = [(cut, 80, kept)] if end == 80 else []
        step = driver.step(prefills=[*company, (cut, at, end)], snapshots=last)
        found.append(step.logits[at - end :])
        at = end
    for token in TOKENS[80:]:
        cut.tokens.append(token)
        found.append(driver.step(decodes=[cut]).logits)
    assert torch.equal(torch.cat(found), logits)
    for pool in ROWS:
        assert torch.equal(driver.caches[pool][kept], driver.caches[pool][expected])
    assert all(map(torch.equal, rows(driver, cut), rows(driver, whole)))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("compiled", [False, True])
def test_drafts_leave_what_decoding_leaves(tmp_path: Path, compiled: bool) -> None:
    """Drafts that do not hold stand behind those that do, in two sequences at once."""
    driver, draw = driver_of(write_checkpoint(tmp_path, MAMBA2 | ONE), compiled), random.Random(2)
    verified = [text_sequence(TOKENS[:n]) for n in (20, 33)]
    decoded = [text_sequence(one.tokens) for one in verified]
    for both in (verified, decoded):
        driver.step(prefills=[(one, 0, len(one.tokens)) for one in both])
    pending = [0, 0]
    for _ in range(4):
        hold = [draw.randint(1, MOST) for _ in verified]
        drafts, expected = [], []
        for one, other, before, count in zip(verified, decoded, pending, hold, strict=True):
            at = len(other.tokens)
            one.tokens[at:] = draw.choices(range(384), k=draw.randint(count, MOST))
            drafts.append((one, at, before))
            for token in one.tokens[at : at + count]:
                other.tokens.append(token)
                expected.append(driver.step(decodes=[other]).logits)
        logits, first, found = driver.step(drafts=drafts).logits, 0, []
        for (one, at, _), count in zip(drafts, hold, strict=True):
            found.append(logits[first : first + count])
            first += len(one.tokens) - at
        near(torch.cat(found), torch.cat(expected), exact=compiled)
        pending = hold
    for one, other, count in zip(verified, decoded, pending, strict=True):
        driver.fold(one, count)
        for ours, theirs in zip(rows(driver, one), rows(driver, other), strict=True):
            near(ours, theirs, exact=compiled)


def near(found: torch.Tensor, expected: torch.Tensor, *, exact: bool) -> None:
    """Compiled steps have one arithmetic; products of torch may depend on the number of rows."""
    if exact:
        assert torch.equal(found, expected)
    else:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("groups", "size"), [(2, 2), (1, 2), (2, 4), (1, 4)])
def test_ranks_share_groups_or_heads_of_them(
    tmp_path: Path, compiled: bool, groups: int, size: int
) -> None:
    """Ranks compute what one computes, each keeps its part of the states, and a prompt in slices
    has the bits of the whole."""
    config = MAMBA2 | {"mamba_groups": groups, "expert_size": 64, "intermediate_size": 128}
    path, apart = write_checkpoint(tmp_path, config), threading.Barrier(size)
    read_spec(path)  # imports what threads cannot import at the same time

    def begin(ranks: Ranks, step: int) -> None:
        if ranks.shared:
            apart.wait()
        ranks.begin(step)

    def work(ranks: Ranks) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        driver, found = driver_of(path, compiled, ranks), []
        for step, splits in enumerate(((), (7, 33))):
            one, kept = text_sequence(TOKENS[:50], cuts=(7, 33)), driver.take_row()
            edges = [0, *splits, 50]
            for first, end in pairwise(edges):
                begin(ranks, 1 + 10 * step + first)
                last = [(one, 50, kept)] if end == 50 else []
                found.append(driver.step(prefills=[(one, first, end)], snapshots=last).logits)
        begin(ranks, 90)
        one.tokens += TOKENS[50:54]
        found.append(driver.step(drafts=[(one, 50, 0)]).logits)
        begin(ranks, 91)
        one.tokens[52:] = TOKENS[60:62]
        found.append(driver.step(drafts=[(one, 52, 2)]).logits)
        driver.fold(one, 2)
        pools = [driver.caches[pool][kept] for pool in ROWS]
        return found[0], torch.cat(found[1:]), pools + rows(driver, one)

    whole, rest, states = work(ALONE)
    ranks = Mamba2(heads=4, head_dim=32, groups=groups, state_dim=16, taps=4)
    for rank, found in enumerate(on_ranks(size, work)):
        assert isinstance(found, tuple), found
        if not rank:
            torch.testing.assert_close(found[0], whole, rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(found[1], rest, rtol=1e-3, atol=1e-3)
            assert torch.equal(found[1][:50], found[0])
        own = Ranks(rank, size)
        channels = torch.cat(
            [torch.arange(384)[span.start : span.stop] for span in ranks._mixed(own)]
        )
        for part, state in zip(found[2], states, strict=True):
            at = own.share(4)
            mine = state[:, at.start : at.stop] if state.dim() == 4 else state[:, channels]
            torch.testing.assert_close(part, mine, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({"mamba_heads": 6, "mamba_groups": 1}, 4, "6 Mamba2 heads cannot be split over 4 ranks"),
        ({"mamba_heads": 12, "mamba_groups": 3}, 2, "3 groups of Mamba2 heads cannot be split"),
    ],
)
def test_what_cannot_be_shared_is_refused(
    tmp_path: Path, changes: dict[str, int], size: int, message: str
) -> None:
    path = write_checkpoint(tmp_path, MAMBA2 | {"expert_size": 64} | changes)
    with pytest.raises(ConfigError, match=message):
        read_spec(path).cache_layout(size)
