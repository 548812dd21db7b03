"""Compare the CPU ops with what they replace, in pairs within one run.

    python benchmarks/kernels_cpu.py [--threads 2] [--rounds 9] [--only gated-delta,attention,...]
        [--before FOLDER] [--isa avx2]

`--before` runs the same cases in a child on another checkout (before / ours is due at 0.9 or more).
`--only products` measures the products alone, `--only decode` a decode step beside its products.

Sizes are those of the 49M-parameter benchmark checkpoint: hidden 512, GDN with 4 key and 8 value
heads of 128, attention with 8 query and 2 key heads of 128 (of 256 for a single query, whose keys
and values of 24 layers come from the memory), blocks of 64. In each round both sides run one after
the other, in changing order, so that both see the same neighbours on a busy machine. A ratio is the
median over rounds of (their time / our time); times are the best of each side.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from common.engine_cases import checkpoint
from common.kernels_before import Before, is_child, serve, timed
from common.kernels_cpu_products import products, report
from common.machine import ROOT, add_isa_argument, commit, describe, run_as
from kernel_case import modeling

import vlm_serve
from vlm_serve.kernels.causal_conv import causal_conv_prefill
from vlm_serve.kernels.dispatch import compiled_kernels
from vlm_serve.kernels.gated_delta import chunk_gated_delta
from vlm_serve.kernels.metadata import DecodeMeta, KVLayer, PrefillMeta
from vlm_serve.kernels.norms import rms_norm
from vlm_serve.kernels.paged_attention import attention_decode, attention_prefill
from vlm_serve.system.host_memory import retain_freed_memory

TOKENS, BLOCK = 4096, 64
KEY_HEADS, VALUE_HEADS, DIM = 4, 8, 128
QUERY_HEADS, KV_HEADS = 8, 2
DTYPES = (torch.float32, torch.bfloat16)


@dataclass
class Case:
    """One row: what we run, what it is measured against, and the ratio it should reach."""

    name: str
    ours: Callable[[], object]
    theirs: Callable[[], object]
    goal: float | None = None

    def row(self, rounds: int, before: Before | None) -> str:
        """Measures all sides and returns the row of the table."""
        sides: dict[str, Callable[[], float]] = {
            "ours": lambda: timed(self.ours),
            "theirs": lambda: timed(self.theirs),
        }
        pairs: list[tuple[float, float]] = []
        key = before.next()[0] if before is not None else ""
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        names = list(sides)
        for round_number in range(-1, rounds):
            turn = round_number % len(names)
            for name in names[turn:] + names[:turn]:
                taken = sides[name]()
                if round_number >= 0:
                    seconds[name].append(taken)
            if before is not None:
                pairs.append(before.run(key))
        ratio = statistics.median(
            other / own for other, own in zip(seconds["theirs"], seconds["ours"], strict=True)
        )
        best = [1e3 * min(seconds[name]) for name in ("ours", "theirs")]
        goal = "" if self.goal is None else f">= {self.goal:.2f}"
        # The first pair is warm-up.
        earlier = statistics.median(one / other for one, other in pairs[1:]) if pairs else None
        return (
            f"| {self.name} | {best[0]:.2f} | {best[1]:.2f} | {ratio:.2f} | {goal} "
            f"| {'' if earlier is None else f'{earlier:.2f}'} |"
        )


def slices(ends: tuple[int, ...], start: int = 0, table: tuple[int, ...] = ()) -> PrefillMeta:
    """One sequence from zero state."""
    return PrefillMeta((0, ends[-1]), (start,), (table,), (-1,), (0,), (ends,))


def gated_delta_cases() -> Iterator[Case]:
    full = tuple(range(64, TOKENS + 1, 64))
    for dtype in DTYPES:
        yield gated_delta(dtype, "chunk 64", full, 2.0)
        cut = tuple(sorted({*full, *range(300, TOKENS, 700)}))
        yield gated_delta(dtype, "chunk 64, six more cuts", cut, None)
        yield gated_delta(dtype, "chunk 16", tuple(range(16, TOKENS + 1, 16)), None)


def gated_delta(dtype: torch.dtype, name: str, ends: tuple[int, ...], goal: float | None) -> Case:
    widths = [KEY_HEADS * DIM, KEY_HEADS * DIM, VALUE_HEADS * DIM]
    parts = torch.split(torch.randn(TOKENS, sum(widths)).to(dtype), widths, dim=1)
    q, k, v = (part.view(TOKENS, -1, DIM) for part in parts)
    g, beta = -torch.rand(TOKENS, VALUE_HEADS), torch.rand(TOKENS, VALUE_HEADS)
    state, meta = torch.zeros(1, VALUE_HEADS, DIM, DIM), slices(ends)
    return Case(
        f"gated delta, {name}, {short(dtype)}",
        lambda: chunk_gated_delta(q, k, v, g, beta, state, meta),
        lambda: modeling().torch_chunk_gated_delta_rule(
            *(x[None] for x in (q, k, v, g, beta)),
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        ),
        goal,
    )


def convolution_cases() -> Iterator[Case]:
    for dtype in DTYPES:
        yield convolution(dtype)


def convolution(dtype: torch.dtype) -> Case:
    channels = (2 * KEY_HEADS + VALUE_HEADS) * DIM
    x, weight = torch.randn(TOKENS, channels).to(dtype), torch.randn(channels, 4).to(dtype)
    tails = torch.zeros(1, channels, 3, dtype=dtype)
    meta = slices(tuple(range(64, TOKENS + 1, 64)))
    return Case(
        f"causal conv, {short(dtype)}",
        lambda: causal_conv_prefill(x, weight, tails, meta),
        lambda: modeling().causal_conv1d_fn(x.T[None], weight, activation="silu"),
    )


def attention_cases() -> Iterator[Case]:
    for dtype in DTYPES:
        for start, count in ((0, TOKENS), (0, 512), (TOKENS - 512, 512)):
            yield attention(dtype, start, count)
        yield attention_step(dtype)


def attention(dtype: torch.dtype, start: int, count: int) -> Case:
    length = start + count
    blocks = length // BLOCK
    pool = torch.randn(blocks + 7, 2, 2, BLOCK, KV_HEADS, DIM).to(dtype)
    kv = KVLayer(pool[:, 1, 0], pool[:, 1, 1])
    meta = slices((count,), start, tuple(torch.randperm(blocks + 7)[:blocks].tolist()))
    q = torch.randn(count, QUERY_HEADS, DIM).to(dtype)
    query, key, value = (
        torch.randn(1, heads, size, DIM).to(dtype)
        for heads, size in ((QUERY_HEADS, count), (KV_HEADS, length), (KV_HEADS, length))
    )
    mask = torch.ones(count, length, dtype=torch.bool).tril(start) if start else None
    return Case(
        f"attention, {count} of {length}, {short(dtype)}",
        lambda: attention_prefill(q, kv, meta, scale=DIM**-0.5),
        lambda: F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        ),
        1 / 1.2,
    )


def attention_step(dtype: torch.dtype) -> Case:
    """A decoded token's, layer by layer, so that keys and values come from the memory."""
    layers, dim, blocks = 24, 256, TOKENS // BLOCK
    pool = torch.randn(blocks, layers, 2, KV_HEADS, BLOCK, dim).to(dtype)
    pages = [KVLayer(*pool[:, layer].transpose(2, 3).unbind(1)) for layer in range(layers)]
    none = (-1,)
    meta = DecodeMeta((torch.randperm(blocks).tolist(),), (TOKENS,), none, none, none)
    q = torch.randn(1, QUERY_HEADS, dim).to(dtype)
    query = q.view(1, QUERY_HEADS, 1, dim)
    contiguous = pool.view(layers, 2, 1, KV_HEADS, TOKENS, dim)
    return Case(
        f"{layers} x attention, 1 of {TOKENS}, {short(dtype)}",
        lambda: [attention_decode(q, kv, meta, scale=dim**-0.5) for kv in pages],
        lambda: [
            F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
            for key, value in contiguous
        ],
    )


