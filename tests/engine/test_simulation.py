"""Seeded traffic through the real scheduler and cache (see tests/simulation.py)."""

from __future__ import annotations

from collections import Counter
from pickle import UnpicklingError

import pytest
import symbolic
from queued_device import FAULTS, broken
from simulated_adapters import NAMES, AdapterSimulation
from simulated_rests import RestSimulation
from simulated_weights import WeightSimulation
from simulation import Simulation
from sweeps import quick

from vlm_serve.cache.prefix_cache import PrefixCache
from vlm_serve.cache.records import Lease, Node
from vlm_serve.cache.tiers.down import TierSaver
from vlm_serve.engine.core.queues import SequenceQueues
from vlm_serve.engine.features.inspection import Inspector
from vlm_serve.engine.features.pause import Pause
from vlm_serve.engine.features.replays import Replays
from vlm_serve.engine.features.table import TABLE, FeatureRow
from vlm_serve.engine.features.weights import WeightUpdates
from vlm_serve.engine.requests.sequence import Sequence as EngineSequence
from vlm_serve.engine.requests.sequence import SequenceGroup
from vlm_serve.preprocess.identity.keys import WeightsIdentity

STEPS = 200
EVENTFUL = 34
"""A seed in whose traffic much happens that is rare."""
RESTFUL = [2, 9]
"""Seeds in whose traffic all kinds of rests happen."""
TOTALS: Counter[str] = Counter()
DRAFTED: Counter[str] = Counter()
REPLAYED: Counter[str] = Counter()
QUEUED: Counter[str] = Counter()
ADAPTED: Counter[str] = Counter()
CHANGED: Counter[str] = Counter()
RESTED: Counter[str] = Counter()
EXACT: Counter[str] = Counter()
PERMUTED: Counter[str] = Counter()
AHEAD: Counter[str] = Counter()
HAPPENS = (
    *("hit_tokens", "aborts", "failures", "length", "stop", "expert answers", "came up"),
    *("rows reused", "overtaken", "joins", "rows left", "last tokens", "answer_end", "answer_part"),
    *("seats given up", "held"),
)
WITH_UPDATES = ("updates amid answers", "hit_tokens", "came up", "joins", "failures", "preemptions")
WITH_RESTS = (
    *("paused abort", "paused retract", "paused in_place", "paused wait", "asleep retract"),
    *("asleep wait", "kv_cache given back", "weights given back", "sunk", "updates in place"),
    *("updates asleep", "pins", "audits", "hit_tokens", "came up", "failures", "preemptions"),
)
WITH_ADAPTERS = ("adapted", "shared under two names", "unloaded in use", "loaded", "hit_tokens")
PLANNED_AHEAD = ("planned ahead", "void steps", "failures", "aborts", "stop", "answer_end")
EXACTLY = ("preemptions", "failures", "hit_tokens")


@pytest.mark.parametrize("seed", quick(range(100), [*range(10), EVENTFUL], pytest.mark.fuzz))
def test_random_traffic_keeps_every_promise(seed: int) -> None:
    TOTALS.update(Simulation(seed).run(STEPS))


@pytest.mark.parametrize("seed", quick(range(100), 10, pytest.mark.fuzz))
def test_drafts_keep_every_promise_too(seed: int) -> None:
    DRAFTED.update(Simulation(seed, speculative=True).run(STEPS))


@pytest.mark.parametrize("seed", quick(range(40), 10, pytest.mark.fuzz))
def test_replays_keep_every_promise_too(seed: int) -> None:
    simulation = Simulation(seed, speculative=seed % 2 == 0, replays=True)
    simulation.run(STEPS)
    replays = simulation.features.get(Replays)
    assert replays is not None
    counts = replays.counts
    assert counts.disagreements == 0
    REPLAYED.update(counts.as_dict())


@pytest.mark.parametrize("seed", quick(range(60), 8, pytest.mark.fuzz))
def test_prompts_come_from_prefill_and_answers_from_decoding(seed: int) -> None:
    """As batch invariance needs it, whatever was preempted, struck or found in the cache."""
    EXACT.update(Simulation(seed, exact_only=True, replays=seed % 2 == 0).run(STEPS))


@pytest.mark.parametrize("seed", quick(range(40), 3, pytest.mark.fuzz))
def test_small_states_keep_every_promise_too(seed: int) -> None:
    """Give the state behind every block a row, as short convolutions have it."""
    Simulation(seed, small_states=True, queued=seed % 2 == 1).run(STEPS)


