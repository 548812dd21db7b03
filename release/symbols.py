"""Compares a library's undefined symbols with the promises of a wheel's platform tag and of torch.

`manylinux_2_28` promises glibc 2.28 and the C++ library of GCC 8, on every processor. The functions
of OpenMP must come from the library that torch has loaded. Reads files with binutils' `readelf`.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

NEWEST = {
    "CXXABI": (1, 3, 11),
    "GCC": (8, 0, 0),
    "GLIBC": (2, 28),
    "GLIBCXX": (3, 4, 25),
}
"""The newest version of each set of symbols in manylinux_2_28."""
LIBRARIES = re.compile(r"(libc|libm|libgcc_s|libstdc\+\+|ld-linux-[a-z0-9-]+)\.so\.\d+")
"""Libraries that a wheel may need there; OpenMP's is not among them, since torch brings it."""
OPENMP = re.compile(r"GOMP_\w+|omp_\w+")
TORCHS = frozenset(
    (
        *("GOMP_barrier", "GOMP_loop_end", "GOMP_loop_end_nowait"),
        *("GOMP_loop_nonmonotonic_dynamic_next", "GOMP_loop_nonmonotonic_dynamic_start"),
        *("GOMP_parallel", "GOMP_single_start", "omp_get_num_threads", "omp_get_thread_num"),
    )
)
"""Functions of OpenMP that `torch/lib/libgomp.so.1` has in torch 2.13.0's wheels for both
architectures. A new name must be looked up in both before it is added."""


def undefined(library: Path) -> dict[str, str]:
    """Return the symbols that a library takes from others: name -> version, or empty.

    Weak ones without a version are left out, since the loader does without them.

    Raises:
        OSError, subprocess.CalledProcessError: `readelf` cannot be run, or not on this file.
    """
    found = {}
    for line in _read("--dyn-syms", library):
        words = line.split()
        if len(words) > 7 and words[6] == "UND":
            name, _, version = words[7].partition("@")
            if version or words[4] != "WEAK":
                found[name] = version
    return found


def defined(library: Path) -> set[str]:
    """Return the names of the symbols that a library has for others. Raises as `undefined`."""
    rows = (line.split() for line in _read("--dyn-syms", library))
    return {words[7].partition("@")[0] for words in rows if len(words) > 7 and words[6] != "UND"}


def needed(library: Path) -> set[str]:
    """Return the names of the libraries that are loaded with one. Raises as `undefined`."""
    return {
        found[1]
        for line in _read("--dynamic", library)
        if (found := re.search(r"\(NEEDED\).*\[(.+)\]", line))
    }


def find_problems(library: Path) -> list[str]:
    """Return a sentence for everything that the platform or torch does not promise.

    Raises:
        OSError, subprocess.CalledProcessError: as from `undefined`.
    """
    problems = [
        f"it needs {name}, which the platform may lack"
        for name in sorted(needed(library))
        if not LIBRARIES.fullmatch(name)
    ]
    for name, version in sorted(undefined(library).items()):
        kind, _, number = version.partition("_")
        if kind in NEWEST:
            if tuple(map(int, number.split("."))) > NEWEST[kind]:
                problems.append(f"{name} is of {version}, newer than the platform's")
        elif version:
            problems.append(f"{name} is of {version}, unknown to the platform")
        elif OPENMP.fullmatch(name) and name not in TORCHS:
            problems.append(f"{name} is not known to be in torch's OpenMP")
    return problems


def _read(what: str, library: Path) -> list[str]:
    command = ["readelf", "--wide", what, str(library)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()
