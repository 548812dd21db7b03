"""Measures what rows cost a step, on the machine that will make the steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import torch

from vlm_serve.kernels.dispatch import launching_on
from vlm_serve.kernels.metadata import DecodeMeta, PrefillMeta, VerifyMeta
from vlm_serve.models import Model
from vlm_serve.models.batch import ForwardBatch, ForwardOutput
from vlm_serve.models.cache_layout import CacheTensors

_MIN_ROUNDS, _MAX_ROUNDS = 3, 10
_SECONDS = 2.0

Shape = TypeVar("Shape", bound=Hashable)


def measure_rows(
    model: Model, caches: CacheTensors, *, most_sequences: int, most_tokens: int
) -> tuple[list[tuple[int, float]], float]:
    """(rows, seconds) of steps of drafted tokens of as few sequences as have them, and the seconds
    that a sequence more takes beside as many rows: its state is read. The pools must be unused yet.

    Args:
        model: what computes.
        caches: its pools, with room for updates.
        most_sequences: that run at once.
        most_tokens: of a slice of drafts.
    """
    most = min(most_sequences * most_tokens, caches.num_blocks * caches.block_size)
    _clear_rows(caches, most_sequences)
    # The last one is of sequences with one token each.
    apart = min(most_sequences, most_tokens, caches.num_blocks)
    shapes = [*((rows, most_tokens) for rows in sizes(most)), (apart, 1)]
    with launching_on(caches.device):
        runs = {shape: _step(model, caches, *shape) for shape in shapes}
        least = _least(runs, on_cpu=caches.device.type == "cpu")
    points = ascending({rows: least[rows, most_tokens] for rows in sizes(most)})
    together = max(seconds for rows, seconds in points if rows <= apart)
    more = apart - -(-apart // most_tokens)
    return points, max(0.0, least[apart, 1] - together) / more if more else 0.0


def measure_plain(
    forward: Callable[[ForwardBatch], ForwardOutput], caches: CacheTensors, *, most_sequences: int
) -> list[tuple[int, float]]:
    """(sequences, seconds) of steps in which each decodes one token. The pools must be unused yet,
    and have a block for each sequence.

    Args:
        forward: what computes steps, from graphs where it can.
        caches: the pools.
        most_sequences: that run at once.
    """
    most = min(most_sequences, caches.num_blocks)
    _clear_rows(caches, most)

    def make(count: int) -> Callable[[], ForwardOutput]:
        batch = _decodes(count, caches)
        return lambda: forward(batch)

    return _points(most, make, on_cpu=caches.device.type == "cpu")


def measure_passes(
    model: Model, caches: CacheTensors, *, most_sequences: int
) -> list[tuple[int, float]]:
    """(sequences, seconds) of passes of the model's layer for drafts. The pools must be unused yet,
    and have a block for each sequence."""
    with launching_on(caches.device):
        return _points(
            min(most_sequences, caches.num_blocks),
            lambda count: _pass(model, caches, count),
            on_cpu=caches.device.type == "cpu",
        )


def _clear_rows(caches: CacheTensors, count: int) -> None:
    """Zero what the first state rows hold: of state layers, if there are any, and of others."""
    for pool in caches.of_unit("row"):
        pool[:count].zero_()


def _points(
    most: int, make: Callable[[int], Callable[[], ForwardOutput]], *, on_cpu: bool
) -> list[tuple[int, float]]:
    """Times what is made for 1, 2, 3, 4, 6, 8, ... up to `most`."""
    return ascending(_least({size: make(size) for size in sizes(most)}, on_cpu=on_cpu))


def _least(
    runs: Mapping[Shape, Callable[[], ForwardOutput]], *, on_cpu: bool
) -> dict[Shape, float]:
    """The least seconds of each, all of them in every round: what else the machine does for a while
    then does not stand for the cost of one size."""
    least = dict.fromkeys(runs, math.inf)
    begin, rounds = time.perf_counter(), 0
    while rounds < _MIN_ROUNDS or (rounds < _MAX_ROUNDS and time.perf_counter() - begin < _SECONDS):
        for shape, run in runs.items():
            least[shape] = min(least[shape], _seconds(run, on_cpu))
        rounds += 1
    return least


def sizes(most: int) -> list[int]:
    """Powers of two up to `most`, and what lies half-way between them."""
    powers = [2**power for power in range(most.bit_length())]
    halves = [3 * power // 2 for power in powers[1:]]
    return sorted(size for size in (*powers, *halves) if size <= most)


def ascending(least: Mapping[int, float]) -> list[tuple[int, float]]:
    """(size, seconds): less takes no longer than more, and what did has been disturbed."""
    points, bound = list[tuple[int, float]](), math.inf
    for size in sorted(least, reverse=True):
        bound = min(bound, least[size])
        points.append((size, bound))
    return points[::-1]


def _seconds(run: Callable[[], ForwardOutput], on_cpu: bool) -> float:
    """On a CPU of its threads' own time, which does not count what else runs on the machine."""
    clock, threads = (
        (time.process_time, torch.get_num_threads()) if on_cpu else (time.perf_counter, 1)
    )
    begin = clock()
    run().logits.argmax(-1).tolist()
    return (clock() - begin) / threads


