"""Check that the engine on a GPU answers as on a CPU, and its hits as its cold runs.

    python benchmarks/gpu_agreement.py [--only WORD ...] [--share 1/4] [--pairs 12] [--device cuda]

Small random float32 checkpoints of every family, then one of Qwen3.5 with each way to store
weights, to store KV blocks and to draft, with and without CUDA graphs. An answer may part from
the CPU's where the CPU's best two tokens lie within 1e-3 (within 0.05 where KV blocks
are rounded: a value at the edge of two codes may fall either way). Exits with 1 if one is
wrong or a case fails, whose traceback it prints.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import common  # noqa: F401  # First: it adds examples/ and tests/ to the path.
import numpy as np
from checkpoint_spec import CheckpointSpec
from exactness import next_turn_pairs, picture_pairs, random_pairs
from families import FAMILIES
from guesses import draft_freely
from make_checkpoint import make_checkpoint
from parity_cases import user

from vlm_serve import EngineConfig, Pipeline, SamplingParams

Answer = list[dict[int, float]]
NEAR, ROUNDED = 1e-3, 0.05


@dataclass(frozen=True)
class Case:
    """A checkpoint and how it is run. `only_here`: options for the GPU's side alone."""

    name: str
    spec: CheckpointSpec
    options: dict[str, Any] = field(default_factory=dict)
    only_here: dict[str, Any] = field(default_factory=dict)
    near: float = NEAR


def cases() -> Iterator[Case]:
    """The small checkpoints of every family, then ways to run one of them."""
    for shapes in FAMILIES.values():
        for name, spec in shapes.items():
            yield Case(name, spec)
    dense = CheckpointSpec(vision_depth=0, hidden_size=128, intermediate_size=256, head_dim=64)
    moe = replace(dense, num_experts=8, moe_intermediate_size=128)
    for name, spec in (("dense", dense), ("moe", moe)):
        yield Case(f"{name}, no graphs", spec, only_here={"cuda_graphs": False})
        yield Case(f"{name}, drafts", spec, only_here={"speculative": "suffix"})
        layer = replace(spec, mtp=True)
        yield Case(f"{name}, draft layer", layer, only_here={"speculative": "mtp"})
        seeing = replace(spec, vision_depth=2)
        yield Case(f"{name}, deterministic", seeing, only_here={"deterministic": True})
        stored = replace(spec, dtype="bfloat16")
        for weights in ("int8", "int6", "int4"):
            yield Case(f"{name}, {weights}", stored, {"quantization": weights})
    for kv in ("fp8", "int8"):
        yield Case(f"KV in {kv}", dense, {"kv_cache_dtype": kv}, near=ROUNDED)


def answers(checkpoint: Path, case: Case, options: dict[str, Any]) -> list[Answer]:
    """Greedy answers to prompts of many lengths at once, and about pictures if the model takes
    some: the best two tokens of every step."""
    draw = random.Random(5)
    prompts = [draw.choices(range(400), k=length) for length in (1, 16, 33, 64, 100, 257, 700)]
    params = SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True, logprobs=2)
    config = EngineConfig(
        dtype="float32", block_size=16, cache_memory="256MiB", **case.options | options
    )
    with Pipeline(checkpoint, config) as pipe:
        if pipe.engine.config.speculative != "off":
            draft_freely(pipe.engine)
        outputs = pipe.generate_many(prompts, params)
        if pipe.engine.spec.vision is not None:
            outputs += pipe.chat_many([[user(picture(seed), "Why?")] for seed in range(3)], params)
        return [one.logprobs or [] for one in outputs]


def picture(seed: int) -> dict[str, Any]:
    noise = np.random.default_rng(seed).integers(0, 256, (40, 56, 3), dtype=np.uint8)
    return {"type": "image", "image": noise}


def parts_at_a_near_tie(one: Answer, reference: Answer, near: float) -> bool | None:
    """None: the answers are equal. Else whether the reference was undecided where they part."""
    for mine, best_two in zip(one, reference, strict=True):
        if next(iter(mine)) != next(iter(best_two)):
            first, second, *_ = sorted(best_two.values(), reverse=True)
            return first - second < near
    return None


def agreement(checkpoint: Path, case: Case, device: str) -> str:
    """One line: how a GPU's answers compare. Raises AssertionError if one is wrong."""
    reference = answers(checkpoint, case, {"device": "cpu", "compiled_kernels": False})
    here = answers(checkpoint, case, {"device": device, **case.only_here})
    found = [parts_at_a_near_tie(*pair, case.near) for pair in zip(here, reference, strict=True)]
    line = f"{found.count(None)} answers equal, {found.count(True)} part at a near tie"
    assert False not in found, f"{line}, {found.count(False)} are wrong"
    return line


def hits(checkpoint: Path, case: Case, device: str, count: int) -> str:
    """One line: hits whose first logits have the bits of a cold run, and whose tokens are its."""
    config = EngineConfig(
        device=device,
        dtype="float32",
        block_size=16,
        cache_memory="64MiB",
        prefix_cache_decode_state_interval=0 if "deterministic" in case.only_here else 16,
        **case.options | case.only_here,
    )
    kinds = {"prompts": random_pairs, "turns": next_turn_pairs, "pictures": picture_pairs}
    told = []
    for kind, make in kinds.items():
        with Pipeline(checkpoint, config) as pipe:
            if kind == "pictures" and pipe.engine.spec.vision is None:
                continue
            pairs = [one[0] if isinstance(one, tuple) else one for one in make(pipe, count, seed=3)]
        bits, tokens = sum(p.same_bits for p in pairs), sum(p.same_tokens for p in pairs)
        worst = max(p.max_difference for p in pairs)
        told.append(f"{kind} {bits} bits, {tokens} tokens of {len(pairs)}, worst {worst:.1e}")
    return "; ".join(told)


def report(
    device: str, only: Sequence[str] = ("",), pairs: int = 12, share: str = "1/1"
) -> tuple[list[str], int]:
    """Return a line for each case whose name has one of these words, and how many failed; of
    share "k/n" only every n-th case, from the k-th on."""
    lines, failed = [], 0
    first, step = map(int, share.split("/"))
    for case in [case for case in cases() if any(w in case.name for w in only)][first - 1 :: step]:
        begin = time.monotonic()
        try:
            with tempfile.TemporaryDirectory() as folder:
                checkpoint = make_checkpoint(folder, case.spec)
                line = agreement(checkpoint, case, device)
                line += "; hits of " + hits(checkpoint, case, device, pairs)
        except Exception as error:
            failed += 1
            traceback.print_exc()
            line = f"FAILED: {type(error).__name__}: {error}"
        lines.append(f"- {case.name}: {line}")
        print(f"{lines[-1]} ({time.monotonic() - begin:.0f} s)", flush=True)
    return lines, failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[""], help="cases with one of these words")
    parser.add_argument("--share", default="1/1", help="k/n: every n-th case, from the k-th on")
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    return 1 if report(given.device, given.only, given.pairs, given.share)[1] else 0


if __name__ == "__main__":
    sys.exit(main())
