"""Check or time one combination of gpu_candidates.py, in a process of its own.

python benchmarks/common/gpu_candidate.py COMBINATION [--time] [--rehearse]
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Callable

REHEARSED = "--rehearse" in sys.argv
# Triton decides at import whether kernels are compiled or interpreted.
os.environ["TRITON_INTERPRET"] = "1" if REHEARSED else "0"

import torch  # noqa: E402
from candidates.convolution import convolve  # noqa: E402
from candidates.inverse import invert_chunks  # noqa: E402
from candidates.prepare import prepare_chunks  # noqa: E402
from candidates.scan import scan  # noqa: E402
from triton_case import prefill_case  # noqa: E402

from vlm_serve.kernels.causal_conv import reference as conv_reference  # noqa: E402
from vlm_serve.kernels.gated_delta import chunk_triton, reference  # noqa: E402
from vlm_serve.kernels.gated_delta import triton as serving  # noqa: E402
from vlm_serve.kernels.gated_delta.tokens import Tokens  # noqa: E402
from vlm_serve.kernels.metadata import PrefillMeta  # noqa: E402

DEVICE = "cpu" if REHEARSED else "cuda"
RUNS = 2 if REHEARSED else 6
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
Call = Callable[[Tokens, torch.Tensor, PrefillMeta], torch.Tensor]
Case = tuple[str, PrefillMeta, tuple[int, int, int], int]
"""Name, slices, (key heads, value heads, dim) and rows of states."""


def chosen(combination: str) -> Call:
    """Return the gated delta rule of a prefill with the candidates that a combination names."""
    parts = combination.split(",")
    options = {key: int(value) for key, _, value in (p.partition("=") for p in parts) if value}

    def call(tokens: Tokens, state: torch.Tensor, meta: PrefillMeta) -> torch.Tensor:
        wide = tokens.q.dtype == torch.float32
        if "inverse" in parts:
            warps, tile = options.get("inverse_warps", 1), options.get("key_tile", 32)
            inverses = invert_chunks(tokens, meta, warps, tile)
        else:
            inverses = None
        if "inverse" in parts or "prepare" in parts:
            warps = options.get("prepare_warps", 8 if wide else 4)
            made = prepare_chunks(tokens, meta, inverses, warps)
        else:
            made = chunk_triton.prepare_chunks(tokens, meta)
        if "scan" in parts:
            columns = 16 if wide else options.get("columns", 32)
            return scan(tokens, made, state, meta, columns, 8 if wide else options.get("warps", 4))
        serving.prepare_chunks = lambda *_: made
        return serving.chunk_gated_delta(tokens, state, meta)

    return call


def slices(*lengths: int) -> PrefillMeta:
    """Cold sequences in whole chunks, the first chunk of the first one kept."""
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    count = len(lengths)
    cuts = tuple((*range(b + 64, e, 64), e) for b, e in zip(ends, ends[1:], strict=False))
    blocks = ((0,),) * count
    rows = tuple(range(count))
    return PrefillMeta(
        tuple(ends), (0,) * count, blocks, (-1,) * count, rows, cuts, ((0, 0, count),)
    )


def cases() -> list[Case]:
    if REHEARSED:
        return [("54 of 2/4x32", slices(54), (2, 4, 32), 3)]
    mixed, rows = prefill_case(random.Random(0), sequences=5, longest=150, chunk=64)
    return [
        ("54 of 2/4x32", slices(54), (2, 4, 32), 3),
        ("54 of 2/4x64", slices(54), (2, 4, 64), 3),
        ("random slices of 2/4x128", mixed, (2, 4, 128), rows + 2),
        ("150 + 37 of 16/32x128", slices(150, 37), (16, 32, 128), 4),
        ("230 of 16/48x128", slices(230), (16, 48, 128), 3),
    ]


def fresh(meta: PrefillMeta) -> PrefillMeta:
    """Return the slices without tables, which lie on one device."""
    names = ("cu_seqlens", "starts", "block_tables", "src_rows", "dst_rows", "chunk_ends")
    return PrefillMeta(*(getattr(meta, name) for name in names), meta.snapshots)


def inputs(tokens: int, heads: tuple[int, int, int], dtype: torch.dtype) -> Tokens:
    key_heads, value_heads, dim = heads
    generator = torch.Generator().manual_seed(tokens)
    draw = [torch.randn(tokens, n, dim, generator=generator) for n in (key_heads,) * 2]
    v = torch.randn(tokens, value_heads, dim, generator=generator)
    decay = -torch.rand(tokens, value_heads, generator=generator) * 0.1
    beta = torch.rand(tokens, value_heads, generator=generator)
    return Tokens(*(x.to(dtype) for x in (*draw, v)), decay, beta.to(dtype))


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference relative to the largest value; NaN counts as 9."""
    apart = (actual.cpu().double() - expected.double()).abs().max()
    return float((apart / expected.double().abs().max()).nan_to_num(9.0))


