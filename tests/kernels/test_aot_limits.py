"""A kernel that breaks a limit or gets worse is named; a row holds until its source changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton.language as tl
from triton.runtime.jit import JITFunction

from benchmarks.aot_show import changes, lines
from benchmarks.common import aot_limits
from benchmarks.common.aot_compile import ROOMS, TARGETS, Usage
from benchmarks.common.aot_kept import _sources, digest, read, row, usage_of, versions, write
from benchmarks.common.aot_limits import ALLOWANCES, Allowance, breaches, worse
from benchmarks.common.aot_page import PAGE, page
from vlm_serve.kernels.dispatch import triton_everywhere
from vlm_serve.kernels.norms import rms_norm
from vlm_serve.kernels.triton_support import Launch, record_launches

GOOD = Usage(
    registers=100,
    spilled=0,
    shared=90 << 10,
    programs=2,
    loops=1,
    buffers=3,
    ahead=2,
    unordered=0,
    turned=0,
)


def _inner(x: Any) -> Any:
    return x + x


INNER, SCALE = JITFunction(_inner), tl.constexpr(2)


def _outer(x: Any) -> Any:
    """A kernel of the test."""
    return INNER(x) * SCALE


@pytest.mark.parametrize(
    ("target", "fault", "said"),
    [
        ("sm_120", {"shared": 106496}, "takes 106496 bytes of shared memory of 101376"),
        ("sm_89", {"shared": 106496}, "takes 106496 bytes"),
        ("sm_80", {"shared": 200 << 10}, "of 166912"),
        ("sm_100", {"shared": 228 << 10}, "of 232448"),
        ("gfx942", {"shared": 65 << 10}, "of 65536"),
        ("sm_90", {"spilled": 8}, "spills 8 bytes, of 0 allowed"),
        ("sm_90", {"unordered": 1}, "has 1 accesses without the barrier"),
        ("sm_90", {"turned": 1}, "transposes the results of 1 products"),
        ("sm_90", {"buffers": 1}, "prefetches nothing: 1 buffers"),
        ("sm_90", {"ahead": 0}, "prefetches nothing: 3 buffers, 0 in flight"),
        ("sm_90", {"loops": 0}, "asks for a pipelined loop and has none"),
    ],
)
def test_each_limit_can_be_broken(target: str, fault: dict[str, int], said: str) -> None:
    good = replace(GOOD, shared=60 << 10)
    assert breaches("some kernel", target, good, staged=True) == []
    (found,) = breaches("some kernel", target, replace(good, **fault), staged=True)
    assert said in found


def test_what_is_allowed_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = (
        Allowance("some .*", ("sm_90",), "float32", spilled=64),
        Allowance("some kernel", ("sm_90",), "one buffer", pipelined=False),
    )
    monkeypatch.setattr(aot_limits, "ALLOWANCES", allowed)
    bad = replace(GOOD, spilled=64, ahead=0)
    assert breaches("some kernel", "sm_90", bad, staged=True) == []
    assert len(breaches("some kernel", "sm_90", replace(bad, spilled=65), staged=True)) == 1
    assert len(breaches("some kernel", "sm_100", bad, staged=True)) == 2
    assert len(breaches("another kernel", "sm_90", bad, staged=True)) == 2


def test_loops_that_were_not_asked_for_may_wait() -> None:
    assert breaches("some kernel", "sm_90", replace(GOOD, loops=0, ahead=0), staged=False) == []


@pytest.mark.parametrize(
    "change", [{"spilled": 4}, {"programs": 1}, {"loops": 0}, {"buffers": 2}, {"ahead": 1}]
)
def test_a_kernel_that_gets_worse_is_red(change: dict[str, int]) -> None:
    (name,) = change
    (said,) = worse(replace(GOOD, **change), GOOD)
    assert said.startswith(name)
    assert worse(GOOD, replace(GOOD, **change)) == []
    assert worse(replace(GOOD, registers=120), GOOD) == [], "as many programs fit"


def test_the_worst_of_variants() -> None:
    other = replace(GOOD, registers=90, spilled=16, buffers=2)
    assert GOOD.worst(other) == replace(GOOD, spilled=16, buffers=2)


def test_programs_of_a_multiprocessor() -> None:
    assert ROOMS["sm_90"].programs(255, 28 << 10, 4) == 2
    assert ROOMS["sm_90"].programs(32, 160 << 10, 4) == 1
    assert ROOMS["sm_120"].programs(16, 0, 4) == 12
    assert ROOMS["gfx942"].programs(128, 32 << 10, 4) == 2
    assert ROOMS["gfx942"].programs(128, 0, 4) == 4


def launches(rows: int = 3, **constants: Any) -> list[Launch]:
    """Record a kernel's launches; here Triton interprets, so it is made compilable again."""
    with triton_everywhere(), record_launches(TARGETS["sm_90"][0]) as found:
        rms_norm(torch.empty(rows, 64), torch.empty(64), 1e-6)
    return [
        replace(x, kernel=JITFunction(x.kernel.fn), arguments={**x.arguments, **constants})
        for x in found
    ]


