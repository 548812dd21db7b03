"""Count cache hits whose first logits have the bits of a cold run.

Hits are of random prompts, of chats about pictures where the model takes some, and of next turns
over decoded answers. With --at-once they are of prompts that waited until others, sent at the same
time, had computed what they share; --tight leaves so little memory that requests are preempted.

    python benchmarks/exact_hits.py [--family qwen3_vl ...] [--pairs 200] [--speculative mtp]
        [--turns] [--crowded]
        [--quantization int8|int6|int4] [--stored-as nvfp4-modelopt] [--gguf Q4_K]
        [--quantized-activations none|int8] [--tensor-parallel-size 2] [--isa avx2]
        [--rope-scaling JSON] [--lora 4] [--at-once [--tight]] [--host-cache-memory 16MiB]
        [--batch-invariant]

A small random checkpoint of each family (all, if none is named) with weights in float32 and
bfloat16, or quantised as published ones are (--stored-as), or in a GGUF file's blocks (--gguf);
every pair in random company. Next turns start from the states at the ends of answers; with --turns
there are no others. With --crowded so little memory is left that answers are preempted, and what
they leave comes back from host memory. With --speculative both sides draft, as many tokens as they
find. With ranks both sides have as many. With --lora every request and its company have random
adapters, or none. Exits with 1 if a pair differs.

With --batch-invariant whole answers are compared instead, tokens and log-probabilities: each
request alone on an empty cache, then in random batches, as a hit, preempted and in steps that fail,
by engines with small steps, little memory and drafts too; --pairs is the number of requests.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import common  # noqa: F401  # First: it adds examples/ and tests/ to the path.
import torch
from checkpoint_spec import CheckpointSpec
from common.machine import add_isa_argument, describe, run_as
from exactness import Pair, joined_pairs, next_turn_pairs, picture_pairs, random_pairs
from families import FAMILIES
from gguf import GGMLQuantizationType as Kind
from gguf_writer import WIDE, blocks, write_model, write_tower
from guesses import draft_freely
from invariance import WAYS as CIRCUMSTANCES
from invariance import compared
from make_checkpoint import make_checkpoint
from peft_folders import random_adapter
from quantised_weights import FORMATS

from vlm_serve.models.gguf.reader import BY_NAME
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Pipeline


@dataclass(frozen=True)
class Room:
    """How much memory an engine has.

    Attributes:
        memory: of its cache, by type of the weights.
        options: further ones.
        between: tokens of a prompt that is run between answers and next turns.
        preempts: requests must have been preempted.
    """

    memory: Mapping[str, str]
    options: Mapping[str, Any] = field(default_factory=dict)
    between: int = 0
    preempts: bool = False


ROOMY = Room({"float32": "64MiB", "bfloat16": "64MiB"})
TIGHT = Room({"float32": "448KiB", "bfloat16": "256KiB"}, {"max_num_seqs": 4}, preempts=True)
# About 30 blocks, less than three answers need; the prompt between takes most of them.
CROWDED = Room(
    {"float32": "304KiB", "bfloat16": "176KiB"},
    {
        "prefix_cache_state_budget": 4,
        "host_cache_memory": "64MiB",
        "max_num_seqs": 3,
        "max_model_len": 400,
    },
    between=360,
)


def _next_turns(pipe: Pipeline, count: int, *, between: int, **how: Any) -> list[Pair]:
    made = next_turn_pairs(pipe, count, seed=12, between=between, **how)
    pairs = [pair for pair, _ in made]
    stats = pipe.engine.stats()
    saves, tiers = stats["cache"]["saves"], stats["tiers"]
    told = f"ends {saves.get('answer_end', 0)}, parts {saves.get('answer_part', 0)}"
    if between:
        found = tiers["counts"].get("hit_host", 0)
        told += f", preempted {stats['num_preemptions']}, entries from a tier {found}"
    print(f"  next turns: states of answers: {told}", file=sys.stderr)
    return pairs


PROMPTS, PICTURES, TURNS = "prompts", "chats about pictures", "next turns"
AT_ONCE, ANSWERS = "prompts at once", "whole answers"
KINDS: dict[str, Callable[..., Iterable[Pair]]] = {
    PROMPTS: partial(random_pairs, seed=11),
    PICTURES: partial(picture_pairs, seed=13),
    TURNS: _next_turns,
}
WAYS: dict[str, Callable[..., Iterable[Pair]]] = KINDS | {
    AT_ONCE: partial(joined_pairs, seed=14),
}


def pairs(path: Path, config: EngineConfig, room: Room, kind: str, count: int) -> list[Pair]:
    """`count` pairs of a kind on a checkpoint, with weights and activations as the engine chooses
    them for such weights."""
    config = replace(
        config,
        block_size=16,
        cache_memory=room.memory[config.dtype],
        prefix_cache_answer_ends="always" if kind == TURNS else "auto",
    )
    with Pipeline(path, config) as pipe:
        assert pipe.engine.config.compiled_kernels, "there are no compiled kernels here"
        drafts = config.speculative != "off"
        if drafts:
            draft_freely(pipe.engine)
        names = [None, *(each.name for each in pipe.engine.adapters.all())]
        how: dict[str, Any] = {"num_tokens": 40 if drafts or room.preempts else 4, "loras": names}
        if kind == TURNS:
            how["between"] = room.between
        made = list(WAYS[kind](pipe, count, **how))
        preempted = pipe.engine.stats()["num_preemptions"]
        assert preempted or not room.preempts, "nothing was preempted: there is too much memory"
        return made


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
    parser.add_argument("--turns", action="store_true", help="next turns alone")
    parser.add_argument("--crowded", action="store_true", help="in little memory, with a tier")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--quantization", choices=("int8", "int6", "int4"))
    how.add_argument("--stored-as", choices=FORMATS, default="")
    how.add_argument("--gguf", choices=BY_NAME, default="")
    parser.add_argument("--quantized-activations", choices=("auto", "none", "int8"), default="auto")
    parser.add_argument("--rope-scaling", type=json.loads, metavar="JSON", help="as for serve")
    parser.add_argument("--lora", type=int, default=0, metavar="N", help="number of adapters")
    parser.add_argument("--at-once", action="store_true", help="only of prompts sent at once")
    parser.add_argument("--tight", action="store_true", help="with preemption")
    parser.add_argument("--batch-invariant", action="store_true", help="compare whole answers")
    parser.add_argument("--host-cache-memory", default="0", metavar="SIZE", help="as for serve")
    add_isa_argument(parser)
    given = parser.parse_args()
    run_as(given.isa)
    print(describe(torch.get_num_threads()))
    if given.batch_invariant:
        print("| checkpoint, weights | circumstances | equal answers | equal first tokens |")
    else:
        print("| checkpoint, weights | hits of | same bits | same tokens |")
    print("|---|---|---|---|")
    room = CROWDED if given.crowded else TIGHT if given.tight else ROOMY
    config = EngineConfig(
        quantization=given.quantization,
        quantized_activations=given.quantized_activations,
        speculative=given.speculative,
        tensor_parallel_size=given.tensor_parallel_size,
        rope_scaling=given.rope_scaling,
        **{"host_cache_memory": given.host_cache_memory, **room.options},
    )
    kinds = [AT_ONCE] if given.at_once else list(KINDS)
    if given.turns or given.crowded:
        kinds = [TURNS]
    if given.batch_invariant:
        kinds = [ANSWERS]
    different = 0
    for family in given.family:
        spec = replace(next(iter(FAMILIES[family].values())), dtype="bfloat16")
        spec = replace(spec, mtp="mtp" in given.speculative, quantization=given.stored_as)
        if given.gguf:
            spec = replace(spec, **WIDE)
        different += print_rows(
            family, spec, config, room, kinds, given.pairs, given.gguf, given.lora
        )
    return 1 if different else 0


def in_file(checkpoint: Path, kind: str) -> Path:
    """A checkpoint's GGUF file, with its tower beside it."""
    if any(checkpoint.glob("preprocessor_config.json")):
        write_tower(checkpoint, checkpoint.parent / "mmproj.gguf")
    return write_model(checkpoint, checkpoint.parent / f"{kind}.gguf", blocks(Kind[kind]))


