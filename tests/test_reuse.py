"""Policies of snapshots and what they reuse (benchmarks/reuse.py)."""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest

from benchmarks.common.reuse_agents import (
    APPENDED,
    COMPACTED,
    SYSTEM_TOKENS,
    TOOL_STEPS,
    published_agents,
)
from benchmarks.common.reuse_clairvoyant import Clairvoyant
from benchmarks.common.reuse_marconi import ALPHAS, WINDOW, FlopAware
from benchmarks.common.reuse_policies import DEFAULT, FIXED, POLICIES, Policy
from benchmarks.common.reuse_rivals import RivalCache
from benchmarks.common.reuse_runs import Run, make_prompt, places, reusable
from benchmarks.common.reuse_trace import TraceRequest, asked_of, made_trace, read_trace
from benchmarks.common.reuse_workloads import TOOL, WORKLOADS, Asked, Message, digest, workload
from benchmarks.reuse import Table, chosen_policies, main, of_memory, of_rows, parsed
from vlm_serve.preprocess.identity.prompt import Prompt

DIGESTS = {
    "chats": "04c6382a405e1319",
    "agents": "3ef6570ef535e12e",
    "documents with questions": "f5db9b4e060319ad",
    "growing video": "8da07db9d28d1008",
    "few-shot evaluation": "14140b3700406322",
}
"""Written down before the policy. They are never tuned to it."""
RIVALS = [name for name in POLICIES if name != "default"]


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_what_it_was_before_the_policy(name: str) -> None:
    assert digest(workload(name))[:16] == DIGESTS[name]


def prepared(asked: list[Asked]) -> tuple[list[Asked], list[Prompt]]:
    return asked, [make_prompt(one) for one in asked]


def blocks(*numbers: int, rest: int = 1) -> TraceRequest:
    """A request of a trace: whole blocks, and one that is not whole."""
    return TraceRequest(len(numbers) * 512 + rest, (*numbers, 1_000_000))


def alone(requests: list[TraceRequest], rows: int, policy: Policy) -> list[int]:
    """Return what each request takes from the cache if it comes after all earlier ones. An idle
    row is the one of the single seat."""
    asked, prompts = prepared(asked_of(requests))
    return Run(asked, prompts, rows, policy=policy, seats=1).run().by_request


# Runs


def test_a_run_reuses_what_rows_allow() -> None:
    asked, prompts = prepared(workload("few-shot evaluation")[:60])
    ample, none = (Run(asked, prompts, rows).run() for rows in (256, 0))
    assert ample.prompt == sum(map(len, prompts))
    assert none.cached < ample.cached <= reusable(asked, prompts) < ample.prompt
    assert none.evictions and not ample.evictions


@pytest.mark.parametrize("rows", [64, 256])
def test_places_off_the_interval_are_learned(rows: int) -> None:
    """Questions follow documents in one message: prompts part without a mark or interval there."""
    asked, prompts = prepared(workload("documents with questions")[:130])
    fixed = Run(asked, prompts, rows, policy=FIXED).run()
    learned = Run(asked, prompts, rows).run()
    assert learned.saves["learned"] and not fixed.saves["learned"]
    possible = reusable(asked, prompts)
    assert fixed.cached < learned.cached <= possible
    if rows == 256:
        assert 2 * (possible - learned.cached) < possible - fixed.cached


@pytest.mark.always
def test_policies_on_300_requests_of_a_traces_shape() -> None:
    """The blocks have 64 tokens instead of 512, to be quick."""
    rows = 8
    asked, prompts = prepared(asked_of(made_trace(300, 1), 64))
    possible, clairvoyant = reusable(asked, prompts), Clairvoyant(asked, prompts)
    most = clairvoyant.cached(rows)
    found = {name: Run(asked, prompts, rows, policy=each).run() for name, each in POLICIES.items()}
    for name, outcome in found.items():
        assert outcome.prompt == sum(map(len, prompts)), name
        assert 0.4 * possible < outcome.cached < most < possible, name
        assert outcome.evictions, name
    assert clairvoyant.cached(300) == pytest.approx(possible)
    assert found["default"].cached > found["lru"].cached
    assert found["default"].cached > found["fixed"].cached
    assert found["fixed"].saves["interval"] and found["thin"].saves["interval"]
    for name in ("none", "lru", "marconi"):
        assert set(found[name].saves) == {"prompt_end", "junction"}, name
    cached = [outcome.cached for outcome in found.values()]
    assert len(set(cached)) == len(cached), "two policies are the same"