@pytest.mark.parametrize("seed", quick(range(100), 5, pytest.mark.fuzz))
def test_a_device_behind_the_host_keeps_every_promise_too(seed: int) -> None:
    speculative = seed % 3 == 0
    QUEUED.update(Simulation(seed, speculative=speculative, queued=True).run(STEPS))


@pytest.mark.parametrize("seed", quick(range(1000), 8, pytest.mark.fuzz))
def test_steps_that_are_planned_ahead_keep_every_promise_too(seed: int) -> None:
    """Failures come between the two steps under way, and so do aborts and ends."""
    kind = AdapterSimulation if seed % 5 == 4 else Simulation
    AHEAD.update(kind(seed, queued=seed % 4 == 0, ahead=True).run(STEPS))


@pytest.mark.parametrize("seed", quick(range(60), 6, pytest.mark.fuzz))
def test_adapters_keep_every_promise_too(seed: int) -> None:
    speculative, queued = seed % 3 == 1, seed % 4 == 3
    ADAPTED.update(AdapterSimulation(seed, speculative=speculative, queued=queued).run(STEPS))


@pytest.mark.parametrize("seed", quick(range(200), 8, pytest.mark.fuzz))
def test_weights_that_change_keep_every_promise_too(seed: int) -> None:
    """No token differs from what the weights say cold that the report names."""
    exact = seed % 7 == 6
    options = {"speculative": seed % 3 == 0 and not exact, "exact_only": exact}
    options |= {"queued": seed % 4 == 1, "ahead": seed % 3 == 1, "small_states": seed % 5 == 3}
    CHANGED.update(WeightSimulation(seed, **options).run(STEPS))


@pytest.mark.parametrize("seed", quick(range(200), RESTFUL, pytest.mark.fuzz))
def test_pauses_sleep_and_pins_across_updates_keep_every_promise_too(seed: int) -> None:
    """Answers may span weights in place: then nothing of them is ever published."""
    exact = seed % 7 == 6
    options = {"speculative": seed % 3 == 0 and not exact, "exact_only": exact}
    options |= {"queued": seed % 4 == 1, "ahead": seed % 3 == 1, "small_states": seed % 5 == 3}
    RESTED.update(RestSimulation(seed, replays=seed % 2 == 0, **options).run(STEPS))


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
@pytest.mark.parametrize("seed", quick(range(12), 1, pytest.mark.fuzz))
def test_no_feature_needs_another(seed: int, row: FeatureRow) -> None:
    options = {"speculative": row.name != "drafts", "replays": row.name != "replays"}
    simulation = Simulation(seed, left_out={row.name}, **options)
    names = {name for name, _ in simulation.features.items()}
    assert row.name not in names and len(names) >= len(TABLE) - 6
    simulation.run(STEPS)


@pytest.mark.parametrize("seed", quick(range(40), 3, pytest.mark.fuzz))
def test_features_that_commute_may_come_in_any_order(seed: int) -> None:
    PERMUTED.update(
        Simulation(seed, speculative=seed % 2 == 0, replays=True, permuted=True).run(STEPS)
    )


def test_keys_without_the_adapter_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symbolic, "key_root", lambda salt, _: symbolic.root_of(salt, ""))
    with pytest.raises(AssertionError, match="wrong KV|wrong state|another medium"):
        AdapterSimulation(0).run(STEPS)


def _keyed_late(updates: WeightUpdates, group: SequenceGroup) -> None:
    """Take a prompt as it was prepared."""


def _keyed_never(group: SequenceGroup, weights: WeightsIdentity) -> None:
    """Keep the keys of a request that has begun."""


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [(WeightUpdates, "on_added", _keyed_late), (SequenceGroup, "rekey", _keyed_never)],
)
def test_keys_of_other_weights_show(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, fault: object
) -> None:
    monkeypatch.setattr(owner, name, fault)
    with pytest.raises(AssertionError, match=r"wrong KV|wrong state|another medium|other weights"):
        for seed in range(4):
            WeightSimulation(seed).run(STEPS)


def _published(cache: PrefixCache, lease: Lease) -> None:
    """Go on to publish what was computed under old weights."""


def _kept(queues: SequenceQueues, sequence: EngineSequence) -> None:
    """Let a sequence keep what it holds."""


def _pinned(inspector: Inspector) -> None:
    """Leave pins where they are."""


