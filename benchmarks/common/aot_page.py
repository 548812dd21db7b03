"""Write benchmarks/aot.md from the kept rows and the table of limits."""

from __future__ import annotations

from pathlib import Path

from benchmarks.common.aot_compile import TARGETS, Usage
from benchmarks.common.aot_kept import FOLDER, Rows, read, usage_of
from benchmarks.common.aot_limits import ALLOWANCES

PAGE = Path(__file__).parents[1] / "aot.md"


def write_page() -> None:
    """Write the page anew."""
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """Return the page: what is allowed and why, then a table for each version of Triton."""
    versions = sorted(path.stem.removeprefix("triton-") for path in FOLDER.glob("triton-*.json"))
    lines = [
        "# Kernels compiled ahead of time",
        "",
        "Written by `python benchmarks/aot.py --check --write`, which compiles every Triton kernel "
        "at the shapes of the shared checkpoints without a GPU, reads the code, and compares it "
        "with limits. Every kernel fits the shared memory of its target, and has a barrier of the "
        "program between a wait for `wgmma` and the next write of its operands, and before a "
        "`tcgen05.mma` of what other threads have written or read. On NVIDIA each loop that asks "
        "for it keeps two tiles or more, with a copy in flight while it computes. What does not, "
        "and what spills:",
        "",
        "| kernels | targets | allowed | why |",
        "|---|---|---|---|",
    ]
    for each in ALLOWANCES:
        allowed = f"{each.spilled} bytes spilled" if each.spilled else "no copy in flight"
        kernels = each.kernels.replace("|", "\\|")
        lines.append(f"| `{kernels}` | {', '.join(each.targets)} | {allowed} | {each.reason} |")
    for version in versions:
        lines += ["", f"## Triton {version}", "", *_table(read(version))]
    return "\n".join(lines) + "\n"


def _table(rows: Rows) -> list[str]:
    targets = [target for target in TARGETS if target in rows]
    lines = [
        "Registers a thread / bytes spilled a thread (stores and loads) / bytes of shared memory / "
        "programs that fit a multiprocessor, and behind a semicolon buffers / copies in flight of "
        "pipelined loops; the worst of all variants each, whose number is in brackets.",
        "",
        "| kernel | " + " | ".join(targets) + " |",
        "|---|" + "---|" * len(targets),
    ]
    for name in sorted({name for kernels in rows.values() for name in kernels}):
        cells = []
        for target in targets:
            kept = rows[target].get(name)
            cells.append("-" if kept is None else f"{_cell(usage_of(kept))} ({kept['variants']})")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def _cell(usage: Usage) -> str:
    text = f"{usage.registers} / {usage.spilled} / {usage.shared} / {usage.programs}"
    return text + (f"; {usage.buffers} / {usage.ahead}" if usage.loops else "")