def test_a_run_repeats_exactly() -> None:
    asked, prompts = prepared(asked_of(made_trace(60, 2), 64))
    first, second = (Run(asked, prompts, 4).run() for _ in range(2))
    assert first == second and first.cached


def test_blocks_run_out_and_a_host_tier_keeps_them() -> None:
    asked, prompts = prepared(asked_of(made_trace(80, 3), 64))
    for policy in (DEFAULT, POLICIES["lru"]):
        ample, short, tier = (
            Run(asked, prompts, 16, policy=policy, blocks=count, host_bytes=size).run()
            for count, size in ((None, None), (300, None), (300, 1 << 34))
        )
        assert not ample.blocks_evicted and short.blocks_evicted
        assert short.cached < tier.cached
        assert tier.saves["tier"] and not short.saves["tier"]


# Rules


def test_lru_evicts_what_was_asked_longest_ago() -> None:
    """Two rows: the end of the first prompt is read again before a third one needs a row."""
    ends = [blocks(1, 2), blocks(3, 4), blocks(1, 2), blocks(5, 6), blocks(1, 2), blocks(3, 4)]
    assert alone(ends, 2, POLICIES["lru"]) == [0, 0, 1024, 0, 1024, 0]


def test_thinning_keeps_a_path_covered() -> None:
    """A long prompt has eight rows, and three short ones need one each. LRU takes the first ones,
    thinning every other one."""
    long, short = tuple(range(1, 17)), [blocks(number) for number in (100, 101, 102)]
    starts = {
        name: [
            alone([blocks(*long), *short, blocks(*long[:depth], 500)], 8, Policy(rule=rule))[-1]
            for depth in (2, 4, 6, 8, 14)
        ]
        for name, rule in (("thin", POLICIES["thin"].rule), ("lru", POLICIES["lru"].rule))
    }
    assert starts["lru"] == [0, 0, 0, 4096, 7168]
    assert starts["thin"] == [1024, 1024, 3072, 3072, 7168]


def test_marconi_learns_how_much_long_prefixes_count() -> None:
    """Long prompts come again after many short ones that never do: recency alone loses them."""
    asked, prompts = prepared(asked_of(long_and_short(), 64))
    run = Run(asked, prompts, 6, policy=POLICIES["marconi"])
    lru = Run(asked, prompts, 6, policy=POLICIES["lru"]).run()
    cached = run.run().cached
    assert isinstance(run.cache, RivalCache) and isinstance(run.cache.rule, FlopAware)
    assert run.cache.rule.alpha in ALPHAS[1:]
    assert cached > 2 * lru.cached


def long_and_short() -> list[TraceRequest]:
    trace = []
    for turn in range(4 * WINDOW):
        long = turn % 2
        trace.append(blocks(*range(100 * long, 100 * long + 20)))
        trace += [blocks(1000 + 10 * turn + place) for place in range(7)]
    return trace


def test_a_snapshot_with_two_followers_is_no_candidate_of_marconi() -> None:
    """The junction was used the longest ago, yet a leaf goes."""
    trace = [blocks(1, 2, 3), blocks(1, 2, 4), blocks(1, 2, 4, 5), blocks(1, 2, 3, 6)]
    trace += [blocks(7, 8), blocks(1, 2, 9)]
    assert alone(trace, 4, POLICIES["lru"])[-1] == 0
    assert alone(trace, 4, POLICIES["marconi"])[-1] == 1024


# The clairvoyant programme


