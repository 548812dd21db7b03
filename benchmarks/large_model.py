"""Ask servers of a 4B model on a CPU about a photograph, twice; ours beside llama.cpp's.

    python benchmarks/large_model.py [--peers] [--kinds bfloat16 int8 int4] [--rounds 2]
        [--threads 2] [--folder FOLDER] [--llama-source FOLDER]

Random weights of the shape of Qwen3.5-4B (8.8 GB in bfloat16). Servers run one after the other,
since two do not fit into memory together: ours in bfloat16 and quantised while it loads, and
llama.cpp on the same weights through its own converter and `llama-quantize` (built as
`quantised.py` says). Of each: seconds from its start until it is healthy, the most memory meanwhile
(anonymous and shared, and with the files that it maps), and medians over rounds of prefill (512
tokens) and decode (batch 1) in tokens a second and of the time to the first token of two questions
about one photograph, another one in every round. The files take 26 GB; with `--folder` they are
kept for the next run.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import tempfile
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

from common import media_trace
from common.engine_cases import DECODE_PROMPT, Side, Work, work_for
from common.engine_gguf import ConversionError
from common.engine_server import Server, Unavailable
from common.machine import describe
from common.quantised_sides import PEERS, SPEC, Models

MODEL = replace(
    SPEC,
    hidden_size=2560,
    num_layers=32,
    intermediate_size=9216,
    vocab_size=248320,
    gdn_key_heads=16,
    gdn_value_heads=32,
    attention_heads=16,
    kv_heads=4,
    vision_depth=24,
    vision_hidden_size=1024,
    vision_heads=16,
    vision_intermediate_size=4096,
    rope_theta=1e7,
    tied_embeddings=True,
    shards=4,
)
PROMPT, ANSWER = 512, 16

LOAD, OWN, ALL = "start until healthy, s", "peak memory, GB", "with mapped files, GB"
PREFILL, DECODE = f"prefill of {PROMPT}, tok/s", "decode, tok/s"
FIRST, SECOND = "photograph, first token, s", "another question about it, s"


@dataclass
class Row:
    """What one server took."""

    figures: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        self.figures.setdefault(name, []).append(value)
        print(f"    {name}: {value:.2f}", flush=True)

    def told(self) -> list[str]:
        names = (LOAD, OWN, ALL, PREFILL, DECODE, FIRST, SECOND)
        return [f"{statistics.median(self.figures[name]):.2f}" for name in names]


def measure(start: AbstractContextManager[Side], work: Work, rounds: int) -> Row:
    """Starts a server, asks it and ends it. Raises Unavailable."""
    row, begin = Row(), time.monotonic()
    with start as side:
        row.add(LOAD, time.monotonic() - begin)
        server = side.server  # type: ignore[attr-defined]  # all sides here have one
        side.complete([work.prompt(DECODE_PROMPT)], 2)
        for number in range(rounds):
            _ask(row, side, server, work, number)
        row.add(OWN, server.memory.own / 1e9)
        row.add(ALL, server.memory.all / 1e9)
    return row


def _ask(row: Row, side: Side, server: Server, work: Work, number: int) -> None:
    row.add(PREFILL, PROMPT / side.complete([work.prompt(PROMPT)], 1))
    one, many = (side.complete([work.prompt(DECODE_PROMPT)], count) for count in (1, ANSWER + 1))
    row.add(DECODE, ANSWER / (many - one))
    trace, which = media_trace.requests(number), number % len(media_trace.PHOTOGRAPHS)
    for name, index in ((FIRST, which), (SECOND, len(media_trace.PHOTOGRAPHS) + which)):
        body = trace[index] | {"max_tokens": 1}
        row.add(name, server.post("/v1/chat/completions", body)[1])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A 4B model on a CPU, beside llama.cpp.")
    parser.add_argument("--peers", action="store_true", help="measure llama.cpp as well")
    parser.add_argument("--kinds", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where checkpoint and GGUF files are kept")
    parser.add_argument("--llama-source", help="llama.cpp's source tree, built")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    print(describe(arguments.threads), flush=True)
    rows: dict[str, Row] = {}
    with tempfile.TemporaryDirectory() as temporary:
        models = Models(arguments.folder or Path(temporary), arguments.llama_source, MODEL)
        work = work_for(models.checkpoint, PROMPT, ANSWER)
        for kind in arguments.kinds:
            started = models.own(kind, arguments.threads, PROMPT)
            rows[f"ours, {kind}"] = measure(started, work, arguments.rounds)
            for peer in PEERS[kind] if arguments.peers else ():
                try:
                    models.prepare(peer)
                    started = models.peer(peer, arguments.threads, 2 * PROMPT, tower=True)
                    rows[peer] = measure(started, work, arguments.rounds)
                except (Unavailable, ConversionError) as reason:
                    print(f"{peer} skipped: {reason}", flush=True)
    print(f"| | {' | '.join((LOAD, OWN, ALL, PREFILL, DECODE, FIRST, SECOND))} |")
    print("|---" * 8 + "|")
    for name, row in rows.items():
        print(f"| {' | '.join([name, *row.told()])} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