def _lost(saver: TierSaver, node: Node, wait_seconds: float) -> None:
    """Save nothing below the device."""


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [
        (PrefixCache, "seclude", _published),
        (SequenceQueues, "retract", _kept),
        (Inspector, "on_renewed", _pinned),
        (TierSaver, "save", _lost),
        (Pause, "may_step", lambda pause: True),
    ],
)
def test_faults_of_rests_show(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, fault: object
) -> None:
    monkeypatch.setattr(owner, name, fault)
    with pytest.raises(AssertionError):
        for seed in range(8):
            RestSimulation(seed, replays=seed % 2 == 0).run(STEPS)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_device_behind_the_host_shows_a_fault(fault: str) -> None:
    """Another plan arrives than was sent: it computes something else, or is none."""
    with broken(fault), pytest.raises((AssertionError, KeyError, EOFError, UnpicklingError)):
        Simulation(0, queued=True).run(STEPS)


def test_a_finished_choice_gives_way_when_its_fork_is_preempted() -> None:
    """This seed ends a private request whose fork has yet to copy its row, then needs all blocks:
    preempting the fork has to free them at once."""
    counts = Simulation(3197).run(300)
    assert counts["cold"] and counts["steps"] >= 300


def test_a_pause_waits_for_a_suspect_that_it_does_not_name() -> None:
    """The seed orders to sleep behind the answers in flight while a cold request, for which nobody
    waits, is a suspect: it runs alone before the others, so it has to be let in."""
    counts = RestSimulation(16, replays=True, ahead=True).run(STEPS)
    assert counts["asleep wait"] and counts["failures"]


def test_nobody_takes_the_blocks_of_a_prompt_that_is_in_the_step() -> None:
    """This seed has one tenant's prompt take all reports of a step. Another one's, resumed behind
    it, took its blocks and did not fit either, so that no step could be planned any more."""
    counts = Simulation(54, speculative=True).run(STEPS)
    assert counts["preemptions"] and counts["rows computed"]


def test_the_traffic_was_worth_its_name() -> None:
    """Runs after the seeds: a simulation in which nothing happens proves nothing. Which seeds run
    here depends on their cost, so seeds that are known to be eventful run where others were too
    few."""
    for seed in (*range(6), EVENTFUL):
        if not all(TOTALS[what] for what in HAPPENS):
            TOTALS.update(Simulation(seed).run(STEPS))
    if not (DRAFTED["drafts"] and DRAFTED["accepted drafts"]):
        DRAFTED.update(Simulation(1, speculative=True).run(STEPS))
    if not REPLAYED["tokens"] > REPLAYED["requests"]:
        test_replays_keep_every_promise_too(1)
    if not QUEUED["steps ahead"]:
        QUEUED.update(Simulation(0, queued=True).run(STEPS))
    crowded = ADAPTED["loads into slots"] > len(NAMES)
    if not crowded or not all(ADAPTED[what] for what in WITH_ADAPTERS):
        ADAPTED.update(AdapterSimulation(0).run(2 * STEPS))
    for seed in range(8):
        if not all(CHANGED[what] for what in WITH_UPDATES):
            test_weights_that_change_keep_every_promise_too(seed)
    for seed in RESTFUL:
        if not all(RESTED[what] for what in WITH_RESTS):
            test_pauses_sleep_and_pins_across_updates_keep_every_promise_too(seed)
    for seed in range(8):
        if not all(AHEAD[what] for what in PLANNED_AHEAD):
            AHEAD.update(Simulation(seed, ahead=True).run(STEPS))
    for seed in range(8):
        if not all(EXACT[what] for what in EXACTLY):
            test_prompts_come_from_prefill_and_answers_from_decoding(seed)
    for what in PLANNED_AHEAD:
        assert AHEAD[what] > 0, f"no {what}"
    for what in EXACTLY:
        assert EXACT[what] > 0, f"no {what}"
    for what in WITH_UPDATES:
        assert CHANGED[what] > 0, f"no {what}"
    for what in WITH_RESTS:
        assert RESTED[what] > 0, f"no {what}"
    assert QUEUED["steps ahead"] > 0
    for what in WITH_ADAPTERS:
        assert ADAPTED[what] > 0, f"no {what}"
    assert ADAPTED["loads into slots"] > len(NAMES)
    assert REPLAYED["tokens"] > REPLAYED["requests"] > 0
    for what in ("drafts", "accepted drafts"):
        assert DRAFTED[what] > 0, f"no {what}"
    for what in HAPPENS:
        assert TOTALS[what] > 0, f"no {what}"
