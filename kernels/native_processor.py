"""Check of compiled code's instructions against those of the processor.

An unsupported instruction would kill the process without a message.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Set
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")

# x86 extensions whose Linux name is not the macro's name in lower case.
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
_ARM_FLAGS = {
    "__ARM_FEATURE_ATOMICS": "atomics",
    "__ARM_FEATURE_CRC32": "crc32",
    "__ARM_FEATURE_DOTPROD": "asimddp",
    "__ARM_FEATURE_FP16_VECTOR_ARITHMETIC": "asimdhp",
    "__ARM_FEATURE_MATMUL_INT8": "i8mm",
    "__ARM_FEATURE_QRDMX": "asimdrdm",
    "__ARM_FEATURE_SVE": "sve",
    "__ARM_NEON": "asimd",
}
_NEEDED = {"__AVX2__": "AVX2", "__FMA__": "FMA"}


def lacking(macros: Set[str], *, compilers_choice: bool) -> str | None:
    """Return the reason why code cannot run on this processor, or None.

    Args:
        macros: the compiler's predefined macros with the flags of the build.
        compilers_choice: the compiler detected the processor itself (`-march=native`).

    Returns:
        A predicate such as "would use avx512f, which this processor lacks". None if the code can
        run, and also off x86 and Linux, where the instructions are unknown.
    """
    if architecture() != "x86_64":
        return None
    missing = [name for macro, name in _NEEDED.items() if macro not in macros]
    if missing:
        return f"has no {' and '.join(missing)}, without which the kernels are not built"
    have = flags()
    if compilers_choice or not have:
        return None
    lacks = sorted(flags_of(macros) - have)
    return f"would use {', '.join(lacks)}, which this processor lacks" if lacks else None


def processor_name() -> str:
    """Return the processor's model name, or the best available substitute."""
    line = next((line for line in _cpuinfo() if line.startswith("model name")), "")
    return line.partition(":")[2].strip() or platform.processor() or platform.machine()


def processor_identity() -> bytes:
    """Return this processor's name and instructions, the input of `-march=native`."""
    lines = _cpuinfo()
    if not lines:
        return platform.processor().encode()
    return "\n".join(
        next((line for line in lines if line.startswith(key)), "")
        for key in ("model name", "flags", "Features")
    ).encode()


def tile_registers_refused() -> bool:
    """Return True if the processor has tile registers (AMX) but the system refuses them.

    Linux grants them to a process on request; this function makes the request.
    """
    if "amx_tile" not in flags():
        return False
    arch_prctl, request, tile_data = 158, 0x1023, 18  # ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    result: int = ctypes.CDLL(None).syscall(arch_prctl, request, tile_data)
    return result != 0


def architecture() -> str:
    """Return the name of this processor's architecture: x86_64, aarch64 or another one."""
    name = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


def flags_of(macros: Set[str]) -> set[str]:
    """Return the names in /proc/cpuinfo of the instructions that predefined macros allow."""
    names = _X86_FLAGS | _ARM_FLAGS
    return {flag for macro, flag in names.items() if macro in macros}


def flags() -> set[str]:
    """Return the names of this processor's instructions; empty if the system does not tell."""
    line = next((line for line in _cpuinfo() if line.startswith(("flags", "Features"))), "")
    return set(line.partition(":")[2].split())


def _cpuinfo() -> list[str]:
    try:
        return _CPUINFO.read_text(errors="replace").splitlines()
    except OSError:
        return []
