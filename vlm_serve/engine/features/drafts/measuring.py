"""Measures the cost of rows in a step, on the machine that will run the steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import torch

from vlm_serve.kernels.metadata import DecodeMeta, PrefillMeta, VerifyMeta
from vlm_serve.models.batch import ForwardBatch, ForwardOutput
from vlm_serve.models.cache_layout import CacheTensors

_MIN_ROUNDS, _MAX_ROUNDS = 3, 10
_SECONDS = 2.0

Forward = Callable[[ForwardBatch], ForwardOutput]
Draft = Callable[[ForwardBatch, torch.Tensor], ForwardOutput]
Shape = TypeVar("Shape", bound=Hashable)


def measure_rows(
    forward: Forward, caches: CacheTensors, *, most_sequences: int, most_tokens: int
) -> tuple[list[tuple[int, float]], float]:
    """Measure steps of draft slices, with as few sequences as possible for each number of rows.
    Return (rows, seconds) and the seconds that an additional sequence costs at the same number of
    rows, since its state is read. The pools must be unused.

    Args:
        forward: runs a step, from graphs where possible.
        caches: the pools, with space for updates.
        most_sequences: maximum number of running sequences.
        most_tokens: maximum number of tokens in a draft slice.
    """
    most = min(most_sequences * most_tokens, caches.num_blocks * caches.block_size)
    _clear_rows(caches, most_sequences)
    # The last shape has one token per sequence.
    apart = min(most_sequences, most_tokens, caches.num_blocks)
    shapes = [*((rows, most_tokens) for rows in sizes(most)), (apart, 1)]
    runs = {shape: _step(forward, caches, *shape) for shape in shapes}
    least = _least(runs, on_cpu=caches.device.type == "cpu")
    points = ascending({rows: least[rows, most_tokens] for rows in sizes(most)})
    together = max(seconds for rows, seconds in points if rows <= apart)
    more = apart - -(-apart // most_tokens)
    return points, max(0.0, least[apart, 1] - together) / more if more else 0.0


def measure_plain(
    forward: Forward, caches: CacheTensors, *, most_sequences: int
) -> list[tuple[int, float]]:
    """Measure steps in which each sequence decodes one token; return (sequences, seconds). The
    pools must be unused and have a block for each sequence.

    Args:
        forward: runs a step, from graphs where possible.
        caches: the pools.
        most_sequences: maximum number of running sequences.
    """
    most = min(most_sequences, caches.num_blocks)
    _clear_rows(caches, most)

    def make(count: int) -> Callable[[], ForwardOutput]:
        batch = _decodes(count, caches)
        return lambda: forward(batch)

    return _points(most, make, on_cpu=caches.device.type == "cpu")


def measure_passes(
    draft: Draft,
    caches: CacheTensors,
    hidden_size: int,
    dtype: torch.dtype,
    *,
    most_sequences: int,
) -> list[tuple[int, float]]:
    """Measure passes of the MTP layer; return (sequences, seconds). The pools must be unused and
    have a block for each sequence.

    Args:
        draft: runs a pass, see `Model.draft`, from graphs where possible.
        caches: the pools.
        hidden_size, dtype: of hidden states.
        most_sequences: maximum number of running sequences.
    """
    before = torch.zeros(most_sequences, hidden_size, dtype=dtype, device=caches.device)
    return _points(
        min(most_sequences, caches.num_blocks),
        lambda count: _pass(draft, caches, before[:count]),
        on_cpu=caches.device.type == "cpu",
    )


def _clear_rows(caches: CacheTensors, count: int) -> None:
    """Zero the first `count` rows of all row pools."""
    for pool in caches.of_unit("row"):
        pool[:count].zero_()


def _points(
    most: int, make: Callable[[int], Callable[[], ForwardOutput]], *, on_cpu: bool
) -> list[tuple[int, float]]:
    """Measure the runs made for 1, 2, 3, 4, 6, 8, ... up to `most`."""
    return ascending(_least({size: make(size) for size in sizes(most)}, on_cpu=on_cpu))


def _least(
    runs: Mapping[Shape, Callable[[], ForwardOutput]], *, on_cpu: bool
) -> dict[Shape, float]:
    """Return the minimum duration of each run, in seconds. Every round times all runs, so that a
    temporary load on the machine does not distort a single size."""
    least = dict.fromkeys(runs, math.inf)
    begin, rounds = time.perf_counter(), 0
    while rounds < _MIN_ROUNDS or (rounds < _MAX_ROUNDS and time.perf_counter() - begin < _SECONDS):
        for shape, run in runs.items():
            least[shape] = min(least[shape], _seconds(run, on_cpu))
        rounds += 1
    return least


def sizes(most: int) -> list[int]:
    """Return the powers of two up to `most` and the midpoints between them, ascending."""
    powers = [2**power for power in range(most.bit_length())]
    halves = [3 * power // 2 for power in powers[1:]]
    return sorted(size for size in (*powers, *halves) if size <= most)


def ascending(least: Mapping[int, float]) -> list[tuple[int, float]]:
    """Return (size, seconds) with non-decreasing durations. A smaller size that took longer was
    disturbed: it gets the duration of the larger one."""
    points, bound = list[tuple[int, float]](), math.inf
    for size in sorted(least, reverse=True):
        bound = min(bound, least[size])
        points.append((size, bound))
    return points[::-1]


def _seconds(run: Callable[[], ForwardOutput], on_cpu: bool) -> float:
    """Time one run. On a CPU, measure the processor time of this process per thread, so that other
    processes do not count."""
    clock, threads = (
        (time.process_time, torch.get_num_threads()) if on_cpu else (time.perf_counter, 1)
    )
    begin = clock()
    run().logits.argmax(-1).tolist()
    return (clock() - begin) / threads


def _step(
    forward: Forward, caches: CacheTensors, rows: int, most_tokens: int
) -> Callable[[], ForwardOutput]:
    batch = _batch(rows, caches, most_tokens)
    return lambda: forward(batch)


def _pass(draft: Draft, caches: CacheTensors, before: torch.Tensor) -> Callable[[], ForwardOutput]:
    """Return a run over the second token of each sequence, with one key."""
    count = len(before)
    indices = tuple(range(count))
    batch = ForwardBatch(
        token_ids=torch.zeros(count, dtype=torch.int64),
        positions=torch.zeros(3, count, dtype=torch.int64),
        slots=torch.tensor([block * caches.block_size + 1 for block in indices]),
        prefill=PrefillMeta(
            cu_seqlens=(*indices, count),
            starts=(0,) * count,
            block_tables=tuple((block,) for block in indices),
            src_rows=(-1,) * count,
            dst_rows=(-1,) * count,
            chunk_ends=tuple((place + 1,) for place in indices),
        ),
        logit_rows=torch.arange(count),
    )
    return lambda: draft(batch, before)


def _decodes(count: int, caches: CacheTensors) -> ForwardBatch:
    """Build a batch with the first token of each sequence, in a block of its own."""
    indices = tuple(range(count))
    rows = indices if caches.num_rows else (-1,) * count
    return ForwardBatch(
        token_ids=torch.zeros(count, dtype=torch.int64),
        positions=torch.zeros(3, count, dtype=torch.int64),
        slots=torch.tensor([block * caches.block_size for block in indices]),
        decode=DecodeMeta(
            tuple((block,) for block in indices), (1,) * count, rows, rows, (-1,) * count
        ),
        logit_rows=torch.arange(count),
    )


def _batch(rows: int, caches: CacheTensors, most_tokens: int) -> ForwardBatch:
    """Build a batch of tokens 0 at positions 0, 1, ..., as draft slices. A single row is a decode
    token."""
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
    state_rows = tuple(range(len(lengths))) if caches.num_rows else (-1,) * len(lengths)
    verify = VerifyMeta(
        cu_seqlens=tuple(offsets),
        starts=(0,) * len(lengths),
        block_tables=tuple(tables),
        rows=state_rows,
        updates=tuple(index * most_tokens if caches.num_rows else -1 for index in state_rows),
        folded=(0,) * len(lengths),
    )
    decode = DecodeMeta(tuple(tables), (1,), state_rows, state_rows, (-1,)) if rows == 1 else None
    return ForwardBatch(
        token_ids=torch.zeros(rows, dtype=torch.int64),
        positions=torch.tensor([at for length in lengths for at in range(length)]).expand(3, -1),
        slots=torch.tensor(slots),
        decode=decode,
        logit_rows=torch.arange(rows),
        verify=verify if decode is None else None,
    )
