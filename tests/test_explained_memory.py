"""A server's memory has names: what grows in chaos stands in `held_bytes`, or is free."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
from memory_chaos import run
from memory_ledger import Ledger, ledger_of, table
from peft_folders import random_adapter

DEMO = Path(__file__).resolve().parents[1] / "vlm_serve" / "demo" / "dense"
ANSWERS = 500
MIB = 1 << 20


def test_a_ledger_finds_what_has_no_name() -> None:
    idle = Ledger(500 * MIB, 2 * MIB, {"kv": 1 * MIB, "grammars": 0})
    named = Ledger(540 * MIB, 6 * MIB, {"kv": 11 * MIB, "grammars": 20 * MIB})
    assert named.grown(idle) == 34 * MIB and named.unexplained(idle) == 6 * MIB
    assert named.explained(idle)
    assert not Ledger(570 * MIB, 6 * MIB, named.held).explained(idle)
    assert not Ledger(500 * MIB, 6 * MIB, named.held).explained(idle), "names for nothing"
    lines = list(table(idle, named))
    assert lines[1].split() == ["grammars", "0.0", "20.0", "+20.0"]
    assert lines[-1].split()[3:5] == ["+6.0", "+1.1"]
    unknown = Ledger(500 * MIB, None, idle.held)
    assert any("unknown" in line for line in table(unknown, unknown))


def test_a_ledger_is_read_where_there_is_one() -> None:
    held = {"kv": 3}
    memory = {"resident_bytes": 7, "allocator_free_bytes": None, "held_bytes": held}
    assert ledger_of({"memory": memory}) == Ledger(7, None, held)
    assert ledger_of({"memory": memory | {"resident_bytes": None}}) is None
    assert ledger_of({}) is None, "a gateway says nothing of its memory"


@pytest.mark.memory
@pytest.mark.processes
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc says what it has free")
def test_memory_after_chaos_is_explained(tmp_path: Path) -> None:
    adapters = [random_adapter(DEMO, tmp_path / f"{seed}", seed) for seed in range(3)]
    said: list[str] = []
    outcome = run(1, adapters, lambda load: load.answered >= ANSWERS, said.append)
    assert outcome is not None
    after, idle = outcome.after, outcome.idle
    assert after.explained(idle), "\n".join([*table(idle, after), *said])
    for kind in ("kv", "tree", "host_tier", "tier_index", "drafts", "grammars", "responses"):
        assert after.held[kind] > idle.held[kind], f"{kind} did not grow: nothing is shown of it"
