"""Compiled CPU kernels: the C++ sources in `native/`, built on first use with the compiler at hand.

As Triton does for its launchers, the sources are compiled where they run and for the processor that
they run on (`-march=native`), once: the library is kept in the user's cache under the digest of
everything it depends on. Without a compiler, or where building or loading fails, there is no
library and torch computes everything. The library brings no OpenMP of its own: its symbols are
those of the libgomp that torch has loaded, so that both share one pool of worker threads.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from blake3 import blake3

SOURCES = Path(__file__).parent / "native"
FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fopenmp",
    "-fPIC",
    # Neither is used, and both keep compilers from vectorising.
    "-fno-math-errno",
    "-fno-trapping-math",
)
_TIME_LIMIT_S = 120
_loading = threading.Lock()


class BuildError(Exception):
    """There is no library; the message says why."""


def load() -> ctypes.CDLL:
    """The library of all sources, built if it has not been on this machine. A second thread that
    asks meanwhile waits for the first.

    Raises:
        BuildError: there is no compiler, or it failed, or its result cannot be loaded.
    """
    with _loading:
        return _load()


def built() -> bool:
    """Whether `load` would find the library instead of building it."""
    try:
        return _path(_compiler()).exists()
    except (BuildError, OSError):
        return False


def _path(compiler: str) -> Path:
    return _folder() / f"kernels-{_digest(compiler).hex()[:32]}.so"


@cache
def _load() -> ctypes.CDLL:
    compiler = _compiler()
    try:
        path = _path(compiler)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            _build(compiler, sorted(SOURCES.glob("*.cpp")), path)
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(_reason(error)) from error


def call(name: str, *arguments: ctypes._CArgObject | ctypes.c_int64) -> None:
    """Calls a function of the library that returns what `guarded` in `native/guard.h` does.

    Raises:
        MemoryError: it had not enough for its work.
        BuildError: as from `load`.
    """
    if getattr(load(), name)(*arguments):
        raise MemoryError(f"{name} has not enough memory")


def _compiler() -> str:
    wanted = os.environ.get("CXX")
    for candidate in [wanted] if wanted else ["g++", "c++", "clang++"]:
        found = shutil.which(candidate)
        if found:
            return found
    raise BuildError(f"{wanted or 'a C++ compiler'} was not found")


def _folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        root = Path(base) if base else Path.home() / ".cache"
    except RuntimeError as error:
        raise BuildError("there is no home directory to keep it in") from error
    return root / "vlm-serve" / "native"


def _digest(compiler: str) -> bytes:
    """Of sources, flags, compiler and processor."""
    hasher = blake3()
    for source in sorted(SOURCES.iterdir()):
        hasher.update(source.name.encode())
        hasher.update(source.read_bytes())
    status = Path(compiler).stat()
    identity = (FLAGS, compiler, status.st_size, status.st_mtime_ns, platform.machine())
    hasher.update(repr(identity).encode())
    hasher.update(_processor())
    return hasher.digest()


def _processor() -> bytes:
    """What instructions this processor has: `-march=native` means them all."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return platform.processor().encode()
    return b"\n".join(
        next((line for line in lines if line.startswith(key)), b"")
        for key in (b"model name", b"flags", b"Features")
    )


def _build(compiler: str, sources: Sequence[Path], target: Path) -> None:
    """Compile in parallel and link, in a folder of its own, then move: several processes may do
    this at once."""
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        objects = [str(Path(scratch) / f"{source.stem}.o") for source in sources]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            jobs = [
                pool.submit(_run, compiler, *FLAGS, "-c", str(source), "-o", compiled)
                for source, compiled in zip(sources, objects, strict=True)
            ]
        for job in jobs:
            job.result()
        linked = str(Path(scratch) / "linked.so")
        # Without -fopenmp, which would bring in a second libgomp.
        _run(compiler, "-shared", *objects, "-o", linked)
        os.replace(linked, target)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=_TIME_LIMIT_S, text=True)


def _reason(error: OSError | subprocess.SubprocessError) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = str(error.stderr).strip().splitlines()
        return f"the compiler failed: {lines[0] if lines else error.returncode}"
    return str(error)
