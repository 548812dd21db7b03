"""Everything around a server breaks while clients ask: answers are right or errors, none hangs."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from chaos_deeds import DEEDS, RANK_KILLED
from chaos_load import AGAIN, HANG_SECONDS, IN_TIME, RIGHT, Broken, Clients, Judge, Question
from chaos_load import questions as all_questions
from chaos_plan import Act, Plan, plan_of
from chaos_world import Setup, World
from process_tree import processes_below

TIDY, MEMORY, ENDS = "tidy", "memory", "ends"
PROMISES = {
    RIGHT: "an answer is that of the calm time, or an error; no ordinary question is refused (4xx)",
    IN_TIME: f"no answer and no end takes longer than {HANG_SECONDS:.0f} s",
    AGAIN: "once all is mended, everything is answered again, and /health is well",
    TIDY: "threads, files, processes and temporary folders are as before",
    MEMORY: "memory that has grown has a name, or is free: all but a twentieth",
    ENDS: "a server ends in order when told to, and leaves no process behind however it ends",
}
"""What a server keeps through all that is done to it."""
LOG_CHARACTERS = 3000


@dataclass
class Report:
    """What came of it.

    Attributes:
        right, errors: answers, and errors by what they were.
        deeds, skipped: how often each was done, and those that were not.
        broken: what broke a promise, each with its round.
    """

    right: int = 0
    rounds: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    deeds: Counter[str] = field(default_factory=Counter)
    skipped: set[str] = field(default_factory=set)
    broken: list[Broken] = field(default_factory=list)


@dataclass
class Run:
    """One run of chaos, which ends after a time, a number of deeds or a number of rounds; what has
    begun comes to its end.

    Args:
        seed: configurations, deeds and pauses follow from it alone; when requests arrive, and
            which process or file a deed finds, depends on the machine too.
        seconds, most_deeds, most_rounds: None: no limit.
        first: number of the first round.
        replicas: `deploy` is among the configurations; its start takes long.
        adapter: folder of an adapter for the demo model.
        setup: of every round; None: each draws one.
        say: receives lines about what happens.
    """

    seed: int
    seconds: float | None = None
    most_deeds: int | None = None
    most_rounds: int | None = None
    first: int = 0
    replicas: bool = False
    adapter: Path | None = None
    setup: Setup | None = None
    say: Callable[[str], None] = lambda _: None
    report: Report = field(default_factory=Report)
    _began: float = field(default_factory=time.monotonic)

    def run(self) -> Report:
        report = self.report
        while not report.rounds or not self._over:
            number = self.first + report.rounds
            plan = plan_of(
                self.seed,
                number,
                replicas=self.replicas,
                adapter=self.adapter is not None,
                setup=self.setup,
            )
            self._say(f"round {number}: {plan}")
            with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
                world = World(Path(folder), plan.setup, self.adapter)
                world.note = lambda text: self._say(f"    {text}")
                try:
                    for broken in self._round(world, plan):
                        where = f"round {number} ({plan}): {broken.what}"
                        report.broken.append(broken._replace(what=where))
                        self._say(f"BROKEN {broken.promise}: {broken.what}")
                        self._say(world.log.read_text(errors="replace")[-LOG_CHARACTERS:])
                finally:
                    world.close()
            report.rounds += 1
        report.skipped = {deed.name for deed in DEEDS} - set(report.deeds)
        return report

    @property
    def _over(self) -> bool:
        report, past = self.report, time.monotonic() - self._began
        return (
            (self.seconds is not None and past > self.seconds)
            or (self.most_deeds is not None and report.deeds.total() >= self.most_deeds)
            or (self.most_rounds is not None and report.rounds >= self.most_rounds)
        )

    def _say(self, text: str) -> None:
        self.say(f"{time.monotonic() - self._began:8.1f} s  {text}")

    def _round(self, world: World, plan: Plan) -> Iterator[Broken]:
        """One server from its start to its end; yield what breaks a promise."""
        adapter = "tuned" if world.adapter is not None else None
        asked = all_questions(adapter, responses=plan.setup.responses)
        judge, act, below = Judge(), plan.acts[0], dict[int, str]()
        with world.serving():
            yield from _calm(world, asked, judge)
            before = world.state()
            clients = Clients(world.url, asked, judge, plan.clients, plan.setup.clients)
            for act in plan.acts:
                below = processes_below(world.pid)
                self._do(act, world)
                if self._over:
                    break
            yield from clients.stop()
            if not act.fatal:
                yield from _calm(world, asked, judge)
                yield from as_broken(TIDY, world.state().grown(before))
                yield from as_broken(MEMORY, world.grown_memory(before))
                yield from as_broken(ENDS, world.ends())
            elif act.deeds[-1].name == RANK_KILLED:
                yield from as_broken(ENDS, world.gives_up())
                yield from as_broken(ENDS, world.left_behind(below))
            else:
                assert world.server is not None
                world.server.process.kill()
                world.server.process.wait()
                yield from as_broken(ENDS, world.left_behind(below))
        self.report.right += judge.right
        self.report.errors += judge.errors
        yield from judge.broken

    def _do(self, act: Act, world: World) -> None:
        """Do its deeds, and undo them."""
        with contextlib.ExitStack() as going:
            for deed, pause in zip(act.deeds, act.pauses, strict=False):
                self._say(f"  {deed.name}")
                self.report.deeds[deed.name] += 1
                going.enter_context(deed.act(world, act.chance(deed)))
                time.sleep(pause)
        time.sleep(act.pauses[-1])


def as_broken(promise: str, faults: Iterable[str]) -> Iterator[Broken]:
    return (Broken(promise, what) for what in faults)


def _calm(world: World, asked: list[Question], judge: Judge) -> Iterator[Broken]:
    """Ask everything, again until it is answered; yield questions without an answer."""
    deadline = time.monotonic() + HANG_SECONDS
    with httpx.Client(base_url=world.url, timeout=HANG_SECONDS, trust_env=False) as client:
        for question in asked:
            broken = len(judge.broken)
            while not judge.ask(client, question, stream=False):
                if len(judge.broken) > broken:
                    break
                if time.monotonic() > deadline:
                    yield Broken(AGAIN, f"{question.name} is never answered: {dict(judge.errors)}")
                    return
                time.sleep(0.2)
        with contextlib.suppress(httpx.TransportError):
            if client.get("/health").status_code != 200:
                yield Broken(AGAIN, f"/health: {client.get('/health').text[:300]}")


def result(report: Report) -> Iterator[str]:
    """Yield what was injected, what came of it, and each promise with whether it was kept."""
    yield f"{report.rounds} rounds, {report.right} right answers, errors: {dict(report.errors)}"
    yield f"injected: {report.deeds.total()} deeds"
    for name, count in sorted(report.deeds.items()):
        yield f"{count:>5} times: {name}"
    for name in sorted(report.skipped):
        yield f"not done: {name}"
    for promise, text in PROMISES.items():
        faults = [each.what for each in report.broken if each.promise == promise]
        yield f"{'BROKEN' if faults else 'kept':<6} {promise}: {text}"
        yield from (f"       {what}" for what in faults)
    if not shown(report):
        yield "NOTHING SHOWN: there was no deed, or no right answer"


def shown(report: Report) -> bool:
    """Whether there was anything that could have broken a promise."""
    return bool(report.deeds) and report.right > 0
