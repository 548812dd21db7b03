"""Which instructions compiled code may use: what a compiler says of its code against what the
processor has. One that the processor lacks would end the process without a word."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Set
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")

# Where Linux's name of an x86 extension is not the macro's in lower case.
_FLAGS = {
    "__SSE3__": "pni",
    "__LZCNT__": "abm",
    "__BMI__": "bmi1",
    "__SHA__": "sha_ni",
    "__PCLMUL__": "pclmulqdq",
    "__AVXVNNI__": "avx_vnni",
    "__AVXIFMA__": "avx_ifma",
    "__AVX512BF16__": "avx512_bf16",
    "__AVX512FP16__": "avx512_fp16",
    "__AVX512VNNI__": "avx512_vnni",
    "__AVX512VBMI2__": "avx512_vbmi2",
    "__AVX512BITALG__": "avx512_bitalg",
    "__AVX512VPOPCNTDQ__": "avx512_vpopcntdq",
    "__AVX512VP2INTERSECT__": "avx512_vp2intersect",
    "__APX_F__": "apx",
}
_SAME = (
    *("SSSE3", "SSE4_1", "SSE4_2", "POPCNT", "MOVBE", "AES", "GFNI", "VAES", "VPCLMULQDQ"),
    *("AVX", "AVX2", "FMA", "F16C", "BMI2", "ADX", "XOP", "FMA4", "TBM", "SSE4A"),
    *("AVX512F", "AVX512CD", "AVX512BW", "AVX512DQ", "AVX512VL", "AVX512IFMA", "AVX512VBMI"),
    *("AMX_TILE", "AMX_BF16", "AMX_INT8", "AMX_FP16"),
)
_X86_FLAGS = _FLAGS | {f"__{name}__": name.lower() for name in _SAME}
_NEEDED = {"__AVX2__": "AVX2", "__FMA__": "FMA"}


def lacking(macros: Set[str], *, compilers_choice: bool) -> str | None:
    """Why code must not run on this processor.

    Args:
        macros: what the compiler predefines with the flags that the code is compiled with.
        compilers_choice: the compiler has asked the processor itself (`-march=native`).

    Returns:
        A predicate such as "would use avx512f, which this processor lacks"; None if it may run, or
        if this is no x86 processor under Linux and nothing is known of it.
    """
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return None
    missing = [name for macro, name in _NEEDED.items() if macro not in macros]
    if missing:
        return f"has no {' and '.join(missing)}, without which the kernels are not built"
    have = _flags()
    if compilers_choice or not have:
        return None
    used = {flag for macro, flag in _X86_FLAGS.items() if macro in macros}
    lacks = sorted(used - have)
    return f"would use {', '.join(lacks)}, which this processor lacks" if lacks else None


def processor_name() -> str:
    """What it calls itself, as far as that can be known."""
    line = next((line for line in _cpuinfo() if line.startswith("model name")), "")
    return line.partition(":")[2].strip() or platform.processor() or platform.machine()


def processor_identity() -> bytes:
    """What instructions this processor has, and its name: `-march=native` means them all."""
    lines = _cpuinfo()
    if not lines:
        return platform.processor().encode()
    return "\n".join(
        next((line for line in lines if line.startswith(key)), "")
        for key in ("model name", "flags", "Features")
    ).encode()


def tile_registers_refused() -> bool:
    """Whether the processor has tile registers (AMX) that the system does not let this process use.

    Linux gives them to a process that asks, which this does.
    """
    if "amx_tile" not in _flags():
        return False
    arch_prctl, request, tile_data = 158, 0x1023, 18  # ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    result: int = ctypes.CDLL(None).syscall(arch_prctl, request, tile_data)
    return result != 0


def _flags() -> set[str]:
    line = next((line for line in _cpuinfo() if line.startswith("flags")), "")
    return set(line.partition(":")[2].split())


def _cpuinfo() -> list[str]:
    try:
        return _CPUINFO.read_text(errors="replace").splitlines()
    except OSError:
        return []
