"""What the compiled library's arithmetic gives for fixed inputs (`native/self_test.cpp`).

Its float32 results have the same bits on every processor and with every compiler, so their digest
is recorded here: a library with another one has been compiled wrong, and nobody uses it. Whoever
changes the arithmetic on purpose runs

    make native-digest    (python -m vlm_serve.kernels.native_self_test)

records what it prints, and raises NUMERICS_VERSION in `engine/arithmetic.py`. Products of bfloat16
pairs are the processor's own; their digest is part of the name of an arithmetic there.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from vlm_serve.kernels.native_build import BuildError

FLOAT32 = "4aff477e050ad890"
"""The digest of float32 results."""


@dataclass(frozen=True, slots=True)
class Digests:
    """Each 16 hexadecimal digits.

    Attributes:
        float32: of everything computed in float32.
        pairs: of that and of products of bfloat16 pairs; None if the library has none.
        tiles: whether those are made tile by tile, which gives them other bits.
        integer_dots: whether it has instructions that sum products of bytes, four at once or two;
            they have the same bits where it does not.
    """

    float32: str
    pairs: str | None
    integer_dots: bool = False
    tiles: bool = False


def run(library: ctypes.CDLL) -> Digests:
    """Runs the self-test, which takes about a millisecond.

    Raises:
        BuildError: it does not come to its end.
        AttributeError: the library has none.
    """
    digests = (ctypes.c_uint64 * 4)()
    library.vlm_self_test.restype = ctypes.c_int64
    if library.vlm_self_test(digests):
        raise BuildError("the library's self-test does not come to its end")
    float32, pairs = (f"{digest:016x}" for digest in digests[:2])
    return Digests(float32, pairs if digests[1] else None, *map(bool, digests[2:]))


def check(library: ctypes.CDLL) -> None:
    """Raises BuildError if the library computes other bits than it must."""
    found = run(library).float32
    if found != FLOAT32:
        raise BuildError(f"the library failed its self-test: digest {found}, expected {FLOAT32}")


def _print_digest() -> None:
    import torch  # noqa: F401  # brings the OpenMP that the library uses

    from vlm_serve.kernels import native_build, native_kept

    library = ctypes.CDLL(str(native_kept.kept(native_build.recipe())))
    print(f'FLOAT32 = "{run(library).float32}"')


if __name__ == "__main__":
    _print_digest()
