"""Compile recorded launches for a target without a GPU, and read what their code takes."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import triton
from triton import knobs
from triton._C.libtriton import native_specialize_impl
from triton._utils import find_paths_if, get_iterable_path
from triton.backends.compiler import BaseBackend, GPUTarget
from triton.compiler import ASTSource

from benchmarks.common.aot_barriers import unordered_products, unordered_writes
from benchmarks.common.aot_code import pipelined_loops, turned_products
from vlm_serve.kernels.triton_support import Launch, Target

Path = tuple[int, ...]

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


def specialisation(launch: Launch) -> tuple[str, ...]:
    """What distinguishes two compilations of a kernel; equal launches compile once."""
    types, constants, attributes = _signature(launch)
    parts = types, {path: str(value) for path, value in constants.items()}, sorted(attributes)
    return (launch.kernel.__name__, *map(repr, parts), repr(launch.options))


def compile_launch(launch: Launch, target: str) -> Usage:
    """Compile exactly the specialisation that a launch would compile on the device.

    Raises:
        Exception: whatever the compiler raises.
    """
    source = ASTSource(launch.kernel, *_signature(launch))
    log = io.StringIO()
    with knobs.nvidia.scope(), knobs.compilation.scope(), contextlib.redirect_stdout(log):
        knobs.nvidia.dump_ptxas_log = True
        knobs.compilation.always_compile = True
        compiled = triton.compile(source, target=TARGETS[target][1], options=dict(launch.options))
    return _usage(compiled, log.getvalue(), target, launch.options["num_warps"])


def _signature(launch: Launch) -> tuple[dict[str, Any], dict[Path, Any], dict[Path, Any]]:
    """(types by name, constants by path, attributes by path) as Triton's launcher specialises
    them: a path is the number of an argument, and those of a part within named tuples."""
    parameters = launch.kernel.params
    values = [launch.arguments[each.name] for each in parameters]
    found = [_specialised(*each) for each in zip(parameters, values, strict=True)]
    types, keys = [kind for kind, _ in found], [key for _, key in found]
    constants = find_paths_if(types, lambda _, kind: kind == "constexpr")
    aligned = find_paths_if(keys, lambda _, key: isinstance(key, str))
    return (
        {each.name: kind for each, kind in zip(parameters, types, strict=True)},
        {path: get_iterable_path(values, path) for path in constants},
        {path: BaseBackend.parse_attr(get_iterable_path(keys, path)) for path in aligned},
    )


def _specialised(parameter: Any, value: Any) -> tuple[Any, Any]:
    """Return an argument's type and, of one that counts for it, what it is divisible by."""
    if parameter.is_constexpr:
        return "constexpr", None
    special = not parameter.do_not_specialize
    kind, key = native_specialize_impl(BaseBackend, value, False, special, special)
    return kind, None if kind == "constexpr" else key


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
