"""Everything around a server breaks while clients ask: answers are right or errors, none hangs."""

from __future__ import annotations

import contextlib
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from chaos_deeds import DEEDS, RANK_KILLED, Deed, together, wait_a_moment
from chaos_load import HANG_SECONDS, Clients, Judge, Question, questions
from chaos_world import Setup, World, random_setup
from process_tree import processes_below

TWO_AT_A_TIME = 0.4
"""How likely a deed goes on while the next one begins."""


@dataclass
class Report:
    """What came of it.

    Attributes:
        wrong: wrong answers, hangs, and whatever is not as before, each with its round.
        deeds, skipped: how often each was done, and those for which something is missing.
    """

    right: int = 0
    rounds: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    deeds: Counter[str] = field(default_factory=Counter)
    skipped: set[str] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)


def run(
    seed: int,
    seconds: float,
    *,
    replicas: bool = False,
    adapter: Path | None = None,
    setup: Setup | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Report:
    """Run rounds until the time is up; the last one comes to its end.

    Args:
        seed: configurations and deeds follow from it, the moments of requests do not.
        replicas: `deploy` is among the configurations; its start takes long.
        adapter: folder of an adapter for the demo model.
        setup: of every round; None: each draws one.
        say: receives lines about what happens.
    """
    report, until = Report(), time.monotonic() + seconds
    while time.monotonic() < until:
        chance = random.Random(f"{seed} {report.rounds}")
        chosen = setup or random_setup(chance, replicas=replicas)
        say(f"round {report.rounds}: {chosen}")
        with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
            world = World(Path(folder), chosen, adapter)
            try:
                for what in _round(world, chance, until, report, say):
                    report.wrong.append(f"round {report.rounds} ({chosen}): {what}")
                    say(f"WRONG: {what}")
                    shown = world.log.read_text(errors="replace")[-3000:]
                    say(shown)
            finally:
                world.close()
        report.rounds += 1
    done = set(report.deeds)
    report.skipped = {deed.name for deed in DEEDS} - done
    return report


def _round(
    world: World,
    chance: random.Random,
    until: float,
    report: Report,
    say: Callable[[str], None],
) -> Iterator[str]:
    """One server from its start to its end; yield faults."""
    adapter = "tuned" if world.adapter is not None else None
    asked = questions(adapter, responses=world.setup.responses)
    judge = Judge()
    with world.serving():
        yield from _calm(world, asked, judge)
        before = world.state()
        clients = Clients(world.url, asked, judge, chance.randrange(10**9), world.setup.clients)
        deeds: list[Deed] = []
        for deeds in _drawn(world, chance):
            below = processes_below(world.pid)
            with contextlib.ExitStack() as going:
                for deed in deeds:
                    say(f"  {deed.name}")
                    report.deeds[deed.name] += 1
                    going.enter_context(deed.act(world, chance))
                    wait_a_moment(chance)
            wait_a_moment(chance)
            if deeds[-1].fatal or time.monotonic() > until:
                break
        yield from clients.stop()
        if not deeds[-1].fatal:
            yield from _calm(world, asked, judge)
            yield from world.state().grown(before)
            yield from world.ends()
        elif deeds[-1].name == RANK_KILLED:
            yield from world.gives_up()
            yield from world.left_behind(below)
        else:
            assert world.server is not None
            world.server.process.kill()
            world.server.process.wait()
            yield from world.left_behind(below)
    report.right += judge.right
    report.errors += judge.errors
    yield from judge.wrong


def _drawn(world: World, chance: random.Random) -> Iterator[list[Deed]]:
    """Yield possible deeds, sometimes two that go on at a time; a fatal one last in half of the
    rounds, mostly where a rank can be killed."""
    possible = [deed for deed in DEEDS if deed.possible(world)]
    harmless = [deed for deed in possible if not deed.fatal]
    waiting = chance.sample(harmless, len(harmless))
    while waiting:
        deeds = [waiting.pop(0)]
        if waiting and chance.random() < TWO_AT_A_TIME and together(deeds[0], waiting[0]):
            deeds.append(waiting.pop(0))
        yield deeds
    fatal = {deed.name: deed for deed in possible if deed.fatal}
    if RANK_KILLED in fatal and chance.random() < 0.7:
        yield [fatal[RANK_KILLED]]
    elif chance.random() < 0.5:
        yield [chance.choice(list(fatal.values()))]


def _calm(world: World, asked: list[Question], judge: Judge) -> Iterator[str]:
    """Ask everything, again until it is answered; yield questions without an answer."""
    deadline = time.monotonic() + HANG_SECONDS
    with httpx.Client(base_url=world.url, timeout=HANG_SECONDS, trust_env=False) as client:
        for question in asked:
            wrong = len(judge.wrong)
            while not judge.ask(client, question, stream=False):
                if len(judge.wrong) > wrong:
                    break
                if time.monotonic() > deadline:
                    yield f"{question.name} is never answered: {dict(judge.errors)}"
                    return
                time.sleep(0.2)
        with contextlib.suppress(httpx.TransportError):
            if client.get("/health").status_code != 200:
                yield f"/health: {client.get('/health').text[:300]}"
