"""Peak memory and launches of sampling on a GPU, counted on the device meta.

    python benchmarks/review/sampling_cost.py [--rows 8 64 256]

Counts of penalties are part of the memory. The last kind is a mix of all others.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import cycle, islice
from typing import Any

import checkout  # noqa: F401
import torch
from operations import Operations

from vlm_serve.engine.start.sampling_memory import crowd_of
from vlm_serve.engine.start.step_memory import peak_of
from vlm_serve.kernels.triton_support import Target, record_launches
from vlm_serve.sampling_params import SamplingParams

VOCABULARY = 248_320
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top_p": {"top_p": 0.95},
    "top_k": {"top_p": 0.8, "top_k": 20},
    "temperature": {},
    "penalties": {"top_p": 0.8, "top_k": 20, "presence_penalty": 1.5},
    "log-probabilities": {"top_k": 20, "logprobs": 20},
}


def show(rows: int, name: str, kinds: Sequence[dict[str, Any]]) -> None:
    """Print what a step of so many rows takes."""
    params = [SamplingParams(**{"temperature": 0.7, **fields}) for fields in kinds]
    logits = torch.empty(rows, VOCABULARY, device="meta")
    run = crowd_of(logits, list(islice(cycle(params), rows)))
    peak = peak_of(run) / 2**20
    again = crowd_of(logits, list(islice(cycle(params), rows)))
    with record_launches(Target("cuda", 90)):
        again()  # It writes the rows of the counts.
    with record_launches(Target("cuda", 90)) as launches, Operations() as operations:
        again()
    print(
        f"{rows} rows, {name}: {peak:.0f} MiB beside {rows * VOCABULARY * 4 / 2**20:.0f} of "
        f"logits, {len(launches)} launches and {operations.counts.total()} operations of torch"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64, 256])
    given = parser.parse_args(arguments)
    for rows in given.rows:
        for name, fields in KINDS.items():
            show(rows, name, [fields])
        show(rows, "all of them", list(KINDS.values()))


if __name__ == "__main__":
    main()
