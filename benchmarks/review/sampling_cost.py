"""Peak memory and launches of sampling on a GPU, counted on the device meta.

    python benchmarks/review/sampling_cost.py [--rows 8 64 256]

Also what a sequence with a presence penalty adds to every step.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import checkout  # noqa: F401
import torch
from operations import Operations

from vlm_serve.engine.requests.plan import SequenceInfo
from vlm_serve.engine.start.step_memory import peak_of
from vlm_serve.engine.steps.sampler import SequenceSampler, draw_rows
from vlm_serve.sampling_params import SamplingParams

VOCABULARY = 248_320
KINDS: dict[str, dict[str, Any]] = {
    "top_p": {"top_p": 0.95},
    "top_k": {"top_p": 0.8, "top_k": 20},
    "temperature": {},
}


def show_drawing(rows: int) -> None:
    """Print the cost of drawing a token for each of so many rows."""
    for name, fields in KINDS.items():
        params = SamplingParams(temperature=0.7, **fields)
        logits = torch.empty(rows, VOCABULARY, device="meta")

        def run(logits: torch.Tensor = logits, params: SamplingParams = params) -> None:
            torch.argmax(logits, dim=-1)
            draw_rows(logits, [params] * rows, [0.5] * rows)

        peak = peak_of(run) / 2**20
        with Operations() as operations:
            run()
        print(
            f"{rows} rows, {name}: {peak:.0f} MiB beside {rows * VOCABULARY * 4 / 2**20:.0f} of "
            f"logits, {operations.counts.total()} launches"
        )


def show_penalty() -> None:
    """Print the launches that a presence penalty costs a sequence in a step."""
    params = SamplingParams(temperature=0.7, top_p=0.8, top_k=20, presence_penalty=1.5)
    info = SequenceInfo.__new__(SequenceInfo)
    fields = {"token_ids": tuple(range(100)), "params": params, "seed": 1, "sequence": 0}
    for name, value in (fields | {"positions": None, "rope_delta": 0}).items():
        object.__setattr__(info, name, value)
    sampler = SequenceSampler(info)
    raw = torch.empty(VOCABULARY, device="meta")
    task: Any = SimpleNamespace(mask=None, unbiased=False, position=5)
    sampler.row(raw, task)  # It makes the tables.
    with Operations() as operations:
        sampler.replace(0, (5,))
        sampler.row(raw, task)
    print(f"a presence penalty: {dict(operations.counts)} a sequence and step")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64, 256])
    given = parser.parse_args(arguments)
    for rows in given.rows:
        show_drawing(rows)
    show_penalty()


if __name__ == "__main__":
    main()