def print_rows(
    name: str,
    spec: CheckpointSpec,
    config: EngineConfig,
    room: Room,
    kinds: Iterable[str],
    count: int,
    file: str,
    adapters: int,
) -> int:
    """Kinds of pairs on one checkpoint, or on its file in some type; returns how many differ."""
    different = 0
    with tempfile.TemporaryDirectory() as folder:
        path = make_checkpoint(Path(folder) / "checkpoint", spec)
        plain = path
        if adapters and spec.quantization:
            plain = make_checkpoint(Path(folder) / "plain", replace(spec, quantization=""))
        made_adapters = [
            f"a{seed}={random_adapter(plain, Path(folder) / f'a{seed}', seed, rank=4 + 3 * seed)}"
            for seed in range(adapters)
        ]
        config = replace(config, lora_modules=tuple(made_adapters))
        if file:
            path = in_file(path, file)
        for dtype in ("float32", "bfloat16"):
            for kind in kinds:
                if kind == PICTURES and not spec.vision_depth:
                    continue
                own = replace(config, dtype=dtype)
                if kind == ANSWERS:
                    seeing = bool(spec.vision_depth)
                    different += print_answers(f"{name}, {dtype}", path, own, count, seeing)
                    continue
                made = pairs(path, own, room, kind, count)
                bits, tokens = sum(p.same_bits for p in made), sum(p.same_tokens for p in made)
                different += len(made) - bits
                cells = f"{bits} of {len(made)} | {tokens} of {len(made)}"
                print(f"| {name}, {dtype} | {kind} | {cells} |", flush=True)
    return different


def print_answers(name: str, path: Path, config: EngineConfig, count: int, pictures: bool) -> int:
    """Requests with equal answers, by circumstances; returns the number of others."""
    ways = dict(CIRCUMSTANCES)
    if config.tensor_parallel_size > 1:
        del ways["drafts"]  # they are not measured for several ranks
    config = replace(config, block_size=16, cache_memory="64MiB", deterministic=True)
    different = 0
    results = compared(partial(Pipeline, path), config, count, ways=ways, pictures=pictures)
    for result in results:
        happened = ", ".join(f"{what} {times}" for what, times in result.counts.items() if times)
        print(f"  {name}, {result.name}: {happened}", file=sys.stderr)
        cells = f"{result.equal} of {result.total} | {result.first} of {result.total}"
        print(f"| {name} | {result.name} | {cells} |", flush=True)
        different += result.total - result.equal
    return different


if __name__ == "__main__":
    sys.exit(main())
