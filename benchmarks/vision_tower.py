"""Compare encoding a picture by one compiled call, by compiled products alone, and by torch.

    python benchmarks/vision_tower.py [--dtypes float32 bfloat16] [--rounds 7] [--isa avx2]

All sides have the weights of one random tower: 4 layers of the width of Qwen3.5's smaller ones
(heads of 64 dims) or of its larger ones (heads of 72, which are no whole vectors), and they take
turns. One call's milliseconds are printed, and how many times as long the others take. The last
columns are the same while two other threads of the process are busy in Python, as those of a server
are that reads requests: every operation that lets the interpreter's lock go then waits for its turn
to have it back (and threads that compute together wait for each other, if there are too few
processors for them all: try `--threads 1`).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import common  # noqa: F401  # First: it adds examples/ and tests/ to the path.
import torch
from checkpoint_spec import BENCHMARK_SPEC
from common.machine import add_isa_argument, describe, run_as
from make_checkpoint import make_checkpoint

from vlm_serve.models import Model, load_model
from vlm_serve.server.http.serving import SWITCH_SECONDS
from vlm_serve.system.host_memory import retain_freed_memory

SPEC = replace(BENCHMARK_SPEC, num_layers=4, vision_depth=4, vision_intermediate_size=3072)
TOWERS = {
    "heads of 64": replace(SPEC, vision_hidden_size=768, vision_heads=12),
    "heads of 72": replace(SPEC, vision_hidden_size=1152, vision_heads=16),
}
GRIDS = ((1, 4, 4), (1, 16, 16), (1, 32, 32), (1, 48, 48))
SIDES = ("one call", "products", "torch")
BUSY_THREADS = 2
PATCHES_A_ROUND = 1024


class Sides:
    """The three of them, by name."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        self._models: dict[str, Model] = {
            "one call": load_model(path, dtype, "cpu", compiled=True),
            "products": load_model(path, dtype, "cpu", compiled=True),
            "torch": load_model(path, dtype, "cpu"),
        }
        tower = vars(self._models["products"]._vision)
        assert tower["_compiled"] is not None
        tower["_compiled"] = None

    def seconds(self, side: str, patches: torch.Tensor, grid: tuple[int, int, int]) -> float:
        """Of one picture, on average over some."""
        model, count = self._models[side], max(1, min(20, PATCHES_A_ROUND // len(patches)))
        began = time.perf_counter()
        for _ in range(count):
            model.encode_media(patches, [grid])
        return (time.perf_counter() - began) / count

    def times(self, grid: tuple[int, int, int], rounds: int) -> dict[str, list[float]]:
        """Of every side, round by round."""
        patch_dim = 3 * SPEC.temporal_patch_size * SPEC.patch_size**2
        patches = torch.randn(grid[1] * grid[2], patch_dim)
        for side in SIDES:
            self.seconds(side, patches, grid)
        found: dict[str, list[float]] = {side: [] for side in SIDES}
        for turn in range(rounds):
            for side in (*SIDES[turn % 3 :], *SIDES[: turn % 3]):
                found[side].append(self.seconds(side, patches, grid))
        return found


@contextmanager
def busy(threads: int) -> Iterator[None]:
    """So many threads that are busy in Python."""
    ended = threading.Event()

    def spin() -> None:
        total = 0
        while not ended.is_set():
            total += sum(range(100))

    all_threads = [threading.Thread(target=spin) for _ in range(threads)]
    for each in all_threads:
        each.start()
    try:
        yield
    finally:
        ended.set()
        for each in all_threads:
            each.join()


def columns(times: dict[str, list[float]]) -> str:
    """Milliseconds of one call, and how much longer the others take."""
    ours = times["one call"]
    ratios = (
        statistics.median(b / a for a, b in zip(ours, times[side], strict=True))
        for side in SIDES[1:]
    )
    return f" {1e3 * statistics.median(ours):.2f} | {' | '.join(f'{each:.2f}' for each in ratios)} "


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    add_isa_argument(parser)
    options = parser.parse_args()
    run_as(options.isa)
    retain_freed_memory()
    torch.set_num_threads(options.threads)
    sys.setswitchinterval(SWITCH_SECONDS)
    print(describe(options.threads))
    print(
        "| tower | type | patches | one call, ms | products | torch | busy, ms | products | torch |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name, spec in TOWERS.items():
            path = make_checkpoint(Path(folder) / name, spec)
            for dtype in options.dtypes or ("float32", "bfloat16"):
                sides = Sides(path, getattr(torch, dtype))
                for grid in GRIDS:
                    alone = columns(sides.times(grid, options.rounds))
                    with busy(BUSY_THREADS):
                        beside = columns(sides.times(grid, min(3, options.rounds)))
                    size = grid[1] * grid[2]
                    print(f"| {name} | {dtype} | {size} |{alone}|{beside}|", flush=True)


if __name__ == "__main__":
    main()
