"""Compare quantised weights on a CPU with bfloat16 and llama.cpp's, in turns.

    python benchmarks/quantised.py [--peers] [--quantization bfloat16 int8 int6 int4] [--rounds 5]
        [--rows decode-1 decode-8 prefill image] [--prompt-tokens 512 4096] [--minutes 20]
        [--threads 2] [--folder FOLDER] [--llama-source FOLDER] [--isa avx2]
    python benchmarks/quantised.py --gguf [Q4_K_M Q5_K_M Q6_K Q8_0] [...]

With `--gguf` both servers serve the same files, of `llama-quantize`, one type after the other. On a
machine with much other work `--processor-time --threads 1` counts what they compute.

A random model of 1.2B weights; llama.cpp gets the same weights through its own converter and
`llama-quantize` (built as `engine_cpu.py` says, with that as a second target). Each of our formats
is a run of its own: it and llama.cpp's of that width take turns, row by row and round by round, all
of them over HTTP with token ids; where tokens are decoded, ours in bfloat16 is one of them. A ratio
is the median over rounds of (their time / our time), with the lowest and the highest. Decode is the
time of some tokens less that of one. The longest prompt comes twice. "image" asks another question
about a picture that the server has just been asked about; files have no such row.

The bound is what the bytes that a decoded token reads (weights with scales, head, the state twice,
pages) would give against bfloat16; a plain read of as many bytes takes turns as well, and says what
the memory allows beside every peer. Every row is printed when it is done; rounds that there is no
time for are left out. The files take 9 GB; with `--folder` they are kept for the next run.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from common.engine_cases import DECODE, DECODE_PROMPT, Results, Side, work_for
from common.engine_gguf import ConversionError
from common.engine_server import Unavailable
from common.machine import add_isa_argument, describe, run_as
from common.quantised_rows import PLAIN_READ, ROWS, Row, rows_for
from common.quantised_sides import (
    FILES,
    PEERS,
    SPEC,
    Computing,
    Models,
    PlainRead,
    bytes_per_token,
)

FIRST, CONTEXT = DECODE[1], DECODE_PROMPT + 1
GOAL, FIRST_GOAL = 1.1, 1.3
OF_BOUND = {"int8": 0.88, "int4": 0.8}
FILE_GOAL = 0.8
LLAMA = "llama.cpp"


def compare(
    kind: str, models: Models, rows: list[Row], arguments: argparse.Namespace, end: float
) -> bool:
    """Measures and prints one format; whether all goals were reached."""
    reached, left = True, len(rows)
    for tower in (False, True):
        own = [row for row in rows if row.tower == tower]
        if not own:
            continue
        with ExitStack() as stack:
            plain = any(row.plain for row in own)
            sides = _sides(kind, models, arguments, stack, tower=tower, plain=plain)
            print(f"\n| {kind} | {' | '.join(sides)} |{' ratio |' * (len(sides) - 1)}")
            print("|---" * (2 * len(sides)) + "|", flush=True)
            for row in own:
                until = time.monotonic() + (end - time.monotonic()) / left
                reached &= _measure(kind, row, sides, arguments.rounds, until)
                left -= 1
    return reached


def _sides(
    kind: str,
    models: Models,
    arguments: argparse.Namespace,
    stack: ExitStack,
    *,
    tower: bool,
    plain: bool,
) -> dict[str, Side]:
    if kind in FILES:
        return _sides_of_a_file(kind, models, arguments, stack)
    sides: dict[str, Side] = {}
    for each in dict.fromkeys((kind, "bfloat16") if plain else (kind,)):
        started = models.own(each, arguments.threads, max(arguments.prompt_tokens))
        sides[f"ours, {each}"] = stack.enter_context(started)
    if plain:
        size = bytes_per_token(SPEC, kind, CONTEXT)
        sides[PLAIN_READ] = PlainRead(size, arguments.threads)
    for each in PEERS[kind] if arguments.peers else ():
        try:
            peer = models.peer(each, arguments.threads, _length(arguments), tower=tower)
            sides[each] = stack.enter_context(peer)
        except (Unavailable, ConversionError) as reason:
            print(f"{each} skipped: {reason}", flush=True)
    return sides


def _sides_of_a_file(
    kind: str, models: Models, arguments: argparse.Namespace, stack: ExitStack
) -> dict[str, Side]:
    own = models.own_file(kind, arguments.threads, max(arguments.prompt_tokens))
    peer = models.peer(kind, arguments.threads, _length(arguments), tower=False)
    names, entered = (f"ours, {kind}", LLAMA), [stack.enter_context(each) for each in (own, peer)]
    sides = map(Computing, entered) if arguments.processor_time else entered
    return dict(zip(names, sides, strict=True))


def _length(arguments: argparse.Namespace) -> int:
    """Tokens of the longest conversation."""
    return int(max(arguments.prompt_tokens) + arguments.decode_tokens + 64)


def _measure(kind: str, row: Row, sides: dict[str, Side], rounds: int, until: float) -> bool:
    """One row of the table; whether the goals against all others but ours were reached."""
    results, own = Results(), f"ours, {kind}"
    mine = {name: side for name, side in sides.items() if row.takes(name, own)}
    results.measure(mine, row, rounds, until=until)
    reached, peers = True, (LLAMA,) if kind in FILES else PEERS[kind]
    for name, tokens in row.names.items():
        cells = [
            row.cell(results.median(name, side), tokens) if side in mine else "" for side in sides
        ]
        goal = FILE_GOAL if kind in FILES else FIRST_GOAL if name == FIRST else GOAL
        for other in list(sides)[1:]:
            if other not in mine:
                cells.append("")
                continue
            due = other in peers
            ratio = results.ratio(name, own, other)
            low, high = results.ratio_range(name, own, other)
            cells.append(f"{other}: {ratio:.2f} ({low:.2f}-{high:.2f})" + f", {goal} due" * due)
            reached &= ratio >= goal or not due
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
        if name == FIRST and "ours, bfloat16" in mine:
            _print_bytes(kind, results.ratio(name, own, "ours, bfloat16"))
            for other in set(mine) & set(peers):
                most = results.ratio(name, PLAIN_READ, other)
                print(f"{other}: {most:.2f}x would be a plain read of our bytes", flush=True)
    return reached


def _print_bytes(kind: str, ratio: float) -> None:
    plain, mine = (bytes_per_token(SPEC, each, CONTEXT) for each in ("bfloat16", kind))
    said = f"{kind}: {mine / 1e6:.0f} MB per token, bfloat16 {plain / 1e6:.0f}"
    if kind != "bfloat16":
        bound = plain / mine
        said += f"; bound {bound:.2f}x, {FIRST}: {ratio:.2f}x, {ratio / bound:.2f} of it "
        said += f"(due {OF_BOUND[kind]})" if kind in OF_BOUND else ""
    print(said, flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Quantised weights beside llama.cpp's, in turns.")
    parser.add_argument("--peers", action="store_true", help="measure llama.cpp as well")
    parser.add_argument("--quantization", nargs="+", choices=PEERS, help="all, without --gguf")
    parser.add_argument(
        "--gguf", nargs="*", choices=FILES, help="types of files that both serve (all)"
    )
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="with --gguf and one thread: what the servers compute, on a machine with other work",
    )
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
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
    given = parser.parse_args()
    if given.processor_time and (given.gguf is None or given.threads != 1):
        parser.error("--processor-time needs --gguf and --threads 1")
    files = [] if given.gguf is None else given.gguf or list(FILES)
    given.kinds = [*(given.quantization or ([] if files else PEERS)), *files]
    return given


def main() -> int:
    begin, arguments = time.monotonic(), parse()
    run_as(arguments.isa)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    print(describe(arguments.threads), flush=True)
    end, reached = begin + 60 * arguments.minutes, True
    with tempfile.TemporaryDirectory() as temporary:
        models = Models(arguments.folder or Path(temporary), arguments.llama_source)
        lengths = arguments.prompt_tokens
        work = work_for(models.checkpoint, max(lengths), arguments.decode_tokens)
        rows = rows_for(work, arguments.rows, lengths)
        for index, kind in enumerate(arguments.kinds):
            now = time.monotonic()
            share = (end - now) / (len(arguments.kinds) - index)
            own = [row for row in rows if not row.tower or kind not in FILES]
            try:
                reached &= compare(kind, models, own, arguments, now + share)
            except (Unavailable, ConversionError) as reason:
                print(f"{kind} skipped: {reason}", flush=True)
                reached = False
    print(f"\n{(time.monotonic() - begin) / 60:.1f} minutes")
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
