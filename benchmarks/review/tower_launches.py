"""Launches of the vision tower over one picture, and bytes that torch's operations move.

    python benchmarks/review/tower_launches.py [CONFIG] [--patches 1024 4096]

Counted on the device meta, with published shapes (by default those of 4B).
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import checkout
import torch
from operations import Operations

from vlm_serve.kernels.triton_support import Target, record_launches
from vlm_serve.models.registry import spec_of
from vlm_serve.models.weight_sizes import unread_model


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", type=Path, nargs="?", default=checkout.CONFIGS[0])
    parser.add_argument("--patches", type=int, nargs="+", default=[1024, 4096])
    given = parser.parse_args(arguments)
    spec = spec_of(json.loads(given.config.read_text()))
    model = unread_model(spec, torch.bfloat16, torch.bfloat16)
    for patches in given.patches:
        tower = model.fixed_tower(patches)
        tiles = torch.zeros(patches // 64 + 16, 3, dtype=torch.int32, device="meta")
        with record_launches(Target("cuda", 90)) as recorded, Operations() as operations:
            tower.run(patches, tiles)
        kernels = Counter(launch.kernel.__name__ for launch in recorded)
        print(f"{patches} patches: Triton {dict(kernels)}")
        print(f"  torch {operations.counts.total()}: {dict(operations.counts)}")
        print(f"  of these, views by their schema: {dict(+operations.hidden)}")
        moved = {name: round(size / 1e9, 2) for name, size in operations.moved.items()}
        print(f"  GB moved by torch: {moved}")


if __name__ == "__main__":
    main()
