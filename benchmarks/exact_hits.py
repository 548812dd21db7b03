"""Count cache hits whose first logits have the bits of a cold run.

Hits are of random prompts, of chats about pictures where the model takes some, and of next turns
over decoded answers.

    python benchmarks/exact_hits.py [--family qwen3_vl ...] [--pairs 200] [--speculative mtp]
        [--quantization int8|int6|int4] [--stored-as nvfp4-modelopt]
        [--quantized-activations none|int8] [--tensor-parallel-size 2] [--isa avx2]

A small random checkpoint of each family (all, if none is named) with weights in float32 and
bfloat16, or quantised as published ones are (--stored-as); every pair in random company. With
--speculative both sides draft, as many tokens as they find. With ranks both sides have as many.
Exits with 1 if a pair differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import common  # noqa: F401  # First: it adds examples/ and tests/ to the path.
import torch
from checkpoint_spec import CheckpointSpec
from common.machine import add_isa_argument, describe, run_as
from exactness import Pair, next_turn_pairs, picture_pairs, random_pairs
from families import FAMILIES
from guesses import draft_freely
from make_checkpoint import make_checkpoint
from quantised_weights import FORMATS

from vlm_serve.config import EngineConfig
from vlm_serve.pipeline import Pipeline


def _next_turns(pipe: Pipeline, count: int, *, num_tokens: int) -> list[Pair]:
    return [pair for pair, _ in next_turn_pairs(pipe, count, seed=12, num_tokens=num_tokens)]


PROMPTS, PICTURES, TURNS = "prompts", "chats about pictures", "next turns"
KINDS: dict[str, Callable[..., Iterable[Pair]]] = {
    PROMPTS: partial(random_pairs, seed=11),
    PICTURES: partial(picture_pairs, seed=13),
    TURNS: _next_turns,
}


def pairs(path: Path, config: EngineConfig, kind: str, count: int) -> list[Pair]:
    """`count` pairs of a kind on a checkpoint, with weights and activations as the engine chooses
    them for such weights."""
    config = replace(
        config,
        block_size=16,
        cache_memory="64MiB",
        prefix_cache_decode_state_interval=16 if kind == TURNS else 0,
    )
    with Pipeline(path, config) as pipe:
        assert pipe.engine.config.compiled_kernels, "there are no compiled kernels here"
        drafts = config.speculative != "off"
        if drafts:
            draft_freely(pipe.engine)
        return list(KINDS[kind](pipe, count, num_tokens=40 if drafts else 4))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--family", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument(
        "--speculative",
        nargs="?",
        const="suffix",
        default="off",
        help="with drafts: suffix, or mtp and mtp,suffix of a family that has such a layer",
    )
    parser.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--quantization", choices=("int8", "int6", "int4"))
    how.add_argument("--stored-as", choices=FORMATS, default="")
    parser.add_argument("--quantized-activations", choices=("auto", "none", "int8"), default="auto")
    add_isa_argument(parser)
    given = parser.parse_args()
    run_as(given.isa)
    print(describe(torch.get_num_threads()))
    print("| checkpoint, weights | hits of | same bits | same tokens |\n|---|---|---|---|")
    config = EngineConfig(
        quantization=given.quantization,
        quantized_activations=given.quantized_activations,
        speculative=given.speculative,
        tensor_parallel_size=given.tensor_parallel_size,
    )
    different = 0
    for family in given.family:
        spec = replace(next(iter(FAMILIES[family].values())), dtype="bfloat16")
        spec = replace(spec, mtp="mtp" in given.speculative, quantization=given.stored_as)
        different += print_rows(family, spec, config, given.pairs)
    return 1 if different else 0


def print_rows(name: str, spec: CheckpointSpec, config: EngineConfig, count: int) -> int:
    """All kinds of pairs on one checkpoint; returns how many differ."""
    different = 0
    with tempfile.TemporaryDirectory() as folder:
        path = make_checkpoint(folder, spec)
        for dtype in ("float32", "bfloat16"):
            for kind in KINDS:
                if kind == PICTURES and not spec.vision_depth:
                    continue
                made = pairs(path, replace(config, dtype=dtype), kind, count)
                bits, tokens = sum(p.same_bits for p in made), sum(p.same_tokens for p in made)
                different += len(made) - bits
                cells = f"{bits} of {len(made)} | {tokens} of {len(made)}"
                print(f"| {name}, {dtype} | {kind} | {cells} |", flush=True)
    return different


if __name__ == "__main__":
    sys.exit(main())
