"""What a seed makes chaos do: configurations, deeds and pauses, before anything is started."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from chaos_deeds import DEEDS, RANK_KILLED, Deed, a_moment, together
from chaos_world import Setup, random_setup

TWO_AT_A_TIME = 0.4
"""How likely a deed goes on while the next one begins."""
RANK_KILLED_SHARE, FATAL_SHARE = 0.7, 0.5


@dataclass(frozen=True)
class Act:
    """One deed, or two that go on at a time.

    Attributes:
        deeds: in the order in which they begin; they are undone in the reverse one.
        pauses: seconds after each has begun, and after all are undone.
        key: seeds the deeds' own generators.
    """

    deeds: tuple[Deed, ...]
    pauses: tuple[float, ...]
    key: str

    @property
    def fatal(self) -> bool:
        return self.deeds[-1].fatal

    def chance(self, deed: Deed) -> random.Random:
        """Return the generator of one deed."""
        return random.Random(f"{self.key} {deed.name}")


@dataclass(frozen=True)
class Plan:
    """One round: a server from its start to its end.

    Attributes:
        clients: seeds the clients' generators.
    """

    setup: Setup
    acts: tuple[Act, ...]
    clients: int

    def __str__(self) -> str:
        return str(self.setup)


def plan_of(
    seed: int,
    number: int,
    *,
    replicas: bool = False,
    adapter: bool = False,
    setup: Setup | None = None,
) -> Plan:
    """Return the plan of one round, which depends on nothing that happens.

    Only what is not installed is left out: Ray, or a server for the shared store.

    Args:
        replicas, adapter: see `random_setup`.
        setup: the configuration; None: it is drawn too.
    """
    drawn = random_setup(
        random.Random(f"{seed} {number} setup"), replicas=replicas, adapter=adapter
    )
    setup = setup or drawn
    if not adapter:
        setup = replace(setup, adapter=False)
    chance = random.Random(f"{seed} {number} deeds")
    acts = tuple(
        Act(deeds, tuple(a_moment(chance) for _ in range(len(deeds) + 1)), f"{seed} {number} {at}")
        for at, deeds in enumerate(_drawn(setup, chance))
    )
    return Plan(setup, acts, random.Random(f"{seed} {number} clients").randrange(10**9))


def _drawn(setup: Setup, chance: random.Random) -> Iterator[tuple[Deed, ...]]:
    """Yield every possible deed once, sometimes two that go on at a time; a fatal one last in half
    of the rounds, mostly where a rank can be killed."""
    order = chance.sample(DEEDS, len(DEEDS))
    possible = [deed for deed in order if deed.possible(setup)]
    waiting = [deed for deed in possible if not deed.fatal]
    while waiting:
        deeds = [waiting.pop(0)]
        if waiting and chance.random() < TWO_AT_A_TIME and together(deeds[0], waiting[0]):
            deeds.append(waiting.pop(0))
        yield tuple(deeds)
    fatal = {deed.name: deed for deed in possible if deed.fatal}
    if RANK_KILLED in fatal and chance.random() < RANK_KILLED_SHARE:
        yield (fatal[RANK_KILLED],)
    elif chance.random() < FATAL_SHARE:
        yield (next(iter(fatal.values())),)
