"""Run `vlm-serve eval` over its samples and print what the reports say.

The samples are LongBench v2's form, videos and, if it is installed, lmms-eval; the models are the
demo models and a checkpoint of 49M random weights.

    python benchmarks/evaluation.py [--model demo ...] [--benchmark longbench ...] [--reports DIR]
        [--lmms-eval COMMAND]

Exits with 1 if an answer is not the same with and without prefix caching, or a request failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import common  # noqa: F401  # First: it adds examples/ and tests/ to the path.
import torch
from checkpoint_spec import BENCHMARK_SPECS
from common.machine import describe
from make_checkpoint import make_checkpoint

import vlm_serve.cli

ROOT = Path(__file__).resolve().parents[1]
SAMPLES = ROOT / "examples" / "eval"
RANDOM = "random 49M"
MODELS = ("demo", "demo-moe", RANDOM)
BENCHMARKS: dict[str, tuple[str, ...]] = {
    # Random weights reason up to the limit.
    "longbench": ("--data", str(SAMPLES / "longbench.json"), "--reasoning-tokens", "128"),
    "video": ("--data", str(SAMPLES / "videos.csv")),
    "lmms": (
        *("--tasks", "demo_pictures,demo_videos", "--include-path", str(SAMPLES / "lmms")),
        *("--allowed-local-media-path", str(SAMPLES)),
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--benchmark", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS))
    parser.add_argument("--reports", type=Path, help="where the reports are kept")
    parser.add_argument("--lmms-eval", help="what starts lmms-eval; without it, it is left out")
    given = parser.parse_args()
    names = [each for each in given.benchmark if each != "lmms" or given.lmms_eval]
    print(describe(torch.get_num_threads()))
    print(
        "| model | part | equal | hit rate | prompt tokens | computed, cached | seconds | right |"
    )
    print("|---|---|---|---|---|---|---|---|")
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        reports = given.reports or Path(folder)
        reports.mkdir(parents=True, exist_ok=True)
        for model in given.model:
            for name in names:
                status, report = run(model, name, reports, Path(folder), given.lmms_eval)
                bad += status != 0
                for row in rows(model, report):
                    print(row, flush=True)
    return 1 if bad else 0


def run(
    model: str, name: str, reports: Path, folder: Path, lmms_eval: str | None
) -> tuple[int, dict[str, Any]]:
    """The exit status of one evaluation, and its report."""
    path = model
    if model == RANDOM:
        spec = replace(BENCHMARK_SPECS["qwen3_5"], dtype="bfloat16")
        path = str(make_checkpoint(folder / "random-49m", spec))
    output = reports / f"{name}-{Path(path).name}.html"
    command = [sys.executable, "-m", vlm_serve.cli.__name__, "eval", name, path, "-o", str(output)]
    command += [*BENCHMARKS[name], "--cache-memory", "512MiB"]
    command += ["--lmms-eval", lmms_eval] if name == "lmms" and lmms_eval else []
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False)
    return done.returncode, json.loads(output.with_suffix(".json").read_text(encoding="utf-8"))


def rows(model: str, report: dict[str, Any]) -> Iterator[str]:
    """A row of the table for each part."""
    for part in report["parts"]:
        cached, uncached = part["with_caching"], part["without_caching"]
        right = part["accuracy"].get("all", {"right": 0, "of": 0})
        yield (
            f"| {model} | {part['name']} | {part['equal']} of {part['items']} "
            f"| {100 * cached['hit_rate']:.1f} % | {uncached['prompt_tokens']} "
            f"| {cached['computed_tokens']} | {cached['seconds']:.1f}, {uncached['seconds']:.1f} "
            f"| {right['right']} of {right['of']} |"
        )


if __name__ == "__main__":
    sys.exit(main())
