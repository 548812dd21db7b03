"""Measure long prompts and long answers with a published vocabulary on a GPU.

    python benchmarks/engine_gpu_long.py [--prompt 8192] [--answer 1024] [--batches 1 16]
        [--quantization none int8 int4] [--device cpu]

A random bfloat16 checkpoint of Qwen3.5-4B's shape with its vocabulary of 248 320 entries, in the
folder for temporary files (8.5 GB; a memory file system is best). Each batch is measured once warm:
seconds to the first token, tokens per second of each answer behind its first token, output tokens
per second of the whole batch. No two prompts share a block. `--device cpu` rehearses it with a tiny
model.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

import common  # noqa: F401  # First: it adds examples/ and tests/ to the path.
import torch
from checkpoint_spec import CheckpointSpec
from engine_gpu import QWEN_4B, VOCABULARY, with_vocabulary
from make_checkpoint import make_checkpoint

from vlm_serve import EngineConfig, Pipeline, SamplingParams

TINY = CheckpointSpec(vision_depth=0, tied_embeddings=True, dtype="bfloat16")


def measure(
    checkpoint: Path, device: str, quantization: str, batches: list[int], prompt: int, answer: int
) -> list[str]:
    """Return a line for each batch."""
    draw, lines = random.Random(0), []
    room = max(batches) * (prompt + answer)
    config = EngineConfig(
        device=device,
        cache_memory="40GiB" if device != "cpu" else "256MiB",
        max_num_batched_tokens=4096 if device != "cpu" else 512,
        max_num_seqs=max(batches),
        quantization=None if quantization == "none" else quantization,
    )
    begin = time.perf_counter()
    with Pipeline(checkpoint, config) as pipe:
        print(f"{quantization}: started in {time.perf_counter() - begin:.0f} s, {room} tokens")
        for batch in batches:
            seconds = {}
            for count in (1, 1, answer):  # The first one warms up.
                prompts = [draw.choices(range(500), k=prompt) for _ in range(batch)]
                params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
                begin = time.perf_counter()
                pipe.generate_many(prompts, params)
                seconds[count] = time.perf_counter() - begin
            decode = (answer - 1) / (seconds[answer] - seconds[1])
            total = batch * answer / seconds[answer]
            cells = f"{seconds[1]:.2f} s", f"{decode:.0f}", f"{total:.0f}"
            lines.append(f"| {quantization} | {batch} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--answer", type=int, default=1024)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--quantization", nargs="+", default=["none"])
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    tiny = given.device == "cpu"
    if not tiny and not torch.cuda.is_available():
        print("No GPU found: nothing was measured. Run this script as it is on a machine with one.")
        return 0
    prompt, answer = (200, 20) if tiny else (given.prompt, given.answer)
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        checkpoint = make_checkpoint(folder, TINY if tiny else QWEN_4B)
        with_vocabulary(checkpoint, 2 * TINY.vocab_size if tiny else VOCABULARY)
        print(f"a checkpoint in {time.perf_counter() - begin:.0f} s", flush=True)
        print("| weights | batch | all first tokens | tokens/s of an answer | tokens/s in all |")
        print("|---|---|---|---|---|")
        for quantization in given.quantization:
            measure(checkpoint, given.device, quantization, given.batches, prompt, answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
