"""Compile recorded launches for a target without a GPU, and read their resource use."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vlm_serve.kernels.triton_support import Launch, Target

TARGETS = {
    **{
        f"sm_{arch}": (Target("cuda", arch), GPUTarget("cuda", arch, 32))
        for arch in (80, 89, 90, 100, 120)
    },
    "gfx942": (Target("hip", "gfx942"), GPUTarget("hip", "gfx942", 64)),
}

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
    """What one compiled kernel takes.

    Attributes:
        registers: per thread (on CDNA vector registers, accumulation registers included).
        spilled: bytes of register spills per thread, stores and loads together.
        shared: bytes of shared memory per program.
    """

    registers: int
    spilled: int
    shared: int


def specialisation(launch: Launch) -> tuple[str, tuple[Any, ...]]:
    """What distinguishes two compilations of a kernel; equal launches compile once."""
    signature, constants, aligned = _signature(launch)
    key = (*signature.items(), *((k, str(v)) for k, v in constants.items()), *aligned)
    return launch.kernel.__name__, (*key, *launch.options.items())


def compile_launch(launch: Launch, target: str) -> Usage:
    """Compile exactly the specialisation that a launch would compile on the device.

    Raises:
        Exception: whatever the compiler raises, or that the target has too little shared memory.
    """
    limits, gpu = TARGETS[target]
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
        compiled = triton.compile(source, target=gpu, options=dict(launch.options))
    usage = _usage(compiled, log.getvalue())
    if usage.shared > limits.shared_memory:
        raise ValueError(
            f"takes {usage.shared} bytes of shared memory, of which there are "
            f"{limits.shared_memory}"
        )
    return usage


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


def _usage(compiled: Any, ptxas_log: str) -> Usage:
    asm: Mapping[str, Any] = compiled.asm
    if "amdgcn" in asm:
        text = asm["amdgcn"]
        registers = _number(r"\.vgpr_count:\s+(\d+)", text)
        spilled = 4 * _number(r"\.vgpr_spill_count:\s+(\d+)", text)
    else:
        registers = _number(r"Used (\d+) registers", ptxas_log)
        spilled = _number(r"(\d+) bytes spill stores", ptxas_log)
        spilled += _number(r"(\d+) bytes spill loads", ptxas_log)
    return Usage(registers, spilled, compiled.metadata.shared)


def _number(pattern: str, text: str) -> int:
    found = re.findall(pattern, text)
    assert found, f"the compiler's output has no {pattern}"
    return max(map(int, found))
