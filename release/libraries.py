"""Compiles the kernels for every processor of a platform, into the folder of a wheel.

The compiler and its flags are those of a build at the first start (`kernels/native_build.py`) with
another `-march`, so results have the same bits. Debian's cross compiler makes those of the other
architecture: `g++-aarch64-linux-gnu`.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from blake3 import blake3
from symbols import find_problems

from vlm_serve.kernels.native_build import (
    BuildError,
    Recipe,
    compile_to,
    is_sealed,
    predefined,
    recipe,
    sources_digest,
)
from vlm_serve.kernels.native_processor import architecture, flags_of
from vlm_serve.kernels.native_shipped import Shipped, write_index

PROCESSORS = {
    "x86_64": (
        "sapphirerapids",  # AMX: products in tile registers.
        "cooperlake",  # AVX512-BF16: products of pairs. Zen 4 has them too.
        "cascadelake",  # AVX512-VNNI: sums of bytes.
        "x86-64-v4",
        "alderlake",  # AVX-VNNI.
        "x86-64-v3",
    ),
    "aarch64": ("armv8.2-a+dotprod+i8mm", "armv8.2-a+dotprod", "armv8.2-a"),
}
"""Values of `-march` by architecture, the best first."""
WITHOUT = {"sapphirerapids": ("-mno-avx512vp2intersect",)}
"""Flags against instructions that GCC 12 expects of a processor by mistake."""
LIMIT_S = 1200.0
"""The longest that one library may take."""


def libraries(machine: str, folder: Path, kept: Path) -> Iterator[Shipped]:
    """Compile all libraries of an architecture, write their index and yield each as it is ready.

    Args:
        machine: a key of `PROCESSORS`.
        folder: where libraries and index go; it is made.
        kept: a folder of libraries from earlier runs, to be used again.

    Raises:
        BuildError: there is no compiler for it, or it fails, or a library needs more than the
            wheel's platform promises.
        OSError: a file cannot be written.
    """
    folder.mkdir(parents=True)
    kept.mkdir(parents=True, exist_ok=True)
    compiler, done = compiler_for(machine), []
    for arch in PROCESSORS[machine]:
        how = Recipe(compiler, arch, sanitized=False, extra=WITHOUT.get(arch, ()))
        deadline = time.monotonic() + LIMIT_S
        macros = predefined(how, deadline)
        file = f"kernels-{arch}-{_digest(how)}.so"
        if not _whole(kept / file):
            compile_to(kept / file, how, macros, deadline)
        problems = find_problems(kept / file)
        if problems:
            raise BuildError(f"{file}: {'; '.join(problems)}")
        shutil.copyfile(kept / file, folder / file)
        done.append(Shipped(file, arch, machine, tuple(sorted(flags_of(macros)))))
        yield done[-1]
    write_index(folder, done)


def compiler_for(machine: str) -> str:
    """Return the path of a compiler for an architecture. Raises BuildError."""
    if machine == architecture():
        return recipe().compiler
    name = f"{machine}-linux-gnu-g++"
    found = shutil.which(name)
    if found is None:
        raise BuildError(f"{name} was not found: it is in Debian's g++-{machine}-linux-gnu")
    return found


def _digest(how: Recipe) -> str:
    """Return the digest of the sources, the flags and the compiler."""
    status = Path(how.compiler).stat()
    identity = repr((how.flags, how.compiler, status.st_size, status.st_mtime_ns))
    return blake3(sources_digest() + identity.encode()).hexdigest()[:16]


def _whole(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return is_sealed(descriptor)
    finally:
        os.close(descriptor)