def best_by_trying(asked: list[Asked], prompts: list[Prompt], rows: int) -> int:
    """The most tokens reused with any choice of states to keep after each request."""
    known: dict[frozenset[bytes], int] = {frozenset(): 0}
    for one, prompt in zip(asked, prompts, strict=True):
        possible, passed = places(one, prompt)
        following: dict[frozenset[bytes], int] = {}
        for held, saved in known.items():
            start = max((cut for key, cut in possible.items() if key in held), default=0)
            made = {key for key in passed if possible.get(key, 1 << 30) > start}
            there = sorted(held | made)
            for count in range(min(rows, len(there)) + 1):
                for kept in combinations(there, count):
                    choice = frozenset(kept)
                    value = max(following.get(choice, 0), saved + start)
                    following[choice] = value
        known = following
    return max(known.values())


def test_the_programme_is_what_trying_finds() -> None:
    """Fractions of states make it a bound; on most small traces it is reached."""
    reached = 0
    for seed in range(10):
        rng = random.Random(seed)
        depths = [rng.randint(1, 3) for _ in range(6)]
        trace = [blocks(*(10 * at + rng.randint(0, 1) for at in range(each))) for each in depths]
        asked, prompts = prepared(asked_of(map(one_by_prefix, trace), 64))
        for rows in (1, 2):
            bound = Clairvoyant(asked, prompts).cached(rows)
            tried = best_by_trying(asked, prompts, rows)
            assert tried - 1e-6 <= bound <= 1.25 * tried
            reached += bound == pytest.approx(tried)
    assert reached > 13


def one_by_prefix(request: TraceRequest) -> TraceRequest:
    """Number blocks by their prefixes, as a trace does."""
    ids = request.whole_blocks
    return blocks(*(hash(ids[: place + 1]) for place in range(len(ids))))


def test_the_programme_falls_back_on_shallower_states() -> None:
    """One row: whoever holds the common part serves all, and the whole of one prompt only one."""
    trace = [blocks(1, 2, 3), blocks(1, 2, 4), blocks(1, 2, 3), blocks(1, 2, 5), blocks(1, 2, 6)]
    asked, prompts = prepared(asked_of(trace, 64))
    assert Clairvoyant(asked, prompts).cached(1) == pytest.approx(4 * 128)
    assert Clairvoyant(asked, prompts).cached(2) == pytest.approx(4 * 128 + 64)
    assert Clairvoyant(asked, prompts).cached(0) == pytest.approx(0)


def test_the_programme_makes_no_state_before_a_start() -> None:
    """One row: the second prompt starts from both blocks, so it has no state of the first one for
    the third prompt; or from the first one alone."""
    asked, prompts = prepared(asked_of([blocks(1, 2), blocks(1, 2), blocks(1, 3)], 64))
    assert best_by_trying(asked, prompts, 1) == 128
    assert 128 <= Clairvoyant(asked, prompts).cached(1) < 128 + 64


def test_the_programme_of_strangers_is_empty() -> None:
    asked, prompts = prepared(asked_of([blocks(1), blocks(2)]))
    assert Clairvoyant(asked, prompts).cached(8) == 0


# Traces


def test_a_trace_is_read_as_it_is_written(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 1024, "output_length": 9, "hash_ids": [1, 2]},
        {"timestamp": 5, "input_length": 1100, "output_length": 9, "hash_ids": [1, 2, 3]},
        {"timestamp": 9, "input_length": 1200, "output_length": 9, "hash_ids": [1, 2, 3]},
    ]
    plain, packed = tmp_path / "trace.jsonl", tmp_path / "trace.jsonl.gz"
    text = "".join(json.dumps(row) + "\n" for row in rows)
    plain.write_text(text, encoding="utf-8")
    packed.write_bytes(gzip.compress(text.encode()))
    trace = read_trace(plain)
    assert trace == read_trace(packed) and len(trace) == 3
    assert read_trace(packed, 1, 1) == trace[1:2]
    asked, prompts = prepared(asked_of(trace))
    assert [len(prompt) for prompt in prompts] == [1025, 1025, 1025]
    assert len({prompt.token_ids[-1] for prompt in prompts}) == 3, "the last token is its own"
    assert reusable(asked, prompts) == 2 * 1024


