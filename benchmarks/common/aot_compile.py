"""Compile recorded launches for a target without a GPU, and read what their code takes."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.common.aot_barriers import unordered_products, unordered_writes
from benchmarks.common.aot_code import pipelined_loops, turned_products
from vlm_serve.kernels.triton_support import Launch, Target

TARGETS = {
    **{
        f"sm_{arch}": (Target("cuda", arch), GPUTarget("cuda", arch, 32))
        for arch in (80, 89, 90, 100, 120)
    },
    "gfx942": (Target("hip", "gfx942"), GPUTarget("hip", "gfx942", 64)),
}


@dataclass(frozen=True)
class Room:
    """What a multiprocessor has for all its programs.

    Attributes:
        warps: at most.
        registers: of each thread, times the threads.
        shared: bytes of shared memory; each program takes some more for the system.
    """

    warps: int
    registers: int
    shared: int

    def programs(self, registers: int, shared: int, warps: int) -> int:
        """Return how many programs fit at once; 0 if not even one does."""
        lanes = 64 if self is _CDNA else 32
        system = 0 if self is _CDNA else 1024
        each = -(-max(registers, 1) // 8) * 8 * lanes * warps
        taken = max(shared + system, 1)
        return min(self.warps // warps, self.registers // each, self.shared // taken)


_CDNA = Room(32, 4 * 512 * 64, 64 << 10)
"""Four units with 512 registers a lane each; wavefronts of 64 threads."""
ROOMS = {
    "sm_80": Room(64, 65536, 164 << 10),
    "sm_89": Room(48, 65536, 100 << 10),
    "sm_90": Room(64, 65536, 228 << 10),
    "sm_100": Room(64, 65536, 228 << 10),
    "sm_120": Room(48, 65536, 100 << 10),
    "gfx942": _CDNA,
}
"""By target (CUDA Programming Guide, technical specifications; CDNA 3 instruction set)."""

POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True)
class Usage:
    """What one compiled kernel takes, and what its code shows.

    Attributes:
        registers: per thread (on CDNA vector registers, accumulation registers included).
        spilled: bytes of register spills per thread, stores and loads together.
        shared: bytes of shared memory per program.
        programs: that a multiprocessor has room for at once.
        loops: loops that copy tiles ahead of their use.
        buffers: tiles that such a loop keeps of its operands, the fewest; 1 without a loop.
        ahead: copies that such a loop leaves in flight while it computes; 0 means no prefetch.
        unordered: accesses to shared or tensor memory that lack a barrier.
        turned: products' results that are transposed.
    """

    registers: int
    spilled: int
    shared: int
    programs: int
    loops: int
    buffers: int
    ahead: int
    unordered: int
    turned: int

    def worst(self, other: Usage) -> Usage:
        """Return the worse of both in each respect."""
        least = ("programs", "loops", "buffers", "ahead")
        pairs = {name: (value, getattr(other, name)) for name, value in asdict(self).items()}
        return Usage(**{k: min(v) if k in least else max(v) for k, v in pairs.items()})


def specialisation(launch: Launch) -> tuple[str, tuple[Any, ...]]:
    """What distinguishes two compilations of a kernel; equal launches compile once."""
    signature, constants, aligned = _signature(launch)
    key = (*signature.items(), *((k, str(v)) for k, v in constants.items()), *aligned)
    return launch.kernel.__name__, (*key, *launch.options.items())


def compile_launch(launch: Launch, target: str) -> Usage:
    """Compile exactly the specialisation that a launch would compile on the device.

    Raises:
        Exception: whatever the compiler raises.
    """
    signature, constants, aligned = _signature(launch)
    source = ASTSource(
        launch.kernel,
        signature,
        {(index,): value for index, value in constants.items()},
        {(index,): [["tt.divisibility", 16]] for index in aligned},
    )
    log = io.StringIO()
    with knobs.nvidia.scope(), knobs.compilation.scope(), contextlib.redirect_stdout(log):
        knobs.nvidia.dump_ptxas_log = True
        knobs.compilation.always_compile = True
        compiled = triton.compile(source, target=TARGETS[target][1], options=dict(launch.options))
    return _usage(compiled, log.getvalue(), target, launch.options["num_warps"])


def _signature(launch: Launch) -> tuple[dict[str, str], dict[int, Any], tuple[int, ...]]:
    """(types by name, constants by index, indices of arguments divisible by 16), as Triton's own
    launcher specialises them."""
    signature: dict[str, str] = {}
    constants: dict[int, Any] = {}
    aligned: list[int] = []
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        special = not parameter.do_not_specialize
        if parameter.is_constexpr or (special and type(value) is int and value == 1):
            signature[parameter.name] = "constexpr"
            constants[index] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
            if special and value.data_ptr() % 16 == 0:
                aligned.append(index)
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if special and value % 16 == 0:
                aligned.append(index)
    return signature, constants, tuple(aligned)


def _usage(compiled: Any, ptxas_log: str, target: str, warps: int) -> Usage:
    asm: Mapping[str, Any] = compiled.asm
    unordered = 0
    if "amdgcn" in asm:
        text = asm["amdgcn"]
        registers = _number(r"\.vgpr_count:\s+(\d+)", text)
        spilled = 4 * _number(r"\.vgpr_spill_count:\s+(\d+)", text)
    else:
        registers = _number(r"Used (\d+) registers", ptxas_log)
        spilled = _number(r"(\d+) bytes spill stores", ptxas_log)
        spilled += _number(r"(\d+) bytes spill loads", ptxas_log)
        unordered = len(unordered_writes(asm["ptx"], warps)) + len(unordered_products(asm["ptx"]))
    loops, shared = pipelined_loops(asm["ttgir"]), compiled.metadata.shared
    return Usage(
        registers=registers,
        spilled=spilled,
        shared=shared,
        programs=ROOMS[target].programs(registers, shared, warps),
        loops=len(loops),
        buffers=min((loop.buffers for loop in loops), default=1),
        ahead=min((loop.ahead for loop in loops), default=0),
        unordered=unordered,
        turned=len(turned_products(asm["ttgir"])),
    )


def _number(pattern: str, text: str) -> int:
    found = re.findall(pattern, text)
    assert found, f"the compiler's output has no {pattern}"
    return max(map(int, found))
