"""Check the whole engine on a GPU against the CPU, then time prefill, hits and decode.

    python benchmarks/engine_gpu.py [CHECKPOINT] [--rounds 5] [--no-agreement]

First `gpu_agreement.py`. Then time, on the checkpoint or on a random one of Qwen3.5-4B's shape
(bfloat16, its vocabulary of 248 320, 8.5 GB of disk): prefill, the same prompt again and decode,
with and without graphs and without prefix caching (and so without snapshots), and transformers on
the same GPU, in turns. `kernels_gpu.py --engine --write` runs this too and writes the tables into
benchmarks/gpu.md. `--device cpu` rehearses it without graphs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import common  # noqa: F401  # First: it adds examples/ and tests/ to the path.
import gpu_agreement
import oracle
import torch
from checkpoint_spec import CheckpointSpec
from common.engine_cases import (
    AGAIN,
    Ours,
    Results,
    Side,
    Transformers,
    Work,
    work_for,
)
from make_checkpoint import make_checkpoint
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from vlm_serve import EngineConfig, Pipeline

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
VOCABULARY = 248_320
"""Entries of the published vocabulary. A tokenizer of that size would take minutes to train."""
PLAIN: dict[str, Any] = {"cuda_graphs": False}
SIDES: dict[str, dict[str, Any]] = {
    "default": {},
    "no graphs": PLAIN,
    "no prefix caching": {"enable_prefix_caching": False},
}
TRANSFORMERS = "transformers"


def with_vocabulary(checkpoint: Path, entries: int) -> Path:
    """Give a checkpoint with tied embeddings that many of them; its tokenizer stays as it is."""
    path = checkpoint / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    for part in (config, config.get("text_config", {})):
        if "vocab_size" in part:
            part["vocab_size"] = entries
    path.write_text(json.dumps(config), encoding="utf-8")
    for file in checkpoint.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            name = next((key for key in opened.keys() if "embed_tokens" in key), None)  # noqa: SIM118
        if name is not None:
            tensors = load_file(file)
            old = tensors[name]
            times = -(-entries // len(old))
            tensors[name] = old.repeat(times, 1)[:entries].contiguous()
            save_file(tensors, file, metadata={"format": "pt"})
    return checkpoint


def times(checkpoint: Path, device: str, rounds: int, work: Work) -> list[str]:
    """A table: milliseconds to the first token, tokens per second of decoding."""
    results = Results()
    with ExitStack() as stack:
        sides: dict[str, Side] = {
            name: Ours(stack.enter_context(Pipeline(checkpoint, _config(device, options))))
            for name, options in SIDES.items()
        }
        sides[TRANSFORMERS] = Transformers(oracle.model(checkpoint, torch.bfloat16).to(device))
        results.measure(sides, work, rounds, warm_up=2)
    lines = [f"| | {' | '.join(sides)} |", "|---" * (1 + len(sides)) + "|"]
    for row, tokens in work.tokens.items():
        medians = [results.median(row, side) for side in sides]
        if row == AGAIN:
            cells = [f"{1000 * seconds:.1f} ms" for seconds in medians]
        else:
            cells = [f"{tokens / seconds:.0f} tok/s" for seconds in medians]
        lines.append(f"| {row} | {' | '.join(cells)} |")
    print("\n".join(lines), flush=True)
    return lines


def _config(device: str, options: dict[str, Any]) -> EngineConfig:
    return EngineConfig(device=device, cache_memory="4GiB", max_num_batched_tokens=4096, **options)


def report(
    given: Path | None, device: str, rounds: int, tokens: int = 4096, agreement: bool = True
) -> list[str]:
    """Runs it all and returns the lines of the report."""
    lines = [*gpu_agreement.report(device)[0], ""] if agreement else []
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = given or with_vocabulary(make_checkpoint(folder, QWEN_4B), VOCABULARY)
        return lines + times(checkpoint, device, rounds, work_for(checkpoint, tokens, 64))


def main() -> int:
    parser = argparse.ArgumentParser(description="The engine on a GPU.")
    parser.add_argument("checkpoint", type=Path, nargs="?", help="default: a random 4B model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=4096)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-agreement", action="store_true")
    arguments = parser.parse_args()
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        print("No GPU found: nothing was measured. Run this script as it is on a machine with one.")
        return 0
    report(
        arguments.checkpoint,
        arguments.device,
        arguments.rounds,
        arguments.prompt_tokens,
        not arguments.no_agreement,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