def _step(
    model: Model, caches: CacheTensors, rows: int, most_tokens: int
) -> Callable[[], ForwardOutput]:
    batch = _batch(rows, caches, most_tokens).to(caches.device)
    return lambda: model.forward(batch, caches)


def _pass(model: Model, caches: CacheTensors, count: int) -> Callable[[], ForwardOutput]:
    """Each sequence's second token, with one key."""
    own = tuple(range(count))
    batch = ForwardBatch(
        token_ids=torch.zeros(count, dtype=torch.int64),
        positions=torch.zeros(3, count, dtype=torch.int64),
        slots=torch.tensor([block * caches.block_size + 1 for block in own]),
        decode=None,
        prefill=PrefillMeta(
            cu_seqlens=(*own, count),
            starts=(0,) * count,
            block_tables=tuple((block,) for block in own),
            src_rows=(-1,) * count,
            dst_rows=(-1,) * count,
            chunk_ends=tuple((place + 1,) for place in own),
        ),
        media=(),
        logit_rows=torch.arange(count),
    ).to(caches.device)
    before = torch.zeros(count, model.spec.hidden_size, dtype=model.dtype, device=caches.device)
    return lambda: model.draft(batch, before, caches)


def _decodes(count: int, caches: CacheTensors) -> ForwardBatch:
    """Each sequence's first token, in a block of its own."""
    own = tuple(range(count))
    rows = own if caches.num_rows else (-1,) * count
    return ForwardBatch(
        token_ids=torch.zeros(count, dtype=torch.int64),
        positions=torch.zeros(3, count, dtype=torch.int64),
        slots=torch.tensor([block * caches.block_size for block in own]),
        decode=DecodeMeta(
            tuple((block,) for block in own), (1,) * count, rows, rows, (-1,) * count
        ),
        prefill=None,
        media=(),
        logit_rows=torch.arange(count),
    )


def _batch(rows: int, caches: CacheTensors, most_tokens: int) -> ForwardBatch:
    """Tokens 0 at positions 0, 1, ..., as slices of drafts; one alone as a decode token."""
    lengths = [min(most_tokens, rows - first) for first in range(0, rows, most_tokens)]
    size = caches.block_size
    blocks = [-(-length // size) for length in lengths]
    tables, slots, offsets = [], [], [0]
    for index, length in enumerate(lengths):
        first = sum(blocks[:index]) % caches.num_blocks
        table = tuple((first + place) % caches.num_blocks for place in range(blocks[index]))
        tables.append(table)
        slots += [table[at // size] * size + at % size for at in range(length)]
        offsets.append(offsets[-1] + length)
    own = tuple(range(len(lengths))) if caches.num_rows else (-1,) * len(lengths)
    verify = VerifyMeta(
        cu_seqlens=tuple(offsets),
        starts=(0,) * len(lengths),
        block_tables=tuple(tables),
        rows=own,
        updates=tuple(index * most_tokens if caches.num_rows else -1 for index in own),
        folded=(0,) * len(lengths),
    )
    decode = DecodeMeta(tuple(tables), (1,), own, own, (-1,)) if rows == 1 else None
    return ForwardBatch(
        token_ids=torch.zeros(rows, dtype=torch.int64),
        positions=torch.tensor([at for length in lengths for at in range(length)]).expand(3, -1),
        slots=torch.tensor(slots),
        decode=decode,
        prefill=None,
        media=(),
        logit_rows=torch.arange(rows),
        verify=verify if decode is None else None,
    )
