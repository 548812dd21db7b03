"""Digests of the compiled library's arithmetic on fixed inputs (`native/self_test.cpp`).

Float32 results have the same bits on every processor and with every compiler, so their digest is
recorded here. A library with another digest was miscompiled and is not used. To change the
arithmetic on purpose, run

    make native-digest    (python -m vlm_serve.kernels.native_self_test)

record its output, and raise NUMERICS_VERSION in `engine/numerics/arithmetic.py`. Products of
bfloat16 pairs differ between processors; their digest is part of an arithmetic's name there.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from vlm_serve.kernels.native_build import BuildError

FLOAT32 = "d2ca0ef90a507022"
"""Digest of float32 results."""


@dataclass(frozen=True, slots=True)
class SelfTestDigests:
    """Results of the self-test; digests are 16 hexadecimal digits.

    Attributes:
        float32: digest of everything computed in float32.
        pairs: digest with products of bfloat16 pairs included; None without such an instruction.
        integer_dots: the library uses dot products of four or two bytes; the bits are the same
            without them.
        tiles: pairs are multiplied in AMX tiles, with other bits.
    """

    float32: str
    pairs: str | None
    integer_dots: bool = False
    tiles: bool = False


def run(library: ctypes.CDLL) -> SelfTestDigests:
    """Run the self-test, in about a millisecond.

    Raises:
        BuildError: the self-test fails to complete.
        AttributeError: the library has no self-test.
    """
    digests = (ctypes.c_uint64 * 4)()
    library.vlm_self_test.restype = ctypes.c_int64
    if library.vlm_self_test(digests):
        raise BuildError("the library's self-test did not complete")
    float32, pairs = (f"{digest:016x}" for digest in digests[:2])
    return SelfTestDigests(float32, pairs if digests[1] else None, *map(bool, digests[2:]))


def check(library: ctypes.CDLL) -> None:
    """Raise BuildError if the library's float32 digest is wrong."""
    computed = run(library).float32
    if computed != FLOAT32:
        raise BuildError(f"the library failed its self-test: digest {computed}, expected {FLOAT32}")


def _print_digest() -> None:
    import torch  # noqa: F401  # loads the OpenMP that the library uses

    from vlm_serve.kernels import native_build, native_kept

    library = ctypes.CDLL(str(native_kept.kept(native_build.recipe())))
    print(f'FLOAT32 = "{run(library).float32}"')


if __name__ == "__main__":
    _print_digest()
