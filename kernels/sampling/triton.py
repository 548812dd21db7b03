"""Sampling on a GPU: two to four launches for any mix of rows, and no copy of the logits.

1. `_look`: the maximum of each part of a row, and what soundness and log-probabilities need.
2. `_weigh`: of rows with top_k, how many logits lie in each of many equal intervals below the
   maximum, its bins; of others, the sum of the weights.
3. `_share`: of rows without top_k, the units of probability in each bin.
4. `_draw`: a program for each row finds the bins in which something is decided, lists their members
   and ranks these among themselves, all pairs of them.

A row with more members than the list holds (many equal logits, or a large top_k) is searched by
bisection over the order of its tokens instead.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from vlm_serve.kernels.sampling.reference import Found, Rows
from vlm_serve.kernels.triton_support import launch, power_of_two

TILE = tl.constexpr(4096)
"""Logits that a program looks at together."""
BINS = tl.constexpr(8192)
LISTED = tl.constexpr(1024)
"""Members of bins that are ranked among themselves."""
_PART = tl.constexpr(1024)
"""Bins that are summed together."""
_AT_ONCE = tl.constexpr(8)
"""Members that all others are compared with together."""
_NAMED = tl.constexpr(32)
"""Named tokens that are told together."""
_WARPS = 8

_PROMPT = tl.constexpr(1 << 30)
_UNSOUND = tl.constexpr(-1)
_NUMBERS = tl.constexpr(8)
_MARKS = tl.constexpr(12)
_WEIGHT_UNITS = tl.constexpr(2.0**40)
_UNITS = tl.constexpr(2.0**52)
_UNIT = tl.constexpr(2.0**-52)
_LAST = tl.constexpr(-(1 << 62))
"""Behind all places in the order of a row."""
_COUNTED, _KEPT, _BELOW = (tl.constexpr(mode) for mode in range(3))
_INFINITE = tl.constexpr(float("inf"))

# What differs between steps: specialising on it would recompile while serving.
_SIZES = ["stride", "vocab", "num_parts", "num_own", "most"]


class Work(NamedTuple):
    """Memory of the launches of a step, of R rows in P parts.

    Attributes:
        tops: float32 `[R, 5, P]`: maximum of the masked logits, minimum of the finite ones, NaN or
            infinity if a row has that before its mask, maximum of the model's own and the sum of
            their exponentials.
        places: int32 `[R, P]`, where the masked maximum is.
        totals: int64 `[R, P]`, sums of weights.
        bins: int64 `[R, BINS]`.
        scaled, tokens, units: float32, int32 and int64 `[R, LISTED]`: members of bins.
    """

    tops: torch.Tensor
    places: torch.Tensor
    totals: torch.Tensor
    bins: torch.Tensor
    scaled: torch.Tensor
    tokens: torch.Tensor
    units: torch.Tensor


@triton.jit
def _newest(rows, row):
    """Return the token to be counted beside the counts, or -1."""
    token = tl.load(rows.marks + row * _MARKS + 4)
    if token == -2:
        token = tl.load(rows.before + row).to(tl.int32)
    return token


@triton.jit
def _biased(rows, logits, ids, first, end):
    """Add the biases `[first, end)` to logits, each found by bisection."""
    low = tl.zeros(ids.shape, tl.int32) + first
    size = end - first
    high = low + size
    while size > 0:
        middle = (low + high) // 2
        at = tl.load(rows.bias_ids + middle, mask=middle < end, other=0x7FFFFFFF)
        below = (at < ids) & (low < high)
        high = tl.where(below, high, middle)
        low = tl.where(below, middle + 1, low)
        size = size // 2
    is_biased = tl.load(rows.bias_ids + low, mask=low < end, other=-1) == ids
    return logits + tl.load(rows.bias_values + low, mask=is_biased, other=0.0)


@triton.jit
def _logits_of(of, row, ids):
    """Return the model's own logits of a row, the changed ones, and these behind its mask."""
    logits, rows, counts, stride, vocab = of
    marks = rows.marks + row * _MARKS
    numbers = rows.numbers + row * _NUMBERS
    inside = ids < vocab
    line = tl.load(marks).to(tl.int64)
    own = tl.load(logits + line * stride + ids, mask=inside, other=-_INFINITE)
    changed = own
    if tl.load(marks + 9) != 0:
        if tl.load(marks + 7) > tl.load(marks + 6):
            changed = _biased(rows, changed, ids, tl.load(marks + 6), tl.load(marks + 7))
        slot = tl.load(marks + 3).to(tl.int64)
        if slot >= 0:
            seen = tl.load(counts + slot * vocab + ids, mask=inside, other=0)
            seen += (ids == _newest(rows, row)).to(tl.int32)
            factor = tl.where(seen > 0, tl.load(numbers + 4).to(tl.float32), 1.0)
            changed = tl.where(changed > 0, tl.math.div_rn(changed, factor), changed * factor)
            times = seen & (_PROMPT - 1)
            weight = tl.load(numbers + 5) + tl.load(numbers + 6) * times.to(tl.float64)
            changed -= tl.where(times > 0, weight, 0.0).to(tl.float32)
    masked = changed
    mask = tl.load(marks + 5).to(tl.int64)
    if mask >= 0:
        bits = tl.load(rows.masks + mask * ((vocab + 7) // 8) + (ids >> 3), mask=inside, other=0)
        masked = tl.where(((bits.to(tl.int32) >> (ids & 7)) & 1) != 0, changed, -_INFINITE)
    return own, changed, masked


@triton.jit(do_not_specialize=_SIZES)
def _look_kernel(logits, rows, counts, work, stride, vocab, PARTS: tl.constexpr):
    row = tl.program_id(0)
    part = tl.program_id(1)
    ids = part * TILE + tl.arange(0, TILE)
    own, changed, masked = _logits_of((logits, rows, counts, stride, vocab), row, ids)
    tops = work.tops + row.to(tl.int64) * (5 * PARTS) + part
    best = tl.max(masked, axis=0)
    tl.store(tops, best)
    tl.store(work.places + row * PARTS + part, tl.min(tl.where(masked == best, ids, vocab), axis=0))
    finite = tl.where(masked == -_INFINITE, _INFINITE, masked)
    tl.store(tops + PARTS, tl.min(finite, axis=0))
    tl.store(tops + 2 * PARTS, tl.max(tl.where(changed != changed, _INFINITE, changed), axis=0))
    highest = tl.max(own, axis=0)
    above = tl.where(highest == -_INFINITE, 0.0, highest)
    tl.store(tops + 3 * PARTS, highest)
    tl.store(tops + 4 * PARTS, tl.sum(tl.exp(own - above), axis=0))
    for first in range(part * _PART, BINS, tl.num_programs(1) * _PART):
        bins = work.bins + row.to(tl.int64) * BINS + first + tl.arange(0, _PART)
        tl.store(bins, tl.zeros((_PART,), tl.int64))


@triton.jit
def _tops(work, row, which, other, num_parts, PARTS: tl.constexpr):
    lanes = tl.arange(0, PARTS)
    tops = work.tops + row.to(tl.int64) * (5 * PARTS) + which * PARTS + lanes
    return tl.load(tops, mask=lanes < num_parts, other=other)


@triton.jit
def _scale_of(rows, work, row, num_parts, PARTS: tl.constexpr):
    """Return a row's temperature, its scaled maximum and the bins of a unit below that."""
    temperature = tl.load(rows.numbers + row * _NUMBERS).to(tl.float32)
    top = tl.max(_tops(work, row, 0, -_INFINITE, num_parts, PARTS), axis=0)
    least = tl.min(_tops(work, row, 1, _INFINITE, num_parts, PARTS), axis=0)
    top = tl.math.div_rn(top, temperature)
    # They cover 256 of the unscaled logits at most.
    width = tl.minimum(top - tl.math.div_rn(least, temperature), 256.0 / temperature)
    return temperature, top, (BINS - 1) / tl.maximum(width, 1e-30)


@triton.jit
def _scaled_of(of, row, ids, scale):
    """Return scaled logits behind the mask, and their bins: a monotone function of them."""
    temperature, top, factor = scale
    scaled = tl.math.div_rn(_logits_of(of, row, ids)[2], temperature)
    place = tl.minimum((top - scaled) * factor, (BINS - 1) * 1.0).to(tl.int32)
    return scaled, tl.minimum(tl.maximum(place, 0), BINS - 1)  # A row with NaN has no order.


@triton.jit
def _weights_of(scaled, top):
    """Return the weight of scaled logits, and its units."""
    weight = tl.exp(scaled.to(tl.float64) - top.to(tl.float64))
    return weight, (weight * _WEIGHT_UNITS).to(tl.int64)


@triton.jit
def _units_of(scaled, top, total):
    """Return the probability of scaled logits, and its units."""
    share = _weights_of(scaled, top)[0] / total
    return share, (share * _UNITS).to(tl.int64)


@triton.jit(do_not_specialize=_SIZES)
def _weigh_kernel(logits, rows, counts, work, stride, vocab, num_parts, PARTS: tl.constexpr):
    row = tl.program_id(0)
    part = tl.program_id(1)
    if tl.load(rows.marks + row * _MARKS + 1) != 0:
        top_k = tl.load(rows.marks + row * _MARKS + 2)
        ids = part * TILE + tl.arange(0, TILE)
        scale = _scale_of(rows, work, row, num_parts, PARTS)
        scaled, places = _scaled_of((logits, rows, counts, stride, vocab), row, ids, scale)
        if (top_k > 0) & (top_k < vocab):
            # Of P parts the k-th largest maximum is a floor: k logits are at least as large.
            bests = _tops(work, row, 0, -_INFINITE, num_parts, PARTS)
            ahead = tl.sum((bests[None, :] > bests[:, None]).to(tl.int32), axis=1)
            floor = tl.min(tl.where(ahead < top_k, bests, _INFINITE), axis=0)
            floor = tl.where(top_k > num_parts, -_INFINITE, floor)
            wanted = (scaled > -_INFINITE) & (scaled >= tl.math.div_rn(floor, scale[0]))
            if tl.max(wanted.to(tl.int32), axis=0) > 0:
                ones = tl.full(ids.shape, 1, tl.int64)
                bins = work.bins + row.to(tl.int64) * BINS + places
                tl.atomic_add(bins, ones, mask=wanted, sem="relaxed")
        else:
            total = tl.sum(_weights_of(scaled, scale[1])[1], axis=0)
            tl.store(work.totals + row * PARTS + part, total)


@triton.jit
def _total_of(work, row, num_parts, PARTS: tl.constexpr):
    """Return the sum of the weights of a row without top_k."""
    lanes = tl.arange(0, PARTS)
    parts = tl.load(work.totals + row * PARTS + lanes, mask=lanes < num_parts, other=0)
    return tl.sum(parts, axis=0).to(tl.float64) / _WEIGHT_UNITS


@triton.jit(do_not_specialize=_SIZES)
def _share_kernel(logits, rows, counts, work, stride, vocab, num_parts, PARTS: tl.constexpr):
    row = tl.program_id(0)
    top_k = tl.load(rows.marks + row * _MARKS + 2)
    is_drawn = tl.load(rows.marks + row * _MARKS + 1) == 1
    if is_drawn & ((top_k <= 0) | (top_k >= vocab)):
        ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
        scale = _scale_of(rows, work, row, num_parts, PARTS)
        scaled, places = _scaled_of((logits, rows, counts, stride, vocab), row, ids, scale)
        units = _units_of(scaled, scale[1], _total_of(work, row, num_parts, PARTS))[1]
        bins = work.bins + row.to(tl.int64) * BINS + places
        tl.atomic_add(bins, units, mask=units > 0, sem="relaxed")


@triton.jit
def _bins_below(work, row, least, STRICT: tl.constexpr):
    """Find the first bin up to which the sum reaches a float64, or with `STRICT` exceeds it.

    Returns:
        its number, `BINS` if there is none; the sum of those before it.
    """
    count = tl.full((), 0, tl.int32)
    before = tl.full((), 0, tl.int64)
    carried = tl.full((), 0, tl.int64)
    for first in range(0, BINS, _PART):
        bins = work.bins + row.to(tl.int64) * BINS + first + tl.arange(0, _PART)
        sums = tl.cumsum(tl.load(bins, cache_modifier=".cg"), axis=0) + carried
        wide = sums.to(tl.float64)
        short = wide <= least if STRICT else wide < least
        count += tl.sum(short.to(tl.int32), axis=0)
        before = tl.maximum(before, tl.max(tl.where(short, sums, 0), axis=0))
        carried = tl.max(sums, axis=0)
    return count, before


@triton.jit
def _sum_before(work, row, end):
    """Return the sum of the bins before one."""
    total = tl.full((), 0, tl.int64)
    for first in range(0, BINS, _PART):
        index = first + tl.arange(0, _PART)
        bins = tl.load(work.bins + row.to(tl.int64) * BINS + index, cache_modifier=".cg")
        total += tl.sum(tl.where(index < end, bins, 0), axis=0)
    return total


@triton.jit
def _order(scaled, ids):
    """Return each token's place in the order of a row, larger for those that come first."""
    bits = tl.where(scaled == 0.0, 0.0, scaled).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return key.to(tl.int64) * (1 << 31) + (0x7FFFFFFF - ids.to(tl.int64))


@triton.jit
def _gather(of, work, row, scale, first_bin, last_bin, floor):
    """List the members of some bins that come not behind `floor` in the order; return their number,
    which may be more than the list holds."""
    count = tl.full((), 0, tl.int32)
    place = row.to(tl.int64) * LISTED
    tl.debug_barrier()
    for first in range(0, of[4], TILE):
        ids = first + tl.arange(0, TILE)
        scaled, bins = _scaled_of(of, row, ids, scale)
        member = (scaled > -_INFINITE) & (bins >= first_bin) & (bins <= last_bin)
        member = (member & (_order(scaled, ids) >= floor)).to(tl.int32)
        found = tl.sum(member, axis=0)
        if (found > 0) & (count < LISTED):
            index = count + tl.cumsum(member, axis=0) - 1
            kept = (member > 0) & (index < LISTED)
            tl.store(work.scaled + place + index, scaled, mask=kept)
            tl.store(work.tokens + place + index, ids, mask=kept)
        count += found
    tl.debug_barrier()
    return count


@triton.jit
def _listed(work, row, index, count):
    """Return some listed members: values, ids and orders."""
    place = row.to(tl.int64) * LISTED + index
    scaled = tl.load(work.scaled + place, mask=index < count, other=-_INFINITE)
    ids = tl.load(work.tokens + place, mask=index < count, other=0)
    return scaled, ids, _order(scaled, ids)


@triton.jit
def _running(work, row, count, UNITS: tl.constexpr):
    """Return for each listed member the units of all that come up to it in the order; or how many
    these are."""
    orders = _listed(work, row, tl.arange(0, LISTED), count)[2]
    sums = tl.zeros((LISTED,), tl.int64)
    for first in range(0, count, _AT_ONCE):
        index = first + tl.arange(0, _AT_ONCE)
        each = (index < count).to(tl.int64)
        if UNITS:
            units = work.units + row.to(tl.int64) * LISTED + index
            each = tl.load(units, mask=index < count, other=0)
        before = _listed(work, row, index, count)[2][None, :] >= orders[:, None]
        sums += tl.sum(tl.where(before, each[None, :], 0), axis=1)
    return sums


@triton.jit
def _kept(units, share, total, top_p, min_p):
    """Return which tokens top_p and min_p leave, given the units up to each."""
    return (units.to(tl.float64) * _UNIT - share < top_p) & (share >= min_p * (1.0 / total))


@triton.jit
def _ranked(work, row, top, total, below, count, floor, top_p, min_p):
    """Return the units up to each listed member, and which of them are kept."""
    lanes = tl.arange(0, LISTED)
    scaled, _, orders = _listed(work, row, lanes, count)
    share, units = _units_of(scaled, top, total)
    tl.debug_barrier()
    tl.store(work.units + row.to(tl.int64) * LISTED + lanes, units)
    tl.debug_barrier()
    sums = below + _running(work, row, count, True)
    kept = (lanes < count) & (orders >= floor) & _kept(sums, share, total, top_p, min_p)
    return sums, kept


@triton.jit
def _threshold(draw, most):
    """Return the units that the token of a draw exceeds, of so many in total."""
    return tl.minimum((draw * (most.to(tl.float64) * _UNIT)) * _UNITS, (most - 1).to(tl.float64))


@triton.jit
def _first_beyond(work, row, count, sums, kept, threshold):
    """Return the first kept member up to which there are more units than a number."""
    _, ids, orders = _listed(work, row, tl.arange(0, LISTED), count)
    beyond = kept & (sums.to(tl.float64) > threshold)
    best = tl.max(tl.where(beyond, orders, _LAST), axis=0)
    return tl.max(tl.where(beyond & (orders == best), ids, 0), axis=0)


@triton.jit
def _tally(of, row, scale, total, low, high, WEIGHTS: tl.constexpr):
    """Look at the tokens from `low` to before `high` in the order.

    Returns:
        their number, the sum of their units of probability (or of weight), their least share.
    """
    count = tl.full((), 0, tl.int64)
    units = tl.full((), 0, tl.int64)
    least = tl.full((), 2.0, tl.float64)
    for first in range(0, of[4], TILE):
        ids = first + tl.arange(0, TILE)
        scaled = _scaled_of(of, row, ids, scale)[0]
        order = _order(scaled, ids)
        member = (scaled > -_INFINITE) & (order >= low) & (order < high)
        number = tl.sum(member.to(tl.int64), axis=0)
        if number > 0:
            count += number
            share, each = _units_of(scaled, scale[1], total)
            if WEIGHTS:
                each = _weights_of(scaled, scale[1])[1]
            least = tl.minimum(least, tl.min(tl.where(member, share, 2.0), axis=0))
            units += tl.sum(tl.where(member, each, 0), axis=0)
    return count, units, least


@triton.jit
def _bisect(of, row, scale, total, floor, limit, top_p, min_p, MODE: tl.constexpr):
    """Find by bisection the last place in the order, not behind `floor`, up to which something is
    true: there are `limit` tokens at most (`_COUNTED`), all are kept (`_KEPT`), there are `limit`
    units at most (`_BELOW`). Return it with the units up to there."""
    high = _order(scale[1], tl.full((), 0, tl.int32)) + 1
    low = floor
    number = tl.full((), 0, tl.int64)
    units = tl.full((), 0, tl.int64)
    while low < high:
        middle = low + (high - low) // 2
        more, weight, least = _tally(of, row, scale, total, middle, high, False)
        fits = more == 0
        if MODE == _COUNTED:
            fits |= (number + more).to(tl.float64) <= limit
        elif MODE == _KEPT:
            fits |= _kept(units + weight, least, total, top_p, min_p)
        else:
            fits |= (units + weight).to(tl.float64) <= limit
        if fits:
            high = middle
            number += more
            units += weight
        else:
            low = middle + 1
    return high, units


@triton.jit
def _draw_all(of, work, row, scale, total, top_p, min_p, draw):
    """Draw a token of a row without top_k; return it with the number of members listed at last.
    With too many of them there is no token."""
    top, factor = scale[1], scale[2]
    # Bins before `first` are kept as a whole, those behind `last` not at all.
    first = _bins_below(work, row, top_p * _UNITS, False)[0]
    last = _bins_below(work, row, top_p * _UNITS + 2.0, False)[0]
    if min_p > 0:
        edge = (-tl.log(min_p)).to(tl.float32) * factor
        near = tl.minimum(edge, (BINS - 1) * 1.0).to(tl.int32)
        first = tl.minimum(first, tl.maximum(near - 1, 0))
        last = tl.minimum(last, near + 1)
    below = _sum_before(work, row, first)
    most = below
    count = tl.full((), 0, tl.int32)
    if first < BINS:
        count = _gather(of, work, row, scale, first, last, _LAST)
    if (count > 0) & (count <= LISTED):
        sums, kept = _ranked(work, row, top, total, below, count, _LAST, top_p, min_p)
        most = tl.maximum(most, tl.max(tl.where(kept, sums, 0), axis=0))
    threshold = _threshold(draw, most)
    if count <= LISTED:
        at, before = _bins_below(work, row, threshold, True)
        if at < first:
            below = before
            top_p = tl.full((), 2.0, tl.float64)
            min_p = tl.full((), 0.0, tl.float64)
            count = _gather(of, work, row, scale, at, at, _LAST)
    token = tl.full((), 0, tl.int32)
    if count <= LISTED:
        sums, kept = _ranked(work, row, top, total, below, count, _LAST, top_p, min_p)
        token = _first_beyond(work, row, count, sums, kept, threshold)
    return token, count


@triton.jit
def _list_best(of, work, row, scale, top_k):
    """List the first `top_k` tokens of a row, and maybe others; return how many these are, and the
    place of the last of them. With a large top_k no list holds them."""
    last = _bins_below(work, row, top_k.to(tl.float64), False)[0]
    floor = tl.full((), _LAST, tl.int64)
    count = _gather(of, work, row, scale, 0, last, floor)
    if count > LISTED:
        limit = top_k.to(tl.float64)
        floor = _bisect(of, row, scale, limit, floor, limit, limit, limit, _COUNTED)[0]
        if top_k <= LISTED:
            count = _gather(of, work, row, scale, 0, BINS, floor)
    if count <= LISTED:
        lanes = tl.arange(0, LISTED)
        inside = (lanes < count) & (_running(work, row, count, False) <= top_k)
        orders = _listed(work, row, lanes, count)[2]
        floor = tl.min(tl.where(inside, orders, (1 << 62)), axis=0)
    return count, floor


@triton.jit
def _report(work, row, count, top_k, high, logarithm, out, below):
    """Store the ids and log-probabilities of the listed members, in their order."""
    lanes = tl.arange(0, LISTED)
    place = _running(work, row, count, False) - 1
    scaled, ids, _ = _listed(work, row, lanes, count)
    told = (lanes < count) & (place < top_k)
    tl.store(out + 1 + place, ids, mask=told)
    values = ((scaled - high) - logarithm).to(tl.int32, bitcast=True)
    tl.store(out + 1 + place + below, values, mask=told)


@triton.jit
def _tell_named(of, row, high, logarithm, out, below):
    """Store the ids and log-probabilities of a row's named tokens behind its report."""
    logits, rows, _, stride, _ = of
    marks = rows.marks + row * _MARKS
    line = tl.load(marks).to(tl.int64)
    first = tl.load(marks + 10)
    end = tl.load(marks + 11)
    begin = out + tl.load(marks + 8)
    for part in range(first, end, _NAMED):
        index = part + tl.arange(0, _NAMED)
        ids = tl.load(rows.bias_ids + index, mask=index < end, other=0)
        own = tl.load(logits + line * stride + ids, mask=index < end, other=0.0)
        tl.store(begin + index - first, ids, mask=index < end)
        values = ((own - high) - logarithm).to(tl.int32, bitcast=True)
        tl.store(begin + index - first + below, values, mask=index < end)


@triton.jit
def _drawn(of, work, row, scale, count, floor, total):
    """Draw a token of a row: of the first ones of all its tokens, listed or not."""
    numbers = of[1].numbers + row * _NUMBERS
    top_k = tl.load(of[1].marks + row * _MARKS + 2)
    top_p = tl.load(numbers + 1)
    min_p = tl.load(numbers + 2)
    draw = tl.load(numbers + 3)
    token = tl.full((), 0, tl.int32)
    if (top_k <= 0) | (top_k >= of[4]):
        token, count = _draw_all(of, work, row, scale, total, top_p, min_p, draw)
    else:
        if count <= LISTED:
            lanes = tl.arange(0, LISTED)
            scaled, _, orders = _listed(work, row, lanes, count)
            weights = _weights_of(scaled, scale[1])[1]
            weight = tl.sum(tl.where((lanes < count) & (orders >= floor), weights, 0), axis=0)
        else:
            weight = _tally(of, row, scale, total, floor, -_LAST, True)[1]
        total = weight.to(tl.float64) / _WEIGHT_UNITS
        if count <= LISTED:
            below = tl.full((), 0, tl.int64)
            sums, kept = _ranked(work, row, scale[1], total, below, count, floor, top_p, min_p)
            threshold = _threshold(draw, tl.max(tl.where(kept, sums, 0), axis=0))
            token = _first_beyond(work, row, count, sums, kept, threshold)
    if count > LISTED:
        cut, most = _bisect(of, row, scale, total, floor, total, top_p, min_p, _KEPT)
        threshold = _threshold(draw, most)
        place = _bisect(of, row, scale, total, cut, threshold, top_p, min_p, _BELOW)[0]
        # The token before the last place that has no more units has them.
        token = (0x7FFFFFFF - ((place - 1) & 0x7FFFFFFF)).to(tl.int32)
    return token


@triton.jit(do_not_specialize=_SIZES)
def _draw_kernel(
    logits, rows, counts, work, found, stride, vocab, num_parts, num_own, most, PARTS: tl.constexpr
):
    row = tl.program_id(0)
    of = logits, rows, counts, stride, vocab
    marks = rows.marks + row * _MARKS
    kind = tl.load(marks + 1)
    top_k = tl.load(marks + 2)
    told = tl.load(marks + 8)
    lanes = tl.arange(0, PARTS)
    bests = _tops(work, row, 0, -_INFINITE, num_parts, PARTS)
    places = tl.load(work.places + row * PARTS + lanes, mask=lanes < num_parts, other=vocab)
    top = tl.max(bests, axis=0)
    token = tl.min(tl.where(bests == top, places, vocab), axis=0)
    peak = tl.max(_tops(work, row, 2, -_INFINITE, num_parts, PARTS), axis=0)
    is_sound = (peak > -_INFINITE) & (peak < _INFINITE)
    # The logarithm of the sum of all exponentials.
    highest = _tops(work, row, 3, -_INFINITE, num_parts, PARTS)
    high = tl.max(highest, axis=0)
    exponentials = _tops(work, row, 4, 0.0, num_parts, PARTS).to(tl.float64)
    exponentials *= tl.exp((highest - high).to(tl.float64))
    logarithm = tl.log(tl.sum(exponentials, axis=0)).to(tl.float32)
    values = num_own * (1 + most)
    if (kind != 0) & is_sound & (top > -_INFINITE):
        scale = _scale_of(rows, work, row, num_parts, PARTS)
        count = tl.full((), 0, tl.int32)
        floor = tl.full((), _LAST, tl.int64)
        total = tl.full((), 1.0, tl.float64)
        if (top_k > 0) & ((top_k < vocab) | (kind == 2)):
            count, floor = _list_best(of, work, row, scale, top_k)
        else:
            total = _total_of(work, row, num_parts, PARTS)
        if kind == 2:
            out = found.tokens + told * (1 + most)
            _report(work, row, count, top_k, high, logarithm, out, values)
        else:
            token = _drawn(of, work, row, scale, count, floor, total)
    if kind != 2:
        out = found.tokens + row * (1 + most)
        token = tl.where(is_sound, token, _UNSOUND)
        taken = tl.maximum(token, 0)
        tl.store(out, token)
        if told != 0:
            own = tl.load(logits + tl.load(marks).to(tl.int64) * stride + taken)
            tl.store(out + values, ((own - high) - logarithm).to(tl.int32, bitcast=True))
            _tell_named(of, row, high, logarithm, out, values)
        slot = tl.load(marks + 3).to(tl.int64)
        newest = _newest(rows, row)
        tl.debug_barrier()
        tl.store(found.following + row, taken.to(tl.int64))
        if (slot >= 0) & (newest >= 0):
            counted = counts + slot * vocab + newest
            tl.store(counted, tl.load(counted) + 1)


def sample_rows(
    logits: torch.Tensor,
    rows: Rows,
    counts: torch.Tensor,
    into: Found,
    *,
    draws: bool = True,
    unlimited: bool = True,
) -> None:
    """Sample rows, see `kernels.sampling.sample_rows`."""
    vocab, count = logits.shape[1], len(rows.marks)
    parts = triton.cdiv(vocab, TILE.value)
    width = power_of_two(parts)

    def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(count, *shape, dtype=dtype, device=logits.device)

    work = Work(
        empty(torch.float32, 5, width),
        empty(torch.int32, width),
        empty(torch.int64, width),
        empty(torch.int64, BINS.value),
        empty(torch.float32, LISTED.value),
        empty(torch.int32, LISTED.value),
        empty(torch.int64, LISTED.value),
    )
    own: dict[str, Any] = {"logits": logits, "rows": rows, "counts": counts, "work": work}
    own |= {"stride": logits.stride(0), "vocab": vocab, "PARTS": width}
    launch(_look_kernel, (count, parts), own, num_warps=_WARPS, fuse=False)
    own["num_parts"] = parts
    if draws:
        launch(_weigh_kernel, (count, parts), own, num_warps=_WARPS, fuse=False)
    if unlimited:
        launch(_share_kernel, (count, parts), own, num_warps=_WARPS, fuse=False)
    own |= {"found": into, "num_own": into.tokens.shape[1], "most": into.tokens.shape[2] - 1}
    launch(_draw_kernel, (count,), own, num_warps=_WARPS, fuse=False)
