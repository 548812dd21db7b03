"""Hypothesis drives the facade; a dict model and a memory of digests say what must hold."""

from __future__ import annotations

import pytest
from cache_texts import END_OF_TURN, Image, Segment, Text
from cache_world import Run, World
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vlm_serve.cache.config import CacheConfig
from vlm_serve.cache.logprobs import WantedRows

MAX_RUNS = 3
# Conversations that share prefixes: the same picture, another one, the same one at another offset.
CONVERSATIONS: list[list[Segment]] = [
    [[5, 6, END_OF_TURN], Image("cat", 6), [7, END_OF_TURN], [8, 9], [5, 6, 7, 8, 9]],
    [[5, 6, END_OF_TURN], Image("dog", 6), [7, END_OF_TURN], [8, 9], [5, 6, 7, 8, 9]],
    [[5, 6, END_OF_TURN], [5, 6, 7, 8, 9], Image("cat", 6), [7, 7, 7], [END_OF_TURN]],
    [Image("cat", 3), Image("dog", 9), [5, 6, 7], [8], [5, 6, 7, 8, 9]],
]
QUESTIONS: list[Segment] = [[], [10], [10, 11, 12, END_OF_TURN, 13, 14], [15] * 9]

configs = st.builds(
    CacheConfig,
    num_blocks=st.sampled_from([7, 10, 20]),
    block_size=st.just(4),
    num_live_rows=st.integers(1, MAX_RUNS),
    num_snapshot_rows=st.sampled_from([0, 1, 5]),
    has_state=st.sampled_from([True, True, True, False]),
    enabled=st.sampled_from([True] * 7 + [False]),
    min_snapshot_gain=st.just(2),
    ghost_entries=st.sampled_from([0, 4, None]),
    logprob_bytes=st.sampled_from([0, 700, 1 << 20]),
)


def _text(
    base: list[Segment], turns: int, question: Segment, salt: str, marked: list[float]
) -> Text:
    """A text with marks at some shares of its length."""
    length = len(Text(*base[:turns], question))
    marks = [1 + int(share * (length - 1)) for share in marked]
    return Text(*base[:turns], question, salt=salt, marks=marks)


texts = st.builds(
    _text,
    st.sampled_from(CONVERSATIONS),
    st.integers(1, 5),
    st.sampled_from(QUESTIONS),
    st.sampled_from(["", "", "", "tenant"]),
    st.lists(st.floats(0.0, 1.0), max_size=2),
)
pick = st.integers(0, MAX_RUNS - 1)
share = st.sampled_from([0.0, 0.2, 0.5, 0.8, 1.0])
wishes = st.none() | st.builds(WantedRows, st.sampled_from([1, 1, 6]), st.sampled_from([0, 2, 5]))
offsets = st.sampled_from([{0, 1, 2, 3}, {0, 1, 2, 3}, {0}, {1, 2, 3}, set[int]()])
rarely = st.sampled_from([False, False, False, False, True])


class PrefixCacheMachine(RuleBasedStateMachine):
    world: World

    @initialize(config=configs)
    def begin(self, config: CacheConfig) -> None:
        self.world = World(config)

    def run_at(self, which: int) -> Run:
        return self.world.runs[which % len(self.world.runs)]

    def advance(self, run: Run, amount: float, snapshots: set[int]) -> bool:
        left = len(run.text) - run.lease.length
        end = run.lease.length + 1 + int(amount * (left - 1))
        return self.world.step(run, end, lambda position: position % 4 in snapshots)

    @precondition(lambda self: len(self.world.runs) < MAX_RUNS)
    @rule(text=texts, first=share, cold=rarely, complete=rarely, wants=wishes)
    def start(
        self, text: Text, first: float, cold: bool, complete: bool, wants: WantedRows | None
    ) -> None:
        end = 1 + int(first * (len(text) - 1))
        capture = first < 0.5
        self.world.start(
            text, first=end, cold=cold, complete=complete, capture=capture, wants=wants
        )

    @precondition(lambda self: len(self.world.runs) < MAX_RUNS)
    @rule(text=texts, snapshots=offsets, capture=st.booleans(), stays=rarely, wants=wishes)
    def serve(
        self,
        text: Text,
        snapshots: set[int],
        capture: bool,
        stays: bool,
        wants: WantedRows | None,
    ) -> None:
        """A whole request in one slice."""
        run = self.world.start(text, capture=capture, wants=wants)
        if run is not None:
            assert self.advance(run, 1.0, snapshots), "the blocks of the first slice were granted"
            if not stays:
                self.world.close(run)

    @precondition(lambda self: self.world.runs)
    @rule(which=pick, amount=share, snapshots=offsets, token=st.integers(0, 3))
    def step(self, which: int, amount: float, snapshots: set[int], token: int) -> None:
        """A prefill slice, or a decode step once the text is computed."""
        run = self.run_at(which)
        if run.lease.length == len(run.text):
            run.text.append(END_OF_TURN if token == 0 else 10 + token)
        self.advance(run, amount, snapshots)

    @precondition(lambda self: self.world.runs)
    @rule(which=pick, how=st.sampled_from(["close", "fail", "suspend", "suspend", "fork"]))
    def leave(self, which: int, how: str) -> None:
        run = self.run_at(which)
        if how == "fail" and run.lease.length < len(run.text):
            self.world.fail(run, len(run.text))
        elif how == "suspend":
            self.world.suspend(run)
        elif how == "fork" and run.lease.committed and len(self.world.runs) < MAX_RUNS:
            self.world.fork(run)
        else:
            self.world.close(run)

    @precondition(lambda self: self.world.parked and self.world.has_live_slot)
    @rule(which=pick, drop=rarely)
    def come_back(self, which: int, drop: bool) -> None:
        index = which % len(self.world.parked)
        if drop:
            self.world.drop(index)
        else:
            self.world.resume(index)

    @rule(text=texts, what=st.sampled_from(["pin", "pin", "expire", "flush"]), time=pick)
    def upkeep(self, text: Text, what: str, time: int) -> None:
        cache = self.world.cache
        if what == "pin":
            cache.bring_marks(text.keys)
            _, _, boundary = self.world.expected(text, len(text))
            assert cache.pin(text.keys, time) in (0, boundary)
        elif what == "expire":
            cache.timed_pins.expire(time)
        elif not self.world.runs:
            cache.flush()
            assert not self.world.nodes, "nothing ran and something survived the flush"

    @invariant()
    def check(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        """When everybody has left, everything is back."""
        if not hasattr(self, "world"):
            return
        world = self.world
        for run in list(world.runs):
            world.close(run)
        while world.parked:
            world.drop(0)
        world.cache.flush()
        world.check()
        assert world.cache.free_block_count == world.config.num_blocks
        assert world.cache.usage.rows["free"] == world.config.num_rows
        assert not world.nodes and not world.snapshots


TestPrefixCacheMachine = pytest.mark.fuzz(PrefixCacheMachine.TestCase)
TestPrefixCacheMachine.settings = settings(
    max_examples=300,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
