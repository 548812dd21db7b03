"""Check that the memory measured at start bounds what steps take on the GPU at hand.

    python benchmarks/gpu_memory.py [--layers 8]

A random bfloat16 model of Qwen3.5-4B's width with a vision tower, its cache in the memory that is
left. Then the largest prompts, pictures, drawn tokens and reported log-probabilities, many at once:
torch's allocator may hold at no time more than weights, pools and the measured steps. Exits with 1
if it does, or if a request fails.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from dataclasses import replace

import common  # noqa: F401  # First: it adds examples/ and tests/ to the path.
import numpy as np
import torch
from engine_gpu import QWEN_4B
from make_checkpoint import make_checkpoint
from parity_cases import user
from PIL import Image

from vlm_serve import EngineConfig, Pipeline, SamplingParams
from vlm_serve.engine.steps.memory import EMBEDDING_CACHE_BYTES
from vlm_serve.options.declared import format_size

SIDE = 1536
SEQUENCES, LENGTH = 16, 9000


def run(pipe: Pipeline, vocabulary: int) -> int:
    """Send what takes most memory, alone and at once; return how many requests that were."""
    draw, pixels = random.Random(0), np.random.default_rng(0)
    prompts = [draw.choices(range(vocabulary), k=LENGTH) for _ in range(2 * SEQUENCES)]
    drawn = SamplingParams(max_tokens=40, temperature=1.0, top_p=0.9, seed=1, ignore_eos=True)
    reported = replace(drawn, prompt_logprobs=20, max_tokens=4)
    greedy = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    noise = [pixels.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8) for _ in range(6)]
    pictures = [{"type": "image", "image": Image.fromarray(each)} for each in noise]
    for prompt in prompts[: SEQUENCES // 4]:
        pipe.generate(prompt, drawn)
    pipe.generate(draw.choices(range(vocabulary), k=LENGTH), reported)
    for picture in pictures[:2]:
        pipe.chat([user(picture, "What is it?")], greedy)
    pipe.generate_many(prompts[SEQUENCES:], drawn)
    pipe.chat_many([[user(picture, "And this?")] for picture in pictures[2:]], greedy)
    return SEQUENCES // 4 + 1 + 2 + SEQUENCES + 4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("No GPU found: nothing was checked. Run this script as it is on a machine with one.")
        return 0
    spec = replace(
        QWEN_4B,
        num_layers=given.layers,
        vision_depth=12,
        vision_hidden_size=1024,
        vision_heads=16,
        vision_intermediate_size=4096,
        image_max_pixels=SIDE * SIDE,
        tied_embeddings=True,
    )
    config = EngineConfig(max_num_seqs=SEQUENCES, max_model_len=16384)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint(folder, spec)
        with Pipeline(checkpoint, config) as pipe:
            engine = pipe.engine
            steps = engine.step_memory
            assert steps is not None, "nothing was measured"
            device = torch.device(engine.config.device)
            resting = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            count = run(pipe, spec.vocab_size)
            took = torch.cuda.max_memory_allocated(device) - resting
            # Embeddings that are kept between steps have a bucket of their own.
            bound = max(steps.forward, steps.vision) + EMBEDDING_CACHE_BYTES
            free, total = torch.cuda.mem_get_info(device)
            print(f"- measured at start: {steps}")
            print(f"- {count} requests took {format_size(took)}, at most {format_size(bound)}")
            print(f"- {format_size(free)} of {format_size(total)} stayed free of everything")
            return 0 if took <= bound else 1


if __name__ == "__main__":
    sys.exit(main())
