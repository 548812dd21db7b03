"""Host time to fill the tables of one captured decode step, and their size.

    python benchmarks/review/table_fill.py [--lengths 8192 262144] [--batches 1 8 64 256]

Both grow with max_model_len. Times are of this thread's processor, without a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from array import array
from collections.abc import Callable, Sequence

import checkout  # noqa: F401
import torch
from queued_device import QueuedDevice

from vlm_serve.engine.steps.step_buffers import StepBuffers
from vlm_serve.engine.steps.step_sizes import SequenceLimits, StepSize
from vlm_serve.engine.steps.step_tables import HostRing
from vlm_serve.kernels.metadata import DecodeMeta
from vlm_serve.models.batch import ForwardBatch

BLOCK, USED_BLOCKS = 64, 512


class AtOnce(QueuedDevice):
    """A device whose copies are done when they are asked for."""

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def send(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        target.copy_(source)
        return lambda: None


def step_of(batch: int, used: int) -> ForwardBatch:
    """Return a decode step of sequences with so many blocks each."""
    return ForwardBatch(
        token_ids=torch.zeros(batch, dtype=torch.int64),
        positions=torch.zeros(3, batch, dtype=torch.int64),
        slots=torch.zeros(batch, dtype=torch.int64),
        decode=DecodeMeta(
            tuple(array("i", range(used)) for _ in range(batch)),
            (used * BLOCK,) * batch,
            tuple(range(batch)),
            tuple(range(batch)),
            (-1,) * batch,
        ),
        prefill=None,
        media=(),
        logit_rows=torch.arange(batch),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 262_144])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 256])
    given = parser.parse_args(arguments)
    for longest in given.lengths:
        for batch in given.batches:
            limits = SequenceLimits(BLOCK, longest // BLOCK, 9)
            ring, host = HostRing(AtOnce()), torch.device("cpu")
            buffers = StepBuffers(StepSize(batch), limits, ring, host)
            step, spent = step_of(batch, min(longest // BLOCK, USED_BLOCKS)), []
            for _ in range(30):
                begin = time.thread_time()
                buffers.fill(step)
                spent.append(1000 * (time.thread_time() - begin))
            size = buffers._tables._flat.numel() / 2**20
            print(
                f"max_model_len {longest}, batch {batch}: {size:.2f} MiB a step, "
                f"{statistics.median(spent):.3f} ms"
            )


if __name__ == "__main__":
    main()
