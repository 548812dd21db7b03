"""Random traffic under weights that change, with pauses, sleep, pins and audits between steps."""

from __future__ import annotations

import random
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

from simulated_client import Client
from simulated_weights import WeightSimulation

from vlm_serve.cache.tiers.entry import Kind
from vlm_serve.engine.core.scheduler import Event
from vlm_serve.engine.features.audits import AUDIT_PRIORITY, Auditor
from vlm_serve.engine.features.inspection import Inspector
from vlm_serve.engine.features.pause import MAX_WAITING, Pause, PauseMode
from vlm_serve.engine.features.sleep import PARTS, Part, Sleep
from vlm_serve.engine.features.tiers.loading import TierLoading, Tiers
from vlm_serve.engine.requests.plan import StepOutput, StepPlan
from vlm_serve.engine.requests.request import Request
from vlm_serve.engine.requests.sequence import Sequence

MODES: tuple[PauseMode, ...] = ("abort", "retract", "in_place", "in_place", "wait")


class RestSimulation(WeightSimulation):
    """Traffic with rests. Takes the options of `Simulation`."""

    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__(seed, **options)
        self._rests = random.Random(f"rests {seed}")
        self._rest_rate = self._rests.choice([0.01, 0.05, 0.1])
        self.last_step_time = 0.0
        self._falling: tuple[frozenset[Part], Future[None]] | None = None
        """Parts that are given back as soon as the requests in flight are as the order says."""
        pause = self.features.get(Pause)
        assert pause is not None
        self.pause = pause
        self.auditor = Auditor(self._rests.choice([0.3, 1.0]), self.config.max_num_seqs)
        cache, hooks = self.cache, self.scheduler.hooks
        self._inspection = Inspector(cache, self.media, hooks, clock=lambda: self.counts["clock"])
        tiers = None
        if self.tiers.fetcher is not None:
            tiers = Tiers(self.tiers.stack, self.tiers.saver, self.tiers.fetcher)
        self.sleep = Sleep(
            self.scheduler,
            TierLoading(cache, tiers, self.tiers.embeddings),
            cast("Any", SimpleNamespace(run=self._drop)),
            self._release,
            seconds=None,
            pause=pause,
            weights=self._updates,
        )
        for feature in (self.auditor, self._inspection, self.sleep, _Watch(self)):
            hooks.add(feature)
        for attach in (pause.attach, self.auditor.attach, self.sleep.attach):
            attach(cast("Any", self))

    # What rests know of the loop and of the executor.

    def submit(self, request: Request) -> None:
        self._enter(request, request.prompt, poisonous=False)

    def _drop(self, plan: StepPlan) -> None:
        self.executor.fail_next = False
        self.executor.run(plan)
        self.twin.run(plan)

    def _release(self) -> None:
        self.executor.release()
        self.twin.release()

    def client_of(self, sequence: Sequence) -> Client:
        return self.clients[sequence.request.request_id]

    # Traffic

    def _traffic(self) -> None:
        self.counts["clock"] += 1
        for due in self.scheduler.hooks.on_time[:]:
            due()
        if not self.sleep.parts:
            super()._traffic()
        if self._rests.random() < self._rest_rate:
            self._pin()
        if self.pause._keeps and self._under_way is None and self._rests.random() < 0.3:
            self._update()
        if self._rests.random() < self._rest_rate:
            self._rest()
        elif self.pause.reasons and self._rests.random() < 0.3:
            self._go_on()
        self._fall_asleep()
        self._check_rest()

    def _pin(self) -> None:
        nodes = [*self.cache.nodes()]
        if nodes and self.cache.config.enabled:
            node = self._rests.choice(nodes)
            tokens = self._inspection.pin_node(node, self._rests.choice([3, 1000]), None)
            self.counts["pins"] += tokens > 0

    def _rest(self) -> None:
        """Begin a pause, or begin to sleep unless that has begun."""
        mode: PauseMode = self._rests.choice(MODES)
        if mode == "wait" and len(self.pause._told) >= MAX_WAITING:
            mode = "retract"
        sleeps = mode != "in_place" and not self._falling and self._rests.random() < 0.5
        done = self.pause.begin(mode, "asleep" if sleeps else "paused")
        if sleeps:
            parts = self._rests.sample(PARTS, self._rests.choice([1, 2]))
            self._falling = frozenset(parts), done
        self._forget_removed()
        self.counts[f"{'asleep' if sleeps else 'paused'} {mode}"] += 1

    def _fall_asleep(self) -> None:
        if self._falling is None or not self._falling[1].done() or self._under_way is not None:
            return
        (parts, _), self._falling = self._falling, None
        held = self._in_device() if "kv_cache" in parts else set()
        self.sleep.give(parts)
        self._forget_removed()
        for part in parts:
            self.counts[f"{part} given back"] += 1
        if "kv_cache" in parts:
            assert self.cache.free_block_count == self.cache.config.num_blocks, "blocks are held"
            assert self.cache.timed_pins.next_end is None, "a pin holds nothing"
            assert held <= self._in_tiers(), "tiers lack what the device held"
            self.counts["sunk"] += len(held)

    def _go_on(self) -> None:
        """Continue, or take some memory again: weights by reading or by an update."""
        if "paused" in self.pause.reasons and self._rests.random() < 0.5:
            self.pause.end("paused")
            return
        if self._falling or "asleep" not in self.pause.reasons:
            return
        wanted = frozenset(self._rests.sample(PARTS, self._rests.choice([1, 2])))
        if "weights" in wanted & self.sleep.parts:
            if self._rests.random() < 0.5:
                self._update()
            else:
                self._updates.read_again(lambda swap: swap())
        self.sleep.take(wanted)

    def _update(self) -> None:
        if self._falling:
            return  # the engine refuses one of two orders at a time
        held = {each for each in self.scheduler.running if each.held is not None}
        keeps = self.pause._keeps
        super()._update()
        assert not self.cache.timed_pins.pins, "a pin outlives its weights"
        kept = {each for each in held if each.held is not None}
        assert not kept or keeps, "old KV although nothing keeps it"
        self.counts["updates in place"] += bool(kept)
        self.counts["updates asleep"] += bool(self.sleep.parts)

    def _in_device(self) -> set[Any]:
        """Return the entries that tiers which never fail and have room must hold later."""
        stores = self.tiers.stores if self.tiers.fetcher is not None else []
        if len(stores) != 1 or stores[0]._error_rate or stores[0].max_bytes < 1_000_000:
            return set()
        size, origin = self.cache.config.block_size, self.tiers.stack.origin
        whole = (node for node in self.cache.nodes() if node.num_tokens == size)
        return {origin.id(Kind.KV, node.key) for node in whole}

    def _in_tiers(self) -> set[Any]:
        return {each for store in self.tiers.stores for each in store}

    def _check_rest(self) -> None:
        """Requests in flight are as the order says, once it is done."""
        if not self.pause.reasons or self.pause._mode is not None or self.pause._first:
            return
        queues = self.scheduler.queues
        if not self.pause._keeps:
            held = [each for each in (*queues.running, *queues.waiting) if each.held is not None]
            assert not held, "a request holds KV although it was to give it up"

    # Steps

    def _step(self) -> None:
        if self._under_way is None and not self.pause.may_step():
            self._committed = False
            self.tiers.step()
            self.turns.step()
            self.counts["rests"] += 1
        else:
            super()._step()
        for notice in self.scheduler.hooks.on_idle:
            notice()
        self._forget_removed()

    def _run(self, plan: StepPlan) -> StepOutput:
        assert self.pause.may_step(), "a step although generation is paused"
        assert not self.sleep.parts, "a step without memory"
        return super()._run(plan)

    def _deliver(self, events: list[Event]) -> None:
        super()._deliver(events)
        ended = {group: None for group, _ in events if group.request.request_id not in self.clients}
        for group in ended:
            for notice in self.scheduler.hooks.on_finished:
                notice(group)
        for group, delta in events:
            group.request.on_delta(delta)

    def _answered(self, client: Client) -> None:
        if client.group.request.priority != AUDIT_PRIORITY:
            super()._answered(client)

    def _drain(self) -> None:
        if "weights" in self.sleep.parts:
            self._updates.read_again(lambda swap: swap())
        self._falling = None
        self.pause.end("paused")
        self.sleep.take(frozenset(PARTS))
        super()._drain()
        counts = self.auditor.counts
        assert not counts.mismatches and not counts.near_ties, "a hit changed the answer"
        self.counts["audits"] += counts.audits
        self.counts["audits dropped"] += counts.dropped


class _Watch:
    """Follows who loses KV that others have computed, and who goes on from it."""

    def __init__(self, simulation: RestSimulation) -> None:
        self._of = simulation

    def on_admitted(self, sequence: Sequence) -> None:
        client, lease = self._of.client_of(sequence), sequence.lease
        assert lease is not None
        if client.keeps(sequence.index) and not (
            lease.private and sequence.num_computed >= client.keeps(sequence.index)
        ):
            client.restart(sequence)
            self._of.counts["kept in vain"] += 1
            for executor in (self._of.executor, self._of.twin):
                executor.restart(sequence.number)

    def on_forked(self, parent: Sequence, choice: Sequence) -> None:
        client = self._of.client_of(parent)
        if client.keeps(parent.index):
            client.fork(parent, choice)
            self._of.counts["forks of old KV"] += 1
            for executor in (self._of.executor, self._of.twin):
                executor.fork(choice.number, parent.number)
