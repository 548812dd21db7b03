"""Launches of captured steps at several batch sizes.

    python benchmarks/review/launches.py [--layers 32] [--experts 0] [--batches 1 8 9 64 256]

Counted on the device meta by tests/launch_counts.py, with the copies that torch calls views.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import checkout  # noqa: F401
import torch
from checkpoint_spec import CheckpointSpec
from launch_counts import Kind, Launches, count
from make_checkpoint import make_checkpoint

from vlm_serve.models import Model, load_model


def counted(model: Model, batches: Sequence[int]) -> Iterator[tuple[str, Launches]]:
    """Yield each kind of step and its launches."""
    kinds: list[tuple[Kind, int, bool]] = [("decode", batch, False) for batch in batches]
    kinds += [("prefill", 4, False), ("drafts", 4, False)]
    kinds += [("decode", batch, True) for batch in batches]
    for kind, batch, adapters in kinds:
        (found,) = count(model, kind, batch, adapters=adapters)["step"]
        yield f"{kind}{' with adapters' if adapters else ''}, batch {batch}", found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=32, help="a multiple of 4")
    parser.add_argument("--experts", type=int, default=0)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 9, 64, 256])
    given = parser.parse_args(arguments)
    spec = CheckpointSpec(num_layers=given.layers, num_experts=given.experts, vision_depth=0)
    with tempfile.TemporaryDirectory() as folder:
        model = load_model(make_checkpoint(Path(folder), spec), torch.bfloat16, "meta")
    for name, found in counted(model, given.batches):
        triton, torch_ops = found.numbers
        print(f"{name}: {triton} of Triton, {torch_ops} of torch")


if __name__ == "__main__":
    main()
