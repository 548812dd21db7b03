"""The whole engine on the GPU at hand: CUDA graphs, snapshots, agreement with the CPU.

    python benchmarks/engine_gpu.py [CHECKPOINT] [--rounds 5]

First agreement: small float32 checkpoints, dense and MoE, of Qwen3.5, Qwen3-VL and Qwen3-Next
answer alike on the CPU and on the GPU with and without CUDA graphs; an answer may part where the
CPU's best two tokens lie within 1e-3.
Then time, on the checkpoint or on a random one of Qwen3.5-4B's shape (bfloat16, vocabulary 32 768,
7 GB of disk): prefill, the same prompt again and decode, with and without graphs and without prefix
caching (and so without snapshots), in turns. `kernels_gpu.py --engine --write` runs this too and
writes the tables into benchmarks/gpu.md. `--device cpu` rehearses it without graphs.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine_cases import (
    AGAIN,
    CheckpointSpec,
    Ours,
    Results,
    Work,
    make_checkpoint,
    work_for,
)
from parity_cases import user

from vlm_serve import EngineConfig, Pipeline, SamplingParams

SMALL = {
    "dense": CheckpointSpec(vision_depth=0),
    "MoE": CheckpointSpec(vision_depth=0, num_experts=8),
    "Qwen3-VL-MoE": CheckpointSpec(family="qwen3_vl", num_experts=8, sparse_step=2),
    "Qwen3-Next": CheckpointSpec(family="qwen3_next", vision_depth=0, num_experts=8),
}
QWEN_4B = CheckpointSpec(
    hidden_size=2560,
    num_layers=32,
    intermediate_size=9216,
    vocab_size=32768,
    gdn_key_heads=16,
    gdn_value_heads=32,
    gdn_key_dim=128,
    gdn_value_dim=128,
    attention_heads=16,
    kv_heads=4,
    head_dim=256,
    vision_depth=0,
    tied_embeddings=True,
    dtype="bfloat16",
    shards=4,
)
NEAR = 1e-3
PLAIN: dict[str, Any] = {"cuda_graphs": False}
SIDES: dict[str, dict[str, Any]] = {
    "default": {},
    "no graphs": PLAIN,
    "no prefix caching": {"enable_prefix_caching": False},
}

Answer = list[dict[int, float]]


def answers(checkpoint: Path, **options: Any) -> list[Answer]:
    """Greedy answers to prompts of many lengths at once, and about pictures if the model takes
    some: the best two tokens of every step."""
    draw = random.Random(5)
    prompts = [draw.choices(range(400), k=length) for length in (1, 16, 33, 64, 100, 257, 700)]
    params = SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True, logprobs=2)
    config = EngineConfig(dtype="float32", block_size=16, cache_memory="256MiB", **options)
    with Pipeline(checkpoint, config) as pipe:
        outputs = pipe.generate_many(prompts, params)
        if pipe.engine.spec.vision is not None:
            outputs += pipe.chat_many([[user(picture(seed), "Why?")] for seed in range(3)], params)
        return [one.logprobs or [] for one in outputs]


def picture(seed: int) -> dict[str, Any]:
    noise = np.random.default_rng(seed).integers(0, 256, (40, 56, 3), dtype=np.uint8)
    return {"type": "image", "image": noise}


def parts_at_a_near_tie(one: Answer, reference: Answer) -> bool | None:
    """None: the answers are equal. Else whether the reference was undecided where they part."""
    for mine, best_two in zip(one, reference, strict=True):
        if next(iter(mine)) != next(iter(best_two)):
            first, second, *_ = sorted(best_two.values(), reverse=True)
            return first - second < NEAR
    return None


def agreement(device: str) -> list[str]:
    """One line for each small checkpoint and way to run it. Raises SystemExit if one is wrong."""
    lines = []
    for name, spec in SMALL.items():
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = make_checkpoint(folder, spec)
            reference = answers(checkpoint, device="cpu")
            for side, options in (("default", {}), ("no graphs", PLAIN)):
                found = [
                    parts_at_a_near_tie(*pair)
                    for pair in zip(
                        answers(checkpoint, device=device, **options), reference, strict=True
                    )
                ]
                if False in found:
                    raise SystemExit(f"{name}, {side}: {found.count(False)} answers are wrong")
                counts = (
                    f"{found.count(None)} answers equal, {found.count(True)} part at a near tie"
                )
                lines.append(f"- {name}, {device} beside the CPU, {side}: {counts}")
                print(lines[-1], flush=True)
    return lines


def times(checkpoint: Path, device: str, rounds: int, work: Work) -> list[str]:
    """A table: milliseconds to the first token, tokens per second of decoding."""
    results = Results()
    with ExitStack() as stack:
        sides = {
            name: Ours(stack.enter_context(Pipeline(checkpoint, _config(device, options))))
            for name, options in SIDES.items()
        }
        results.measure(sides, work, rounds, warm_up=2)
    lines = [f"| | {' | '.join(SIDES)} |", "|---" * (1 + len(SIDES)) + "|"]
    for row, tokens in work.tokens.items():
        medians = [results.median(row, side) for side in SIDES]
        if row == AGAIN:
            cells = [f"{1000 * seconds:.1f} ms" for seconds in medians]
        else:
            cells = [f"{tokens / seconds:.0f} tok/s" for seconds in medians]
        lines.append(f"| {row} | {' | '.join(cells)} |")
    print("\n".join(lines), flush=True)
    return lines


def _config(device: str, options: dict[str, Any]) -> EngineConfig:
    return EngineConfig(device=device, cache_memory="4GiB", max_num_batched_tokens=4096, **options)


def report(given: Path | None, device: str, rounds: int, tokens: int = 4096) -> list[str]:
    """Runs it all and returns the lines of the report."""
    lines = [*agreement(device), ""]
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = given or make_checkpoint(folder, QWEN_4B)
        return lines + times(checkpoint, device, rounds, work_for(checkpoint, tokens, 64))


def main() -> int:
    parser = argparse.ArgumentParser(description="The engine on a GPU.")
    parser.add_argument("checkpoint", type=Path, nargs="?", help="default: a random 4B model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=4096)
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        print("No GPU found: nothing was measured. Run this script as it is on a machine with one.")
        return 0
    report(arguments.checkpoint, arguments.device, arguments.rounds, arguments.prompt_tokens)
    return 0


if __name__ == "__main__":
    sys.exit(main())
