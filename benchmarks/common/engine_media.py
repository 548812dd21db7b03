"""The part of `engine_cpu.py` about photographs: the same chats to each server in turn."""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack

from common import media_trace
from common.engine_sides import OURS, Peers
from common.media_trace import Outcome


def compare_media(dtype: str, peers: Peers, rounds: int, until: float) -> None:
    """Measures and prints one dtype's table.

    Args:
        rounds: the most there are.
        until: moment of `time.monotonic` by which the last one should have ended.
    """
    outcomes: dict[str, list[Outcome]] = {}
    with ExitStack() as stack:
        sides = peers.media_sides(stack)
        names, longest, done = list(sides), 0.0, 0
        for number in range(-1, rounds if sides else -1):
            begin = time.monotonic()
            if number > 0 and begin + longest > until:
                break
            trace = media_trace.requests(number)
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                outcome = media_trace.replay(sides[name], trace, time.perf_counter)
                when = "warm-up" if number < 0 else f"round {number + 1}"
                print(f"{dtype}, photographs, {when}, {name}: {_told(outcome)}", flush=True)
                if number >= 0:
                    outcomes.setdefault(name, []).append(outcome)
            done, longest = number + 1, max(longest, time.monotonic() - begin)
    if outcomes:
        _print_table(dtype, outcomes, done, rounds)


def _told(outcome: Outcome) -> str:
    return f"{outcome.seconds:.2f} s, {outcome.cached} of {outcome.prompt} prompt tokens cached"


def _print_table(dtype: str, outcomes: dict[str, list[Outcome]], done: int, rounds: int) -> None:
    chats = len(media_trace.PHOTOGRAPHS) * len(media_trace.QUESTIONS)
    print(
        f"\n{chats} chats about {len(media_trace.PHOTOGRAPHS)} photographs, "
        f"{media_trace.CLIENTS} clients: {done} of {rounds} rounds"
        f"{', cut for time' if done < rounds else ''}\n"
        f"| {dtype} | seconds | prompt tokens from the cache | their time / ours |\n"
        "|---|---|---|---|"
    )
    for name, own in outcomes.items():
        pairs = zip(own, outcomes[OURS], strict=True)
        ratio = statistics.median(other.seconds / mine.seconds for other, mine in pairs)
        seconds = statistics.median(outcome.seconds for outcome in own)
        cached = f"{own[-1].cached} of {own[-1].prompt}"
        print(f"| {name} | {seconds:.2f} | {cached} | {ratio:.2f} |", flush=True)
