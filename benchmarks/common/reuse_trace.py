"""Traces of hashed blocks as requests, and a made one of the same shape.

A line of a trace is one request: `input_length` in tokens, and `hash_ids`, a number for each block
of 512 of them; equal numbers are equal blocks behind equal prefixes. That is the form of the public
traces of kvcache-ai/Mooncake (FAST25-release/traces).

A prompt is its whole blocks, and one token of its own: the trace does not say how a part of a block
goes on, so nobody could follow behind it. The answers are three fixed tokens.
"""

from __future__ import annotations

import gzip
import itertools
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from benchmarks.common.reuse_workloads import VOCABULARY, Asked, Message

TRACE_BLOCK = 512
ANSWER = (20, 21, 22)
_FIRST = 16
"""Tokens below have a meaning in templates."""


@dataclass(frozen=True)
class TraceRequest:
    """One line of a trace."""

    input_length: int
    hash_ids: tuple[int, ...]

    @property
    def whole_blocks(self) -> tuple[int, ...]:
        return self.hash_ids[: self.input_length // TRACE_BLOCK]


def read_trace(path: Path, most: int | None = None, skip: int = 0) -> list[TraceRequest]:
    """Return the requests of a file of JSON lines, compressed (.gz) or not.

    Args:
        most: number of requests; None: all.
        skip: number of requests to leave out at the beginning.

    Raises:
        ValueError: a line is no request; the message names it.
    """
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        chosen = islice(enumerate(lines, 1), skip, None if most is None else skip + most)
        return [_request(line, f"{path}:{number}") for number, line in chosen]


def _request(line: str, where: str) -> TraceRequest:
    try:
        row = json.loads(line)
        request = TraceRequest(int(row["input_length"]), tuple(map(int, row["hash_ids"])))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{where}: no request with input_length and hash_ids: {error}") from None
    if len(request.hash_ids) != -(-request.input_length // TRACE_BLOCK):
        raise ValueError(
            f"{where}: {len(request.hash_ids)} blocks of {request.input_length} tokens"
        )
    return request


def asked_of(trace: Iterable[TraceRequest], block: int = TRACE_BLOCK) -> list[Asked]:
    """Return a trace's requests with tokens.

    Args:
        block: tokens that stand for one block of the trace, a multiple of the cache's block size.
    """
    texts: dict[int, tuple[int, ...]] = {}
    asked = []
    for number, request in enumerate(trace):
        for each in request.whole_blocks:
            if each not in texts:
                texts[each] = _tokens(f"block {each}", block)
        own = _tokens(f"request {number}", 1)
        parts = (*(texts[each] for each in request.whole_blocks), own)
        asked.append(Asked((Message(0, parts),), ANSWER))
    return asked


def _tokens(name: str, count: int) -> tuple[int, ...]:
    return tuple(random.Random(name).choices(range(_FIRST, VOCABULARY), k=count))


def made_trace(count: int, seed: int) -> list[TraceRequest]:
    """Return a made trace with the shape of the first 3 000 requests of Mooncake's conversation
    trace, as they were counted there, with less time between turns.

    All prompts share their first block. 68 % share no more; of these, the deciles of the length are
    1, 2, 4, 9, 12, 17, 24, 34 and 54 blocks. 85 % of the others follow on an earlier prompt's
    whole blocks, the rest part inside of one. What they add has the deciles 0, 0, 1, 1, 1, 2, 4, 10
    and 21 blocks. There, 325 requests lie between two turns by the median; here it is 20, so that
    300 requests have turns at all.
    """
    rng = random.Random(f"trace {seed}")
    fresh = itertools.count()
    first = next(fresh)
    past: list[tuple[int, ...]] = []
    trace = []
    for _ in range(count):
        if past and rng.random() < 0.32:
            before = past[-min(len(past), max(1, round(20 * rng.lognormvariate(0.0, 1.0))))]
            if rng.random() < 0.15:
                before = before[: rng.randint(1, len(before))]
            added = _decile(rng, (0, 0, 0, 1, 1, 1, 2, 4, 10, 21))
        else:
            before, added = (first,), _decile(rng, (1, 1, 2, 4, 9, 12, 17, 24, 34, 54)) - 1
        blocks = (*before, *islice(fresh, added))
        past.append(blocks)
        rest = rng.randrange(1, TRACE_BLOCK)
        trace.append(TraceRequest(len(blocks) * TRACE_BLOCK + rest, (*blocks, next(fresh))))
    return trace


def _decile(rng: random.Random, values: tuple[int, ...]) -> int:
    """Return a length, equally likely from each tenth of a distribution, by its lower ends."""
    place = rng.randrange(len(values))
    above = values[min(place + 1, len(values) - 1)]
    return rng.randint(values[place], above)