@pytest.mark.parametrize(
    "line", ["{}", "nonsense", "[1]", '{"input_length": 1024, "hash_ids": [1]}']
)
def test_a_line_that_is_no_request_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"input_length": 512, "hash_ids": [1]}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"trace\.jsonl:2: "):
        read_trace(path)


# Traffic of agents


def test_agents_have_the_published_statistics() -> None:
    rng = random.Random(0)
    for drawn, shares in ((APPENDED, {951: 0.5, 5300: 0.9}), (TOOL_STEPS, {1: 0.5, 20: 0.9})):
        values = [drawn.draw(rng) for _ in range(4000)]
        for value, share in shares.items():
            assert sum(each <= value for each in values) / 4000 == pytest.approx(share, abs=0.03)


def test_agents_go_on_from_their_history_and_share_a_system_prompt() -> None:
    asked = published_agents(random.Random("agents 1"), 80)
    assert asked == published_agents(random.Random("agents 1"), 80)
    systems = {one.messages[0] for one in asked}
    assert [len(system.parts[0]) for system in systems] == [SYSTEM_TOKENS]  # type: ignore[arg-type]
    continued = 0
    for index, one in enumerate(asked):
        assert one.after < index
        if one.after >= 0:
            before = asked[one.after].messages
            continued += one.messages[: len(before)] == before
        assert lengths(one.messages) < COMPACTED + 60_000
    assert continued > 40


def test_an_agent_goes_on_when_its_subagents_have_ended() -> None:
    """Hand back the results of all subagents side by side, as those of tools."""
    asked = published_agents(random.Random("agents 1"), 200)
    after = Counter(one.after for one in asked if one.after >= 0)
    started = [index for index, count in after.items() if count >= 3]
    resumed = []
    for index, one in enumerate(asked):
        roles = [each.role for each in one.messages]
        if any(roles[at : at + 3] == [TOOL] * 3 for at in range(len(roles))):
            resumed.append(index)
    assert started and resumed and min(resumed) > min(started) + 3


def lengths(messages: tuple[Message, ...]) -> int:
    return sum(len(part) for each in messages for part in each.parts if isinstance(part, tuple))


# The command


def test_memory_is_split_as_the_engine_splits_it() -> None:
    budget = of_memory("16GiB", "4GiB")
    assert (budget.rows, budget.blocks, budget.host_bytes) == (166, 4114, 4 << 30)


def test_a_table_has_a_line_for_each_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "short.jsonl"
    rows = [(1024, [1, 2]), (1100, [1, 2, 3]), (600, [1, 4])]
    lines = [json.dumps({"input_length": length, "hash_ids": ids}) for length, ids in rows]
    path.write_text("\n".join(lines), encoding="utf-8")
    arguments = ["--rows", "8", "--memory", "1GiB", "--policies", "clairvoyant", "default"]
    monkeypatch.setattr("sys.argv", ["reuse.py", "--trace", str(path), *arguments])
    main()
    assert capsys.readouterr().out.splitlines() == [
        "| workload | requests | budget | default | clairvoyant |",
        "|---|---|---|---|---|",
        "| short | 3 | 8 rows | 66.67 | 100.00 |",
        "| short | 3 | 1GiB (10 rows, 266 blocks) | 66.67 |  |",
    ]


def test_what_shares_nothing_has_no_table() -> None:
    with pytest.raises(SystemExit, match="strangers"):
        Table(["default"]).add("strangers", asked_of([blocks(1), blocks(2)]), [of_rows(1)])


@pytest.mark.parametrize(
    "arguments", [["--host", "1GiB"], ["--requests", "5"], ["--rows", "-1"], ["--policies", "best"]]
)
def test_options_that_mean_nothing_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(arguments)


def test_all_policies_have_a_column() -> None:
    assert chosen_policies(["all"]) == ["default", *RIVALS, "clairvoyant"]
    assert chosen_policies(["lru", "default"]) == ["default", "lru"]
