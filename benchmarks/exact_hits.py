"""Counts cache hits whose first logits have the bits of a cold run: of random prompts, and of next
turns over decoded answers.

    python benchmarks/exact_hits.py [--pairs 200] [--speculative] [--isa avx2]

Small random checkpoints, dense and MoE, with weights in float32 and bfloat16; every pair in random
company. With --speculative both sides draft, as many tokens as they find. Exits with 1 if a pair
differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import engine_cases  # noqa: F401  # First: it says where the tests' modules are.
import torch
from checkpoint_spec import CheckpointSpec
from exactness import Pair, next_turn_pairs, random_pairs
from guesses import draft_freely
from machine import add_isa_argument, describe, run_as
from make_checkpoint import make_checkpoint

from vlm_serve.config import EngineConfig
from vlm_serve.pipeline import Pipeline

SPECS = {
    "dense": CheckpointSpec(vision_depth=0, dtype="bfloat16"),
    "MoE": CheckpointSpec(num_experts=8, vision_depth=0, dtype="bfloat16"),
}


def pairs(path: Path, dtype: str, kind: str, count: int, speculative: bool) -> list[Pair]:
    """`count` pairs of a kind on a checkpoint, with weights and activations as the engine chooses
    them for such weights."""
    config = EngineConfig(
        dtype=dtype,
        block_size=16,
        cache_memory="64MiB",
        prefix_cache_decode_state_interval=16 if kind == "next turns" else 0,
        speculative="suffix" if speculative else "off",
    )
    with Pipeline(path, config) as pipe:
        assert pipe.engine.config.compiled_kernels, "there are no compiled kernels here"
        if speculative:
            draft_freely(pipe.engine)
        tokens = 40 if speculative else 4
        if kind == "prompts":
            return list(random_pairs(pipe, count, seed=11, num_tokens=tokens))
        return [pair for pair, _ in next_turn_pairs(pipe, count, seed=12, num_tokens=tokens)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--speculative", action="store_true", help="with suffix drafts")
    add_isa_argument(parser)
    given = parser.parse_args()
    run_as(given.isa)
    print(describe(torch.get_num_threads()))
    print("| checkpoint, weights | hits of | same bits | same tokens |\n|---|---|---|---|")
    different = 0
    for name, spec in SPECS.items():
        with tempfile.TemporaryDirectory() as folder:
            path = make_checkpoint(folder, spec)
            for dtype in ("float32", "bfloat16"):
                for kind in ("prompts", "next turns"):
                    made = pairs(path, dtype, kind, given.pairs, given.speculative)
                    bits, tokens = sum(p.same_bits for p in made), sum(p.same_tokens for p in made)
                    different += len(made) - bits
                    cells = f"{bits} of {len(made)} | {tokens} of {len(made)}"
                    print(f"| {name}, {dtype} | {kind} | {cells} |", flush=True)
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
