"""Quantised weights on a CPU beside bfloat16 and llama.cpp's, in turns.

    python benchmarks/quantised.py [--peers] [--quantization bfloat16 int8 int4] [--rounds 5]
        [--prompt-tokens 512 4096] [--minutes 20] [--threads 2] [--folder FOLDER]
        [--llama-source FOLDER] [--isa avx2]

A random model of 1.2B weights; llama.cpp gets the same weights through its own converter and
`llama-quantize` (built as `engine_cpu.py` says, with that as a second target). Each of our formats
is a run of its own: it, ours in bfloat16, and llama.cpp's of that width take turns, part by part,
all of them over HTTP with token ids. A ratio is the median over rounds of (their time / our time).
Decode is the time of some tokens less that of one. "same image" asks another question about a
picture that the server has just been asked about.

The bound is what the bytes that a decoded token reads (weights with scales, head, the state twice,
pages) would give against bfloat16. Everything is printed as it is measured; rounds that there is no
time for are left out. The files take 9 GB; with `--folder` they are kept for the next run.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import media_trace
from engine_cases import AGAIN, DECODE, DECODE_PROMPT, PREFILL, Results, Side, Work, work_for
from engine_gguf import ConversionError
from engine_server import Unavailable
from machine import add_isa_argument, describe, run_as
from quantised_sides import PEERS, SPEC, Models, bytes_per_token

IMAGE = "same image, another question"
FIRST = DECODE[1]
GOAL, FIRST_GOAL = 1.1, 1.3
OF_BOUND = {"int8": 0.88, "int4": 0.8}


@dataclass
class QuantisedWork(Work):
    """Prompts of several lengths instead of one; the longest one comes twice."""

    lengths: tuple[int, ...] = ()

    @property
    def tokens(self) -> dict[str, int]:
        lengths = {f"{PREFILL}, {length}": length for length in self.lengths}
        return {row: batch * self.steps for batch, row in DECODE.items()} | lengths

    def parts(self) -> list[Callable[[Side], dict[str, float]]]:
        return [
            *(self._decode_of(batch) for batch in DECODE),
            *(self._prefill_of(length) for length in self.lengths),
        ]

    def _prefill_of(self, length: int) -> Callable[[Side], dict[str, float]]:
        def prefill(side: Side) -> dict[str, float]:
            prompts = [self.prompt(length)]
            seconds = {f"{PREFILL}, {length}": side.complete(prompts, 1)}
            if length == self.prefill:
                seconds[AGAIN] = side.complete(prompts, 1)
            return seconds

        return prefill


class Pictures:
    """Another photograph in every round, each with two questions."""

    def __init__(self) -> None:
        self._round = 0

    def parts(self) -> list[Callable[[Side], dict[str, float]]]:
        trace = media_trace.requests(self._round)
        which = self._round % len(media_trace.PHOTOGRAPHS)
        first, second = trace[which], trace[len(media_trace.PHOTOGRAPHS) + which]
        self._round += 1

        def ask(side: Side) -> dict[str, float]:
            server = side.server  # type: ignore[attr-defined]  # all sides here have one
            server.post("/v1/chat/completions", first)
            return {IMAGE: server.post("/v1/chat/completions", second)[1]}

        return [ask]


def compare(
    kind: str, models: Models, work: Work, arguments: argparse.Namespace, end: float
) -> bool:
    """Measures and prints one format; whether all goals were reached."""
    results, own = Results(), f"ours, {kind}"
    goals = True
    for media, until in ((False, end - 0.15 * (end - time.monotonic())), (True, end)):
        with ExitStack() as stack:
            sides = _sides(kind, models, arguments, stack, tower=media)
            results.measure(
                sides,
                Pictures() if media else work,  # type: ignore[arg-type]  # it has what is used
                arguments.rounds,
                until=until,
                tell=lambda number, name, seconds: _tell(kind, number, name, seconds),
            )
        if not media:
            _print_bytes(kind, results, own)
        rows = [IMAGE] if media else [*work.tokens, AGAIN]
        goals &= _print_table(results, rows, work.tokens, own, list(sides))
    return goals


def _sides(
    kind: str, models: Models, arguments: argparse.Namespace, stack: ExitStack, *, tower: bool
) -> dict[str, Side]:
    sides = {}
    for each in dict.fromkeys((kind, "bfloat16")):
        started = models.own(each, arguments.threads, max(arguments.prompt_tokens))
        sides[f"ours, {each}"] = stack.enter_context(started)
    length = max(arguments.prompt_tokens) + arguments.decode_tokens + 64
    for each in PEERS[kind] if arguments.peers else ():
        try:
            peer = models.peer(each, arguments.threads, length, tower=tower)
            sides[each] = stack.enter_context(peer)
        except (Unavailable, ConversionError) as reason:
            print(f"{each} skipped: {reason}", flush=True)
    return sides


def _tell(kind: str, number: int, name: str, seconds: dict[str, float]) -> None:
    when = "warm-up" if number < 0 else f"round {number + 1}"
    cells = ", ".join(f"{row} {1000 * value:.0f} ms" for row, value in seconds.items())
    print(f"{kind}, {when}, {name}: {cells}", flush=True)


def _print_bytes(kind: str, results: Results, own: str) -> None:
    context = DECODE_PROMPT + 1
    plain, mine = (bytes_per_token(SPEC, each, context) for each in ("bfloat16", kind))
    print(f"\n{kind}: {mine / 1e6:.0f} MB per token, bfloat16 {plain / 1e6:.0f}", end="")
    if kind == "bfloat16":
        print(flush=True)
        return
    bound, ratio = plain / mine, results.ratio(FIRST, own, "ours, bfloat16")
    print(
        f"; bound {bound:.2f}x, {FIRST}: {ratio:.2f}x, {ratio / bound:.2f} of it "
        f"(due {OF_BOUND[kind]})",
        flush=True,
    )


def _print_table(
    results: Results, rows: list[str], tokens: dict[str, int], own: str, sides: list[str]
) -> bool:
    """Prints rows; whether the goals against all others but our own bfloat16 were reached."""
    others, reached = [name for name in sides if name != own], True
    print(f"| | {' | '.join(sides)} | {' | '.join(f'{name}: ratio' for name in others)} |")
    print("|---" * (1 + len(sides) + len(others)) + "|")
    for row in rows:
        cells = []
        for name in sides:
            seconds = results.median(row, name)
            rate = (
                f"{tokens[row] / seconds:.1f} tok/s"
                if row in tokens
                else f"{1000 * seconds:.0f} ms"
            )
            cells.append(rate)
        goal = FIRST_GOAL if row == FIRST else GOAL
        for name in others:
            ratio = results.ratio(row, own, name)
            due = not name.startswith("ours")
            cells.append(f"{ratio:.2f}, {goal}" if due else f"{ratio:.2f}")
            reached &= ratio >= goal or not due
        print(f"| {' | '.join([row, *cells])} |", flush=True)
    return reached


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Quantised weights beside llama.cpp's, in turns.")
    parser.add_argument("--peers", action="store_true", help="measure llama.cpp as well")
    parser.add_argument("--quantization", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt-tokens", nargs="+", type=int, default=[512, 4096])
    parser.add_argument("--decode-tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--minutes", type=float, default=20, help="for everything; rounds are cut to fit (20)"
    )
    parser.add_argument("--folder", type=Path, help="where checkpoint and GGUF files are kept")
    parser.add_argument("--llama-source", help="llama.cpp's source tree, built")
    add_isa_argument(parser)
    return parser.parse_args()


def main() -> int:
    begin, arguments = time.monotonic(), parse()
    run_as(arguments.isa)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    print(describe(arguments.threads), flush=True)
    end, reached = begin + 60 * arguments.minutes, True
    with tempfile.TemporaryDirectory() as temporary:
        models = Models(arguments.folder or Path(temporary), arguments.llama_source)
        lengths = tuple(arguments.prompt_tokens)
        drawn = work_for(models.checkpoint, max(lengths), arguments.decode_tokens)
        work = QuantisedWork(
            drawn.prefill, drawn.steps, drawn.vocabulary, drawn.ending, lengths=lengths
        )
        for index, kind in enumerate(arguments.quantization):
            now = time.monotonic()
            share = (end - now) / (len(arguments.quantization) - index)
            reached &= compare(kind, models, work, arguments, now + share)
    print(f"\n{(time.monotonic() - begin) / 60:.1f} minutes")
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
