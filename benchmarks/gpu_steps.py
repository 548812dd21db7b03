"""Check that captured steps are right on the GPU at hand while the host runs ahead of it.

    python benchmarks/gpu_steps.py [--rounds 3] [--device cpu]

A random float32 model reads prompts of 4 096 tokens, 256 a step, so that no step but the last reads
anything back. Its log-probabilities with CUDA graphs must be those without, within 1e-4. The same
run with the waits for copies left out says whether this card would have shown the fault. Then a
second engine starts while the first one answers. Exits with 1 if something is wrong.
`--device cpu` rehearses it with tiny shapes and without graphs.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import common  # noqa: F401  # First: it adds examples/ and tests/ to the path.
import torch
from checkpoint_spec import CheckpointSpec
from make_checkpoint import make_checkpoint

from vlm_serve import EngineConfig, Pipeline, SamplingParams
from vlm_serve.engine.steps import step_tables
from vlm_serve.engine.steps.step_tables import HostRing

MODEL = CheckpointSpec(
    hidden_size=1024,
    num_layers=16,
    intermediate_size=3072,
    vocab_size=4096,
    gdn_key_heads=8,
    gdn_value_heads=16,
    gdn_key_dim=128,
    gdn_value_dim=128,
    attention_heads=8,
    kv_heads=2,
    head_dim=128,
    vision_depth=0,
)
TINY = CheckpointSpec(vision_depth=0)
NEAR = 1e-4
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=5)
Answers = list[list[dict[int, float]]]


def config(device: str, **options: Any) -> EngineConfig:
    """Return options under which a long prompt takes many steps that a graph can compute."""
    return EngineConfig(
        device=device,
        dtype="float32",
        cache_memory="1GiB" if device != "cpu" else "64MiB",
        max_num_seqs=4,
        max_num_batched_tokens=256,
        max_model_len=8192,
        speculative="off",
        **options,
    )


def answers(checkpoint: Path, options: EngineConfig, prompts: list[list[int]]) -> Answers:
    """Return the likeliest tokens of each answer's steps; prompts come one after the other."""
    with Pipeline(checkpoint, options) as pipe:
        return [pipe.generate(prompt, PARAMS).logprobs or [] for prompt in prompts]


def largest_difference(mine: Answers, reference: Answers) -> float:
    """Return how far log-probabilities of the same tokens lie apart; NaN if one is not a number."""
    apart = [0.0]
    for one, other in zip(mine, reference, strict=True):
        for here, there in zip(one, other, strict=True):
            apart += [abs(here[token] - there[token]) for token in here.keys() & there.keys()]
            if next(iter(here)) != next(iter(there)):
                break  # Behind a near tie the texts differ.
    return float(torch.tensor(apart, dtype=torch.float64).max())


def long_prompts(checkpoint: Path, device: str, rounds: int, tokens: int) -> tuple[list[str], bool]:
    """Compare prompts in many steps with and without graphs. Return lines and the verdict."""
    draw = random.Random(7)
    prompts = [draw.choices(range(500), k=tokens) for _ in range(rounds)]
    plain = answers(checkpoint, config(device, cuda_graphs=False), prompts)
    graphs = None if device == "cpu" else True
    apart = largest_difference(
        answers(checkpoint, config(device, cuda_graphs=graphs), prompts), plain
    )
    with patch.object(HostRing, "_wait", lambda self, place: None):
        fault = largest_difference(
            answers(checkpoint, config(device, cuda_graphs=graphs), prompts), plain
        )
    lines = [
        f"- {rounds} prompts of {tokens} tokens, 256 a step: with graphs {apart:.1e} from without",
        f"- the same with the waits for copies left out: {fault:.1e}",
    ]
    return lines, apart < NEAR


def second_engine(checkpoint: Path, device: str) -> tuple[list[str], bool]:
    """Start an engine while another one answers, and compare what both say; then once more with
    captures that any thread's calls void."""
    told, good = _two_engines(checkpoint, device)
    with patch.object(step_tables, "CAPTURE_ERRORS", "global"):
        fault = _two_engines(checkpoint, device)[0]
    return [
        f"- a second engine that starts while the first one answers: {told}",
        f"- the same with captures that any thread's calls void: {fault}",
    ], good


def _two_engines(checkpoint: Path, device: str) -> tuple[str, bool]:
    prompt = random.Random(9).choices(range(500), k=600)
    longer = SamplingParams(max_tokens=1500, temperature=0.0, ignore_eos=True)
    found: dict[str, Any] = {}

    def guarded(name: str, call: Callable[[], Any]) -> None:
        try:
            found[name] = call()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"

    with Pipeline(checkpoint, config(device)) as first:
        expected = first.generate(prompt, longer).token_ids
        busy = threading.Thread(
            target=guarded, args=("first", lambda: first.generate(prompt, longer).token_ids)
        )
        busy.start()

        def start() -> Any:
            with Pipeline(checkpoint, config(device)) as second:
                found["graphs"] = second.engine.config.cuda_graphs
                return second.generate(prompt, longer).token_ids

        guarded("second", start)
        busy.join()
    good = found["first"] == expected and found["second"] == expected
    good &= found.get("graphs") == (device != "cpu")
    return "both answer as one alone" if good else f"wrong: {_short(found)}", good


def _short(found: dict[str, Any]) -> str:
    return ", ".join(f"{name}: {str(value)[:120]}" for name, value in found.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    tiny = given.device == "cpu"
    if not tiny and not torch.cuda.is_available():
        print("No GPU found: nothing was checked. Run this script as it is on a machine with one.")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint(folder, TINY if tiny else MODEL)
        good = True
        for lines, right in (
            long_prompts(checkpoint, given.device, given.rounds, 600 if tiny else 4096),
            second_engine(checkpoint, given.device),
        ):
            print("\n".join(lines), flush=True)
            good &= right
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