def norm_cases() -> Iterator[Case]:
    for dtype in DTYPES:
        for rows in (TOKENS, 8):
            yield norm(dtype, rows)


def norm(dtype: torch.dtype, rows: int) -> Case:
    hidden, eps = 512, 1e-6
    x = torch.randn(rows, hidden).to(dtype)
    module = modeling().Qwen3_5MoeRMSNorm(hidden, eps).to(dtype)
    weight = module.weight.data
    # Many, since one takes microseconds.
    times = range(1 if rows > 8 else 100)
    return Case(
        f"{len(times)} x norm, {rows} rows, {short(dtype)}",
        lambda: [rms_norm(x, weight, eps) for _ in times],
        lambda: [module(x) for _ in times],
    )


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


CASES: dict[str, Callable[[], Iterator[Case]]] = {
    "gated-delta": gated_delta_cases,
    "conv": convolution_cases,
    "attention": attention_cases,
    "norms": norm_cases,
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default=",".join([*CASES, "products", "decode"]))
    parser.add_argument("--before", type=Path, help="checkout of a commit to compare with")
    add_isa_argument(parser)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    run_as(arguments.isa)
    torch.set_num_threads(arguments.threads)
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    retained = retain_freed_memory()  # For both sides, or page faults would be compared.
    chosen = arguments.only.split(",")
    if is_child():
        with compiled_kernels():
            serve(ours(chosen))
        return
    imported = Path(vlm_serve.__file__)
    assert imported.is_relative_to(ROOT), f"{imported} would be measured: set PYTHONPATH={ROOT}"
    before = None if arguments.before is None else Before(arguments.before.resolve(), ROOT)
    print(describe(arguments.threads))
    print(f"torch {torch.__version__}, memory retained: {retained}")
    if before is not None:
        print(f"before: commit {commit(arguments.before)}", flush=True)
    try:
        with compiled_kernels():
            if any(name in CASES for name in chosen):
                run(chosen, arguments.rounds, before)
            if "products" in chosen:
                report(arguments.threads, arguments.rounds, before)
    finally:
        if before is not None:
            before.close()
    if "decode" in chosen:
        decode(3 * arguments.rounds)


