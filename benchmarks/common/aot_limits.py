"""Limits of what a kernel's machine code may take and show, and what some are allowed and why.

Every kernel keeps these, whatever it is allowed:

- shared memory within that of a program on the target;
- no access to shared or tensor memory without the barrier that orders it;
- no transposed result of a product: Triton 3.4 to 3.7.0 compiles such operands wrongly for Hopper.

Without an allowance a kernel spills nothing, and each of its pipelined loops has two buffers or
more and a copy in flight while it computes. No kernel may get worse than it was at the last check.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from benchmarks.common.aot_compile import TARGETS, Usage

NVIDIA = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
CONSUMER = ("sm_89", "sm_120")


@dataclass(frozen=True)
class Allowance:
    """Kernels with other limits.

    Attributes:
        kernels: pattern that a kernel's whole name matches.
        targets: where.
        reason: why.
        spilled: bytes that a thread may spill, stores and loads together.
        pipelined: False if its loops need no copy in flight.
    """

    kernels: str
    targets: tuple[str, ...]
    reason: str
    spilled: int = 0
    pipelined: bool = True


ALLOWANCES = (
    Allowance(
        r"attention bfloat16 on \w+: prefill_kernel",
        CONSUMER,
        "Two buffers of 32 keys and of their values, of 256 dimensions, take 100 KiB with the "
        "queries; a program has 99. So a tile is copied while nothing computes. Tiles of 16 keys "
        "would fit twice, with twice the steps; nobody has measured them.",
        pipelined=False,
    ),
    Allowance(
        r"attention bfloat16 on (float8_e4m3fn|uint8): prefill_kernel",
        ("sm_80", "sm_90", "sm_120"),
        "Codes are converted to bfloat16 in registers, beside a running output that takes half of "
        "the 255.",
        spilled=240,
    ),
    Allowance(
        r"attention bfloat16 on bfloat16: prefill_kernel",
        ("sm_100",),
        "Totals lie in tensor memory. What is the same in every part (addresses, the tile's rows) "
        "is kept beside half of the registers of a tile that is rescaled. Nobody has measured it; "
        "tiles of 64 rows would have room.",
        spilled=300,
    ),
    Allowance(
        r"attention bfloat16 on (float8_e4m3fn|uint8): prefill_kernel",
        ("sm_100",),
        "As above, beside the conversion of codes.",
        spilled=900,
    ),
    Allowance(
        r"attention (bfloat16 on bfloat16|float32 on float32)(, gated)?: merge_kernel",
        ("sm_89", "sm_100", "sm_120"),
        "A few of the sums that are read at once, at 56 to 85 registers.",
        spilled=32,
    ),
    Allowance(
        r"attention bfloat16 on \w+(, gated)?: decode_kernel",
        NVIDIA,
        "A few values that are the same in every part. The compiler keeps to 168 registers, for "
        "three programs, where it could have more; codes take all 255.",
        spilled=160,
    ),
    Allowance(
        r"(lfm2|nemotron|granite), attention: decode_kernel",
        NVIDIA,
        "As above, with heads of 64 and of 128 dimensions.",
        spilled=80,
    ),
    Allowance(
        r"(lfm2|nemotron|granite), attention: prefill_kernel",
        ("sm_80", "sm_120"),
        "A running output and the scores beside it take all 255 registers.",
        spilled=160,
    ),
    Allowance(
        r"attention float32 on float32(, gated)?: (prefill|decode)_kernel",
        NVIDIA,
        "float32 is the parity mode: a product is three products of split operands, whose parts "
        "do not all fit in 255 registers.",
        spilled=180,
    ),
    Allowance(
        r"segments fp32: segment_kernel",
        NVIDIA,
        "As above; a tile has 64 queries for every dtype, since tables of tiles are made without "
        "knowing it.",
        spilled=3000,
    ),
    Allowance(
        r"gated_delta fp32: scan_kernel",
        NVIDIA,
        "As above, with a state of 16 columns in registers from the first chunk to the last.",
        spilled=2100,
    ),
    Allowance(
        r"mamba2 fp32: mamba2_kernel",
        NVIDIA,
        "As above, beside the products of a chunk.",
        spilled=2300,
    ),
    Allowance(
        r"(gated_delta|mamba2) fp32: verify_kernel",
        ("sm_100",),
        "float32 is the parity mode. With arguments in named tuples ptxas of Triton 3.7 keeps 96 "
        "registers, for five programs, where 86 were enough, and spills.",
        spilled=48,
    ),
    Allowance(
        r"gated_delta: scan_kernel",
        ("sm_100",),
        "With Triton 3.6 two warps do what four would (`triton_faults`), and spill one value.",
        spilled=16,
    ),
    Allowance(
        r"gated_delta fp32: prepare_kernel",
        ("sm_80", "sm_89", "sm_120"),
        "As above, where products take both operands from registers.",
        spilled=1300,
    ),
    Allowance(
        r"few int4(, gated)?: few_codes_kernel",
        ("sm_100",),
        "With Triton 3.6 eight rows with zero points need a few registers more than there are.",
        spilled=80,
    ),
    Allowance(
        r"moe (int8|float8|float4): (gate_up|down)_kernel",
        ("sm_80", "sm_89", "sm_100", "sm_120"),
        "A few values in a conversion of codes, at 96 or 128 registers, which let five or "
        "four programs share a multiprocessor.",
        spilled=32,
    ),
    Allowance(
        r"sampling: weigh_kernel",
        ("sm_90",),
        "With Triton 3.6 a few of the values that a row's search keeps, at 128 registers, which "
        "let two programs share a multiprocessor.",
        spilled=24,
    ),
    Allowance(
        r"few_rows changed \w+: few_rows_kernel",
        ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120"),
        "A few values around the loop over adapters, at 96 to 128 registers. These let four "
        "or five programs share a multiprocessor. Rows without an adapter do not enter it.",
        spilled=64,
    ),
    Allowance(
        r"(nemotron, )?moe changed.*: (experts_down|gate_up|down)_kernel",
        ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120"),
        "Values around the loop over adapters, beside sums of tiles as large as the base's: other "
        "tiles would round rows without an adapter in another way. The most are in steps of "
        "thousands of tokens.",
        spilled=704,
    ),
    Allowance(
        r"fixed changed.*: fixed_kernel",
        NVIDIA,
        "A change of 128 columns beside sums of as many, behind the loop over the depth. Another "
        "tile would be another product for rows without an adapter. The most are on sm_80.",
        spilled=2304,
    ),
    Allowance(
        r"low_rank: down_kernel",
        ("sm_100",),
        "Two values of a product of float32, which is three products of split operands.",
        spilled=8,
    ),
    Allowance(
        r"(linear|moe) (int8|float8): (linear|gate_up|down)_kernel",
        ("sm_100",),
        "A group of 128 has two steps of 64, which the compiler unrolls: the group's copies are in "
        "flight while the first computes, and none while the last does.",
        pipelined=False,
    ),
)


def matches(allowance: Allowance, name: str) -> bool:
    """Return True if an allowance names a kernel."""
    return re.fullmatch(allowance.kernels, name) is not None


def breaches(name: str, target: str, usage: Usage, *, staged: bool) -> list[str]:
    """Return a sentence for each limit that a kernel breaks.

    Args:
        name: of the kernel, with its case.
        target: that it was compiled for.
        usage: the worst of its variants.
        staged: True if its launches ask for a pipelined loop.
    """
    limits = TARGETS[target][0]
    allowed = [each for each in ALLOWANCES if target in each.targets and matches(each, name)]
    spilled = max((each.spilled for each in allowed), default=0)
    found = []
    if usage.shared > limits.shared_memory:
        found.append(f"takes {usage.shared} bytes of shared memory of {limits.shared_memory}")
    if usage.spilled > spilled:
        found.append(f"spills {usage.spilled} bytes, of {spilled} allowed")
    if usage.unordered:
        found.append(f"has {usage.unordered} accesses without the barrier that orders them")
    if usage.turned:
        found.append(f"transposes the results of {usage.turned} products")
    if staged and target in NVIDIA and all(each.pipelined for each in allowed):
        if not usage.loops:
            found.append("asks for a pipelined loop and has none")
        elif usage.buffers < 2 or usage.ahead < 1:
            found.append(f"prefetches nothing: {usage.buffers} buffers, {usage.ahead} in flight")
    return found


def worse(usage: Usage, before: Usage) -> list[str]:
    """Return what of a kernel got worse since it was checked."""
    found = []
    if usage.spilled > before.spilled:
        found.append(f"spilled {usage.spilled} was {before.spilled}")
    for name in ("programs", "loops", "buffers", "ahead"):
        new, old = getattr(usage, name), getattr(before, name)
        found += [f"{name} {new} was {old}"] if new < old else []
    return found
