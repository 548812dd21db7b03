"""Paged attention on the Triton path against its float64 reference."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_oracles import attention_reference
from triton_case import DEVICE, TOLERANCE, assert_near, kernels, on_cpu, randn, row_by_row
from triton_pools import FORMS, filled

from vlm_serve.engine.steps.step_buffers import PrefillTables, tile_forms
from vlm_serve.engine.steps.step_sizes import SequenceLimits, StepSize
from vlm_serve.kernels.dispatch import triton_everywhere
from vlm_serve.kernels.metadata import DecodeMeta, KVLayer, PrefillMeta
from vlm_serve.kernels.paged_attention import (
    SUMS_BYTES,
    SumsRoom,
    attention_decode,
    attention_prefill,
)
from vlm_serve.kernels.paged_attention import triton as paged_triton
from vlm_serve.kernels.triton_support import Launch, Target, record_launches


def reference(
    q: torch.Tensor, kv: KVLayer, table: tuple[int, ...], start: int, scale: float
) -> torch.Tensor:
    return attention_reference(q.cpu(), on_cpu(kv), table, start, scale)


def prefill_meta(
    starts: list[int], lengths: list[int], tables: tuple[tuple[int, ...], ...]
) -> PrefillMeta:
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    empty = (-1,) * len(starts)
    return PrefillMeta(tuple(offsets), tuple(starts), tables, empty, empty, ((),) * len(starts))


def check_prefill(
    dtype: torch.dtype, form: torch.dtype, heads: tuple[int, int], dim: int, seed: int, size: int
) -> None:
    rng = random.Random(seed)
    lengths = [0, 1, rng.randint(2, 20), rng.randint(20, 40)]
    starts = [rng.randint(0, 40), rng.randint(0, 70), 0, rng.randint(0, 40)]
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    kv, tables = filled(ends, heads[1], dim, form, seed, size)
    meta = prefill_meta(starts, lengths, tables)
    q = randn(meta.num_tokens, heads[0], 2 * dim, dtype=dtype, seed=seed)[..., :dim]
    with kernels():
        out = attention_prefill(q, kv, meta, scale=dim**-0.5)
    assert out.dtype == dtype and out.is_contiguous()
    for i in range(len(meta)):
        begin, end = meta.cu_seqlens[i], meta.cu_seqlens[i + 1]
        expected = reference(q[begin:end], kv, tables[i], starts[i], dim**-0.5)
        assert_near(out[begin:end], expected, TOLERANCE[dtype])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 16), (torch.bfloat16, 64)])
def test_prefill_of_every_stored_form(dtype: torch.dtype, form: torch.dtype, size: int) -> None:
    check_prefill(dtype, form, (6, 2), 64, seed=FORMS.index(form), size=size)


@pytest.mark.parametrize(
    ("heads", "dim"), [((1, 1), 64), ((16, 1), 80), ((3, 1), 128), ((2, 1), 256), ((2, 2), 96)]
)
def test_prefill_of_every_head_layout(heads: tuple[int, int], dim: int) -> None:
    check_prefill(torch.float16, torch.float16, heads, dim, seed=dim, size=dim)


@pytest.mark.parametrize(("seed", "slots"), [(0, None), (1, 2), (2, 3)])
def test_a_slice_resumed_anywhere_has_the_bits_of_the_whole(
    seed: int, slots: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_room(monkeypatch, slots)
    rng = random.Random(seed)
    cut = rng.randint(1, 69)
    kv, tables = filled([70, 33], 2, 64, torch.float32, seed)
    q, other = randn(70, 4, 64, seed=seed), randn(33, 4, 64, seed=seed + 1)
    with kernels(), row_by_row():
        whole = attention_prefill(q, kv, prefill_meta([0], [70], tables[:1]), scale=0.1)
        meta = prefill_meta([0, cut], [33, 70 - cut], (tables[1], tables[0]))
        out = attention_prefill(torch.cat([other, q[cut:]]), kv, meta, scale=0.1)
    assert torch.equal(out[33:], whole[cut:])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("part", "size"), [(2048, 16), (32, 16), (64, 32)])
def test_decode_of_every_stored_form(
    form: torch.dtype, part: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_decode(torch.float32, form, (6, 2), 64, part, size, monkeypatch)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "dim"), [((1, 1), 64), ((16, 1), 80), ((3, 1), 128), ((4, 1), 256)]
)
def test_decode_of_every_head_layout(
    dtype: torch.dtype, heads: tuple[int, int], dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_decode(dtype, dtype, heads, dim, 64, dim, monkeypatch)


def check_decode(
    dtype: torch.dtype,
    form: torch.dtype,
    heads: tuple[int, int],
    dim: int,
    part: int,
    size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(paged_triton, "FIXED_PART", part)
    lengths = [1, 16, 100, 67]
    kv, tables = filled(lengths, heads[1], dim, form, dim, size)
    q = randn(len(lengths), heads[0], dim, dtype=dtype)
    with kernels():
        out = attention_decode(q, kv, decode_meta(tables, lengths), scale=dim**-0.5)
    for i, length in enumerate(lengths):
        expected = reference(q[i : i + 1], kv, tables[i], length - 1, dim**-0.5)
        assert_near(out[i : i + 1], expected, TOLERANCE[dtype])


def decode_meta(tables: Sequence[tuple[int, ...]], lengths: Sequence[int]) -> DecodeMeta:
    none = (-1,) * len(lengths)
    return DecodeMeta(tuple(tables), tuple(lengths), none, none, none)


def with_room(monkeypatch: pytest.MonkeyPatch, slots: int | None) -> None:
    """Parts of 32 keys, and room for the sums of so many parts of a tile."""
    monkeypatch.setattr(paged_triton, "FIXED_PART", 32)
    if slots is None:
        return

    def room(tiles: int, rows: int, dim: int, keys: int, part: int) -> SumsRoom:
        parts = -(-keys // part)
        whole = SumsRoom(tiles, parts, parts) if parts <= slots else None
        return whole or SumsRoom(min(tiles, 4), slots - 1, slots)

    monkeypatch.setattr(paged_triton, "sums_room", room)


ROOMS = [None, 2, 3]


@pytest.mark.interpreter
@pytest.mark.parametrize("form", FORMS)
def test_a_decoded_token_has_its_bits_in_any_company(
    form: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside longer sequences there is room for more parts; without, programs walk several."""
    lengths = [1, 33, 100, 32, 130]
    kv, tables = filled(lengths, 1, 64, form, seed=4)
    q = randn(len(lengths), 3, 64)

    def attend(chosen: list[int]) -> torch.Tensor:
        meta = decode_meta([tables[i] for i in chosen], [lengths[i] for i in chosen])
        return attention_decode(q[chosen], kv, meta, scale=0.125)

    found = []
    with kernels(), row_by_row():
        for slots in ROOMS:
            with monkeypatch.context() as patches:
                with_room(patches, slots)
                together = attend(list(range(len(lengths))))
                for i, length in enumerate(lengths):
                    expected = reference(q[i : i + 1], kv, tables[i], length - 1, 0.125)
                    assert_near(together[i : i + 1], expected, TOLERANCE[torch.float32])
                assert torch.equal(attend([4, 0, 2]), together[[4, 0, 2]])
                found += [together, torch.cat([attend([i]) for i in range(len(lengths))])]
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.interpreter
@pytest.mark.parametrize("seed", range(4))
def test_a_prompt_s_row_has_its_bits_in_any_company_and_any_step(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, beside others, in any split into steps; with rows of a tile on both sides of a part's
    end, and with programs that walk parts."""
    rng, form = random.Random(seed), FORMS[(0, 4, 3, 1)[seed]]
    lengths = [100, 20, 40]
    kv, tables = filled(lengths, 1, 64, form, seed)
    q = [randn(length, 2, 64, seed=seed + i) for i, length in enumerate(lengths)]

    def attend(slices: list[tuple[int, int, int]]) -> list[torch.Tensor]:
        meta = prefill_meta(
            [begin for _, begin, _ in slices],
            [end - begin for _, begin, end in slices],
            tuple(tables[i] for i, _, _ in slices),
        )
        rows = torch.cat([q[i][begin:end] for i, begin, end in slices])
        out = attention_prefill(rows, kv, meta, scale=0.125)
        return list(torch.split_with_sizes(out, [end - begin for _, begin, end in slices]))

    with kernels(), row_by_row():
        with_room(monkeypatch, None)
        whole = [attend([(i, 0, length)])[0] for i, length in enumerate(lengths)]
        for rows, own, table in zip(whole, q, tables, strict=True):
            assert_near(rows, reference(own, kv, table, 0, 0.125), 2e-5)
        for slots in ROOMS:
            with monkeypatch.context() as patches:
                with_room(patches, slots)
                cut = rng.randint(1, 99)
                steps = [(2, 0, 40), (0, cut, 100), (1, rng.randint(0, 19), 20)]
                for (i, begin, end), rows in zip(steps, attend(steps), strict=True):
                    assert torch.equal(rows, whole[i][begin:end])
                assert torch.equal(attend([(0, 0, cut)])[0], whole[0][:cut])


@pytest.mark.parametrize("slots", [None, 2])
def test_a_captured_step_s_padding_changes_no_bit(
    slots: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are tiles of nothing in it, and room for parts that no sequence has."""
    with_room(monkeypatch, slots)
    kv, tables = filled([100, 20], 1, 64, torch.float32, 0)
    plain = prefill_meta([80, 0], [20, 20], tables)
    q = randn(64, 2, 64)
    with kernels(), row_by_row():
        expected = attention_prefill(q[:40], kv, plain, scale=0.125)
        step = PrefillTables(
            StepSize(prompts=3, tokens=64), SequenceLimits(16, 20, 0), tile_forms(plain.tensors)
        )
        assert step.accepts(plain)
        fixed = {
            name: torch.full(table.shape, table.padding, dtype=table.dtype)
            for name, table in step.tables.items()
        }
        step.write(fixed, plain)
        on_device = {name: table.to(DEVICE) for name, table in fixed.items()}
        found = attention_prefill(q, kv, step.meta(on_device), scale=0.125)
    assert torch.equal(found[:40], expected)


@pytest.mark.parametrize("form", FORMS)
def test_prompts_of_every_stored_form_in_parts(
    form: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_room(monkeypatch, 2)
    check_prefill(torch.float32, form, (6, 2), 64, seed=FORMS.index(form), size=16)


LAYER = KVLayer(*(torch.empty(8, 64, 4, 256, dtype=torch.bfloat16, device="meta"),) * 2)


def launched(call: Callable[[], Any]) -> list[Launch]:
    with triton_everywhere(), record_launches(Target("cuda", 90)) as launches:
        call()
    return launches


def prefill_launches(starts: list[int], tokens: int) -> list[Launch]:
    tables = tuple((0,) * ((start + tokens) // 64 + 1) for start in starts)
    meta = prefill_meta(starts, [tokens] * len(starts), tables)
    q = torch.empty(meta.num_tokens, 16, 256, dtype=torch.bfloat16, device="meta")
    return launched(lambda: attention_prefill(q, LAYER, meta, scale=1.0))


def decode_launches(lengths: list[int]) -> list[Launch]:
    meta = decode_meta([(0,) * -(-length // 64) for length in lengths], lengths)
    q = torch.empty(len(lengths), 16, 256, dtype=torch.bfloat16, device="meta")
    return launched(lambda: attention_decode(q, LAYER, meta, scale=1.0))


def sums_of(launches: list[Launch]) -> int:
    first = launches[0].arguments
    return sum(first[name].nbytes for name in ("best_parts", "norm_parts", "total_parts"))


def test_few_tokens_behind_a_long_prefix_fill_a_gpu() -> None:
    """Each program has one part, which is 64 tiles of 32 keys."""
    attend, merge = prefill_launches([131_072], 64)
    assert math.prod(attend.grid) == 2 * 65 * 4
    assert attend.arguments["PART"] == 2048 and attend.arguments["KEY_TILE"] == 32
    assert attend.arguments["most"] == attend.arguments["slots"] == 65
    assert math.prod(merge.grid) >= 128


def test_one_long_sequence_is_no_burden_for_short_ones() -> None:
    """Nobody walks more than a part: there are programs for all pairs of a sequence and a part."""
    attend, _merge = decode_launches([100_000] + [500] * 63)
    assert attend.arguments["most"] == 49 == attend.arguments["slots"]
    assert math.prod(attend.grid) >= (49 + 63) * 4
    short = decode_launches([500] * 64)
    assert [launch.kernel.__name__ for launch in short] == ["_decode_kernel"]
    assert sums_of(short) < 2000


@pytest.mark.parametrize(("tokens", "count"), [(64, 1), (64, 4), (512, 4), (2048, 1), (2048, 16)])
def test_partial_sums_are_bounded(tokens: int, count: int) -> None:
    """2.2 GB would be what 2 048 tokens behind 131 072 have."""
    launches = prefill_launches([131_072] * count, tokens)
    assert sums_of(launches) <= SUMS_BYTES
    tiles = sum(launch.arguments["tiles"] for launch in launches[::2])
    assert tiles == count * tokens * 4 // 128
    for attend in launches[::2]:
        grid = attend.arguments["tiles"] * attend.arguments["most"] * 4
        assert math.prod(attend.grid) == grid >= 128
    assert sums_of(decode_launches([262_144] * 256)) <= SUMS_BYTES


@pytest.mark.parametrize("on_triton", [False, True])
@pytest.mark.parametrize("lengths", [(2, 17), (40, 600)])
def test_keys_begin_behind_the_first_slot(on_triton: bool, lengths: tuple[int, ...]) -> None:
    """As in the layer for drafts, whose first slot holds anything."""
    kv, tables = filled(list(lengths), 2, 64, torch.float32, 0, 16)
    moved = KVLayer(kv.k.clone(), kv.v.clone())
    for table, length in zip(tables, lengths, strict=True):
        for place in range(1, length):
            to, at = divmod(place - 1, 16), divmod(place, 16)
            for own, other in ((moved.k, kv.k), (moved.v, kv.v)):
                own[table[to[0]], to[1]] = other[table[at[0]], at[1]]
        kv.k[table[0], 0] = kv.v[table[0], 0] = float("nan")
    none = (-1,) * len(lengths)
    meta = DecodeMeta(tables, lengths, none, none, none)
    shorter = replace(meta, kv_lens=tuple(each - 1 for each in lengths), tensors={}, plans={})
    q = randn(len(lengths), 4, 64)
    with kernels() if on_triton else nullcontext():
        out = attention_decode(q, kv, meta, scale=0.125, first_key=1)
        expected = attention_decode(q, moved, shorter, scale=0.125)
    assert_near(out, expected, TOLERANCE[torch.float32])


def test_tokens_of_a_slice_share_a_table() -> None:
    kv, tables = filled([40, 33], 2, 64, torch.float32, 0, 16)
    lengths, none = (38, 39, 40, 31, 32, 33), (-1,) * 6
    meta = DecodeMeta(tuple(tables[i // 3] for i in range(6)), lengths, none, none, none)
    q = randn(6, 4, 64)
    with kernels():
        expected = attention_decode(q, kv, meta, scale=0.125)
        shared = replace(meta, checked=set(), plans={}, tensors=dict(meta.tensors))
        shared.tensors["block_tables"] = meta.tensors["block_tables"][::3].contiguous()
        assert torch.equal(attention_decode(q, kv, shared, scale=0.125), expected)