def ours(chosen: Sequence[str]) -> Iterator[dict[str, Callable[[], object]]]:
    """Our sides of the chosen cases, in the order in which they are measured."""
    for case in (case for name in CASES if name in chosen for case in CASES[name]()):
        yield {case.name: case.ours}
    if "products" in chosen:
        yield from (case.ours() for case in products())


def decode(rounds: int) -> None:
    """Prints the table of decode steps."""
    # Its model is driven in ways that earlier commits do not know, which need not measure it.
    from common.kernels_cpu_step import DecodeStep

    print("\n| decode step | ms | its GEMMs, ms | outside them | goal |\n|---|---|---|---|---|")
    with checkpoint(None) as path:
        for dtype in DTYPES:
            for batch, context in ((1, 128), (8, 128), (8, 1024)):
                step = DecodeStep(path, dtype, batch, context)
                print(step.row(rounds), flush=True)


def run(chosen: Sequence[str], rounds: int, before: Before | None) -> None:
    """Prints the tables of the chosen cases."""
    print("\n| case | ours, ms | theirs, ms | theirs / ours | goal | before / ours |")
    print("|---" * 6 + "|")
    for case in (case for name in CASES if name in chosen for case in CASES[name]()):
        print(case.row(rounds, before), flush=True)


if __name__ == "__main__":
    main()
