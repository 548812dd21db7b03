"""Compare answers with LoRA adapters on the GPU at hand with those of a CPU.

    python benchmarks/gpu_lora.py [--requests 24] [--device cpu]

Random checkpoints, dense and with experts, get two random adapters each. Prompts are answered in
float32 by compiled code on the CPU, then by the GPU, alone and all at once, with either adapter and
without, and again as cache hits. Prints how many greedy answers are equal and the time of a step
with adapters over one without; exits with 1 if fewer than 95 in 100 are equal, since products that
differ in the last bits may turn a close choice.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import common  # noqa: F401  # First: it adds examples/ and tests/ to the path.
from checkpoint_spec import CheckpointSpec
from common.machine import describe
from make_checkpoint import make_checkpoint
from parity_cases import random_ids
from peft_folders import random_adapter

from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Pipeline
from vlm_serve.sampling_params import SamplingParams

SPECS = {
    "dense": CheckpointSpec(vision_depth=0),
    "experts": CheckpointSpec(vision_depth=0, num_experts=8),
}
NAMES = ("", "first", "second")
PARAMS = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
EQUAL = 0.95


def answers(pipe: Pipeline, prompts: list[list[int]]) -> list[list[int]]:
    """Return the greedy tokens of all prompts, each with an adapter or none, in one batch."""
    wanted = [NAMES[index % len(NAMES)] or None for index in range(len(prompts))]
    outputs = pipe.generate_many(prompts, PARAMS, lora=wanted)
    return [list(output.token_ids) for output in outputs]


def seconds(pipe: Pipeline, lora: str | None) -> float:
    """Return the seconds of decoding 32 tokens for 8 prompts that differ."""
    params = replace(PARAMS, max_tokens=32)
    prompts = [random_ids(20, seed) for seed in range(100, 108)]
    pipe.generate_many(prompts, params, lora=[lora] * len(prompts))
    began = time.perf_counter()
    pipe.generate_many(prompts, params, lora=[lora] * len(prompts))
    return time.perf_counter() - began


def compared(spec: CheckpointSpec, folder: Path, device: str, count: int) -> tuple[int, int, float]:
    """Return the equal answers, all answers, and the time with an adapter over that without."""
    model = make_checkpoint(folder / "model", spec)
    named = []
    for seed, name in enumerate(NAMES[1:]):
        random_adapter(model, folder / name, seed, only=["layers", "lm_head"])
        named.append(f"{name}={folder / name}")
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        block_size=16,
        cache_memory="64MiB",
        lora_modules=tuple(named),
    )
    prompts = [random_ids(30 + 5 * seed, seed) for seed in range(count)]
    with Pipeline(model, config) as pipe:
        expected = answers(pipe, prompts)
    other = replace(config, device=device, compiled_kernels=False)
    with Pipeline(model, other) as pipe:
        rounds = [answers(pipe, prompts), answers(pipe, prompts)]
        for prompt, index in zip(prompts, range(count), strict=True):
            lora = NAMES[index % len(NAMES)] or None
            rounds.append([list(pipe.generate_many([prompt], PARAMS, lora=[lora])[0].token_ids)])
        ratio = seconds(pipe, "first") / seconds(pipe, None)
    alone = [each[0] for each in rounds[2:]]
    found = [*rounds[0], *rounds[1], *alone]
    equal = sum(map(list.__eq__, found, expected * 3))
    return equal, len(found), ratio


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    print(describe(1) if options.device == "cpu" else _card())
    wrong = 0
    for name, spec in SPECS.items():
        with tempfile.TemporaryDirectory() as folder:
            equal, total, ratio = compared(spec, Path(folder), options.device, options.requests)
        wrong += equal < EQUAL * total
        print(f"{name}: {equal} of {total} answers equal; with an adapter {ratio:.2f} of the time")
    return 1 if wrong else 0


def _card() -> str:
    import torch

    return torch.cuda.get_device_name()


if __name__ == "__main__":
    sys.exit(main())
