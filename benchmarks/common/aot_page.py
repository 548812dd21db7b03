"""Write benchmarks/aot.md from the table of limits."""

from __future__ import annotations

from pathlib import Path

from benchmarks.common.aot_limits import ALLOWANCES

PAGE = Path(__file__).parents[1] / "aot.md"


def write_page() -> None:
    """Write the page anew."""
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """Return the page: what is allowed and why."""
    lines = [
        "# Kernels compiled ahead of time",
        "",
        "Written by `python benchmarks/aot.py --check --write`, which compiles every Triton kernel "
        "at the shapes of the shared checkpoints, and those of LFM2, Nemotron 3 and Granite 4 at "
        "theirs, without a GPU, reads the code, and compares it with limits. Every kernel fits the "
        "shared memory of its target, and has a barrier of the program between a wait for `wgmma` "
        "and the next write of its operands, and before a `tcgen05.mma` of what other threads have "
        "written or read. On NVIDIA each loop that asks for it keeps two tiles or more, with a "
        "copy in flight while it computes. `python benchmarks/aot_show.py` prints what each kernel "
        "takes, and with `--since REV` what has changed. What is allowed to spill, or to copy "
        "nothing ahead:",
        "",
        "| kernels | targets | allowed | why |",
        "|---|---|---|---|",
    ]
    for each in ALLOWANCES:
        allowed = f"{each.spilled} bytes spilled" if each.spilled else "no copy in flight"
        kernels = each.kernels.replace("|", "\\|")
        lines.append(f"| `{kernels}` | {', '.join(each.targets)} | {allowed} | {each.reason} |")
    return "\n".join(lines) + "\n"
