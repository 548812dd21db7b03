"""Runs the self-test of libraries of any processor, where this machine can run them.

A small program loads a library as Python would, beside a library of OpenMP, and prints the digests.
Another architecture's runs under QEMU (Debian's `qemu-user`).
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from vlm_serve.kernels.native_build import BuildError
from vlm_serve.kernels.native_processor import architecture
from vlm_serve.kernels.native_self_test import SelfTestDigests
from vlm_serve.kernels.native_shipped import Shipped

PROGRAM = r"""
#include <dlfcn.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cinttypes>
#include <cstdio>

int main(int, char** words) {
#ifdef __x86_64__
    syscall(SYS_arch_prctl, 0x1023, 18);  // The system grants tile registers on request.
#endif
    void* library = dlopen(words[1], RTLD_NOW);
    void* found = library ? dlsym(library, "vlm_self_test") : nullptr;
    uint64_t digests[4];
    if (!found || reinterpret_cast<int64_t (*)(uint64_t*)>(found)(digests)) {
        std::fprintf(stderr, "%s\n", found ? "the self-test did not complete" : dlerror());
        return 1;
    }
    for (uint64_t each : digests) std::printf("%016" PRIx64 "\n", each);
}
"""
LIMIT_S = 300.0


def compile_program(compiler: str, folder: Path) -> Path:
    """Compile the program for a compiler's architecture. Raises CalledProcessError."""
    source, program = folder / "digests.cpp", folder / "digests"
    source.write_text(PROGRAM)
    # OpenMP's library must be there, although the program itself does not call it.
    flags = ("-fopenmp", "-Wl,--no-as-needed")
    subprocess.run([compiler, *flags, str(source), "-o", str(program), "-ldl"], check=True)
    return program


def runner(machine: str) -> list[str] | None:
    """Return the words before a program of an architecture; None if it cannot be run here."""
    if machine == architecture():
        return []
    emulator = shutil.which(f"qemu-{machine}")
    return [emulator, "-cpu", "max", "-L", f"/usr/{machine}-linux-gnu"] if emulator else None


def digests(library: Path, command: Sequence[str]) -> SelfTestDigests:
    """Run a library's self-test.

    Args:
        library: its path.
        command: `runner`, and the path of the program.

    Raises:
        BuildError: it cannot be loaded or does not complete.
    """
    try:
        done = subprocess.run(
            [*command, str(library)], capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"the self-test takes more than {LIMIT_S:g} s") from error
    if done.returncode:
        raise BuildError(done.stderr.strip() or f"the self-test ends with {done.returncode}")
    float32, pairs, integers, tiles = done.stdout.split()
    kept = pairs if int(pairs, 16) else None
    return SelfTestDigests(float32, kept, bool(int(integers, 16)), bool(int(tiles, 16)))


def runs_here(library: Shipped) -> bool:
    """Return True if this processor, or QEMU, has the library's instructions."""
    return library.fits() if library.machine == architecture() else True
