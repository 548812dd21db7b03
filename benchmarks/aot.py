"""Compile every Triton kernel ahead of time and write its resource use to benchmarks/aot.md.

    python benchmarks/aot.py [--only PART,...] [--models 4B,...] [--targets sm_90,...] [--no-write]

No GPU is needed: the ops are called at the shapes of the shared checkpoints, their launches are
recorded instead of run, and each distinct specialisation is compiled for each target.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

# Triton decides at import whether kernels are compiled or interpreted.
os.environ["TRITON_INTERPRET"] = "0"

import triton
from common.aot_cases import cases
from common.aot_compile import TARGETS, Usage, compile_launch, specialisation

from vlm_serve.kernels.dispatch import triton_everywhere
from vlm_serve.kernels.triton_support import Launch, record_launches

OUTPUT = Path(__file__).with_name("aot.md")
Row = tuple[str, str, Usage]
NOTES = (
    "Spills. Models run in bfloat16. Triton 3.7.1 spills more there than 3.9.0, which the "
    "tiles were chosen with: in prefill attention 16 bytes on sm_90, up to 128 with pages of "
    "float8 or int8; in the gated-delta scan one register on sm_100, 152 bytes on sm_89 and "
    "440 on sm_120; in experts of four or eight bits up to 32. float32 inputs are the parity "
    "mode: on NVIDIA each of their products is three products of split operands "
    "(`Target.dot_precision`), and what does not fit in 255 registers is spilled, most in the "
    "gated-delta rule.",
    "",
    "Limits. A program has at most 163 KiB of shared memory on sm_80, 227 KiB on sm_90 and "
    "sm_100, 99 KiB on sm_89 and sm_120, 64 KiB on gfx942; one that takes more is an error "
    "here. gfx942 counts vector and accumulation registers together, of 512.",
)


def record(target: str, only: Sequence[str], models: Sequence[str]) -> list[tuple[str, Launch]]:
    """Every distinct launch of the cases on a target, with the kernel's and the case's names."""
    found: dict[object, tuple[str, Launch]] = {}
    for label, call in cases(models):
        with triton_everywhere(), record_launches(TARGETS[target][0]) as launches:
            call()
        for launch in launches:
            name = f"{label}: {launch.kernel.__name__.strip('_')}"
            if any(part in name for part in only):
                found.setdefault(specialisation(launch), (name, launch))
    return list(found.values())


def report(rows: Sequence[Row], targets: Sequence[str]) -> str:
    """A table with the most demanding variant of each kernel per target."""
    worst: dict[str, dict[str, tuple[int, Usage]]] = {}
    for name, target, usage in rows:
        count, other = worst.setdefault(name, {}).get(target, (0, usage))
        larger = max(usage, other, key=lambda u: (u.spilled, u.registers, u.shared))
        worst[name][target] = (count + 1, larger)
    lines = [
        "# Kernels compiled ahead of time",
        "",
        f"Written by `python benchmarks/aot.py` with Triton {triton.__version__}. Per target: "
        "registers per thread / bytes spilled per thread (stores + loads) / bytes of shared memory "
        "per program, of the variant that takes most; in brackets the number of variants.",
        "",
        "| kernel | " + " | ".join(targets) + " |",
        "|---|" + "---|" * len(targets),
    ]
    for name in sorted(worst):
        cells = []
        for target in targets:
            if target in worst[name]:
                count, usage = worst[name][target]
                cells.append(f"{usage.registers} / {usage.spilled} / {usage.shared} ({count})")
            else:
                cells.append("-")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *NOTES]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="only kernels whose name contains one of these")
    parser.add_argument("--models", default="4B,27B,35B-A3B")
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--no-write", action="store_true", help="print, but leave aot.md alone")
    arguments = parser.parse_args()
    targets, only = arguments.targets.split(","), arguments.only.split(",")
    rows: list[Row] = []
    failed = 0
    for target in targets:
        for name, launch in record(target, only, arguments.models.split(",")):
            began = time.perf_counter()
            try:
                usage = compile_launch(launch, target)
            except Exception as error:
                failed += 1
                print(f"{target} {name}: {type(error).__name__}: {error}", file=sys.stderr)
                continue
            rows.append((name, target, usage))
            print(f"{target:7} {name:60} {usage} {time.perf_counter() - began:.1f} s", flush=True)
    text = report(rows, targets)
    if not arguments.no_write:
        OUTPUT.write_text(text, encoding="utf-8")
    print(f"{len(rows)} compiled, {failed} failed")
    return 1 if failed or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