def check_delta(call: Call, case: Case, dtype: torch.dtype) -> tuple[float, bool]:
    """Return the error against torch on the CPU, and whether all runs had equal bits."""
    _, meta, heads, rows = case
    tokens = inputs(meta.num_tokens, heads, dtype)
    state = 0.1 * torch.randn(rows, heads[1], heads[2], heads[2])
    after = state.clone()
    expected = reference.gated_delta(tokens, after, fresh(meta))
    placed, worst, outs = Tokens(*(x.to(DEVICE) for x in tokens)), 0.0, []
    for _ in range(RUNS):
        own = state.to(DEVICE, copy=True)
        out = call(placed, own, fresh(meta))
        worst = max(worst, difference(out, expected), difference(own, after))
        outs.append(out)
    return worst, all(torch.equal(outs[0], out) for out in outs)


def check_convolution(span: int, case: Case, dtype: torch.dtype) -> tuple[float, bool]:
    _, meta, heads, rows = case
    channels = (2 * heads[0] + heads[1]) * heads[2]
    x, weight = torch.randn(meta.num_tokens, channels), torch.randn(channels, 4)
    x, weight, tails = x.to(dtype), weight.to(dtype), torch.randn(rows, channels, 3).to(dtype)
    placed = [part.to(DEVICE) for part in (x, weight, tails)]
    outs = [convolve(*placed, fresh(meta), span) for _ in range(RUNS)]
    expected = conv_reference.causal_conv(x, weight, tails, fresh(meta))
    return difference(outs[0], expected), all(torch.equal(outs[0], out) for out in outs)


def check(combination: str) -> bool:
    right = True
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for case in cases():
            if combination.startswith("convolution"):
                error, same = check_convolution(int(combination.split("=")[1]), case, dtype)
            else:
                error, same = check_delta(chosen(combination), case, dtype)
            fine = same and error <= TOLERANCE[dtype]
            bits = "equal bits" if same else "OTHER BITS"
            verdict = "" if fine else " WRONG"
            print(f"  {case[0]}, {str(dtype)[6:]}: {error:.1e}, {bits}{verdict}", flush=True)
            right = right and fine
    return right


def measured(combination: str) -> float:
    """Return microseconds for 4096 tokens of a layer of the 27B."""
    from common.gpu_timing import Timer

    meta, heads = slices(4096), (16, 48, 128)
    if combination.startswith("convolution"):
        channels = (2 * heads[0] + heads[1]) * heads[2]
        x, tails = (torch.randn(n, channels, device=DEVICE).bfloat16() for n in (4096, 6))
        weight, span = torch.randn(channels, 4, device=DEVICE).bfloat16(), combination.split("=")[1]
        tails = tails.view(2, channels, 3)
        return 1e6 * Timer().median(lambda: convolve(x, weight, tails, meta, int(span)))[0]
    tokens = Tokens(*(x.to(DEVICE) for x in inputs(4096, heads, torch.bfloat16)))
    state, call = torch.zeros(3, heads[1], heads[2], heads[2], device=DEVICE), chosen(combination)
    return 1e6 * Timer().median(lambda: call(tokens, state, meta))[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("combination")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--rehearse", action="store_true")
    arguments = parser.parse_args()
    if arguments.time:
        print(f"{arguments.combination}: {measured(arguments.combination):.1f} us")
        return 0
    print(f"{arguments.combination}:")
    right = check(arguments.combination)
    print(f"{arguments.combination}: {'right' if right else 'WRONG'}")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
