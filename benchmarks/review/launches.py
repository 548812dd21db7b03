"""Launches of captured steps at several batch sizes, and those that are views by name only.

    python benchmarks/review/launches.py [--layers 32] [--experts 0] [--batches 1 8 9 64 256]

Counted on the device meta by tests/launch_counts.py, and beside it copies that torch calls views.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import patch

import checkout  # noqa: F401
import launch_counts
import torch
from checkpoint_spec import CheckpointSpec
from launch_counts import Kind, Launches, count
from make_checkpoint import make_checkpoint
from operations import Operations

from vlm_serve.models import Model, load_model


class _WithHidden(Operations):
    """Names hidden copies among the counted operations."""

    def __torch_dispatch__(self, *arguments: object) -> object:
        result = super().__torch_dispatch__(*arguments)
        self.counts.update({f"hidden {name}": number for name, number in self.hidden.items()})
        self.hidden.clear()
        return result


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
    with patch.object(launch_counts, "_Operations", _WithHidden):
        for name, found in counted(model, given.batches):
            hidden = {n: c for n, c in found.torch.items() if n.startswith("hidden")}
            triton, torch_ops = found.numbers
            torch_ops -= sum(hidden.values())
            print(f"{name}: {triton} of Triton, {torch_ops} of torch, {hidden or 'none hidden'}")


if __name__ == "__main__":
    main()
