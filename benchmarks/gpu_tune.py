"""Time variants of the Triton kernels' tiles on a GPU, the likeliest first.

    python benchmarks/gpu_tune.py [--seconds 90] [--only NAME,...] [--out FILE] [--table FOLDER]

Every variant is a replayed CUDA graph of the op at the shapes of `kernels_gpu.py`. Its largest
difference from the first variant is printed beside its time. What does not compile, or does not fit
shared memory, is said and skipped. After `--seconds` no further variant begins. `--out` gets the
rows as JSON: device, Triton, op, variant, microseconds. `--table` gets the table of tiles of this
card's architecture, `sm_90.json`: what is faster than the tile that serves and right, beside what
the table in `kernels/tuning/` has already. Put there, the next start reads it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from common.gpu_table import Timed, best_tiles, write_table
from common.gpu_timing import Timer
from common.gpu_variants import Variant, groups

from vlm_serve.kernels import tuning
from vlm_serve.kernels.tuning_check import check_table, tile_of


def measure(timer: Timer, variant: Variant, expected: torch.Tensor | None) -> dict[str, Any]:
    """Return a variant's time and its result, or why it has none."""
    with ExitStack() as changes:
        for owner, name, value in variant.changes:
            changes.enter_context(patch.object(owner, name, value))
        try:
            result = variant.call()
            torch.cuda.synchronize()
            seconds, replayed = timer.median(variant.call, 15)
        except Exception as error:
            return {"problem": f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"}
    difference = 0.0
    if expected is not None:
        largest = expected.float().abs().max()
        difference = float((result.float() - expected.float()).abs().max() / largest)
    return {
        "us": round(1e6 * seconds, 1),
        "difference": difference,
        "replayed": replayed,
        "result": result,
    }


def timed_of(variant: Variant, found: dict[str, Any]) -> Timed:
    """Return what a table takes from a variant that was measured."""
    tile = tile_of(variant.op) if variant.op else None
    now = {} if tile is None else tile()
    usual = bool(now) and all(now[name] == value for name, value in variant.fields.items())
    difference = found.get("difference", 0.0)
    return Timed(variant.op, variant.fields, usual, found.get("us"), difference)


def keep_table(folder: Path, timed: list[Timed]) -> None:
    """Write this card's table, and check what was written as a start does."""
    major, minor = torch.cuda.get_device_capability()
    architecture = 10 * major + minor
    ops = best_tiles(timed, tuning.table(architecture))
    about = {"card": torch.cuda.get_device_name(), "triton": triton.__version__}
    path = write_table(folder, architecture, ops, about)
    with patch.object(tuning, "FOLDER", folder):
        tuning.table.cache_clear()
        check_table(architecture)
    tuning.table.cache_clear()
    print(f"{path}: {len(ops)} ops")


def run(
    named: Iterator[tuple[str, Callable[[], list[Variant]]]], until: float, timed: list[Timed]
) -> list[Any]:
    """Measure groups of variants until a moment of the monotonic clock; `timed` gets them too."""
    timer, rows = Timer(), []
    for name, build in named:
        expected = None
        for variant in build():
            if time.monotonic() > until:
                print("out of time")
                return rows
            found = measure(timer, variant, expected)
            result = found.pop("result", None)
            expected = result if expected is None else expected
            row = {"op": name, "variant": variant.label, **found}
            rows.append(row)
            timed.append(timed_of(variant, found))
            said = found.get("problem") or f"{found['us']:.1f} us, {found['difference']:.0e}"
            print(f"{name} | {variant.label} | {said}", flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--only", default="", help="names of ops, separated by commas")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, help="folder for this card's table of tiles")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("No GPU found: nothing was measured. Run this script as it is on a machine with one.")
        return 0
    begin = time.monotonic()
    torch.manual_seed(0)
    wanted = [name for name in arguments.only.split(",") if name]
    chosen = ((n, b) for n, b in groups() if not wanted or any(each in n for each in wanted))
    timed: list[Timed] = []
    rows = run(chosen, begin + arguments.seconds, timed)
    if arguments.out is not None:
        about = {"device": torch.cuda.get_device_name(), "triton": triton.__version__}
        arguments.out.write_text(json.dumps({**about, "rows": rows}, indent=1))
    if arguments.table is not None:
        keep_table(arguments.table, timed)
    print(f"{len(rows)} variants in {time.monotonic() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