def test_a_row_holds_until_what_is_compiled_changes() -> None:
    before = digest(launches())
    assert digest(launches()) == before
    assert digest([replace(x, options={**x.options, "num_warps": 8}) for x in launches()]) != before
    assert digest(launches() + launches(rows=1)) != before
    (changed,) = launches()
    source = changed.kernel.src.replace("tl.sum", "tl.max")
    assert source != changed.kernel.src
    changed.kernel._unsafe_update_src(source)
    assert digest([changed]) != before


def test_a_row_covers_what_a_kernel_calls_and_names() -> None:
    found = _sources(JITFunction(_outer), {})
    assert [name.rpartition(".")[2] for name in found] == ["_outer", "_outer:SCALE", "_inner"]
    assert "of the test" not in str(found), "docstrings are not compiled"


def test_rows_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr("benchmarks.common.aot_kept.FILE", tmp_path / "aot.json.xz")
    assert read("3.6.0") == {}
    rows = {"sm_90": {"b": row("12", 3, GOOD), "a": row("34", 1, GOOD)}}
    write("3.6.0", rows)
    write("3.7.1", {})
    assert read("3.6.0") == rows and versions() == ["3.6.0", "3.7.1"]
    assert usage_of(read("3.6.0")["sm_90"]["a"]) == GOOD


def test_rows_are_printed_and_compared() -> None:
    old = {"3.6.0": {"sm_90": {"a": row("12", 3, GOOD), "b": row("34", 1, GOOD)}}}
    worse_one = row("56", 1, replace(GOOD, spilled=8, loops=0))
    new = {"3.6.0": {"sm_90": {"a": row("78", 3, GOOD), "b": worse_one, "c": row("9", 1, GOOD)}}}
    before, now = lines(old, []), lines(new, [])
    assert list(before) == ["3.6.0 sm_90  a", "3.6.0 sm_90  b"]
    assert before["3.6.0 sm_90  a"] == "100 / 0 / 92160 / 2; 3 / 2 (3)"
    assert lines(new, ["sm_90", " c"]).keys() == {"3.6.0 sm_90  c"}
    assert changes(before, now) == [
        "- 3.6.0 sm_90  b: 100 / 0 / 92160 / 2; 3 / 2 (1)",
        "+ 3.6.0 sm_90  b: 100 / 8 / 92160 / 2 (1)",
        "+ 3.6.0 sm_90  c: 100 / 0 / 92160 / 2; 3 / 2 (1)",
    ]


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1"])
def test_the_kept_rows_keep_the_limits(version: str) -> None:
    """Also that each allowance is needed by some kernel of some version."""
    rows = read(version)
    assert rows.keys() == TARGETS.keys()
    for target, kernels in rows.items():
        assert len(kernels) > 50
        for name, kept in kernels.items():
            assert breaches(name, target, usage_of(kept), staged=False) == [], (target, name)


def test_every_allowance_is_needed() -> None:
    kept = [
        (name, target, usage_of(each))
        for version in ("3.6.0", "3.7.1")
        for target, kernels in read(version).items()
        for name, each in kernels.items()
    ]
    for allowance in ALLOWANCES:
        for target in allowance.targets:
            users = [
                usage
                for name, at, usage in kept
                if at == target and aot_limits.matches(allowance, name)
            ]
            assert users, (allowance.kernels, target)
            if allowance.spilled:
                assert max(each.spilled for each in users) > 0, (allowance.kernels, target)
            else:
                assert min(each.ahead for each in users) == 0, (allowance.kernels, target)


def test_the_page_is_that_of_the_rows() -> None:
    assert PAGE.read_text(encoding="utf-8") == page()
