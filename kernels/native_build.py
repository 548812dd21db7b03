"""Builds the C++ sources into a library, for `native_kept` to keep in the user's cache.

As Triton does for its launchers, the sources are compiled where they run, for the processor that
they run on or the one that VLM_SERVE_NATIVE_ARCH names, once: the library is kept under the digest
of everything it depends on. It brings no OpenMP of its own: its symbols are those of the libgomp
that torch has loaded, so that both share one pool of worker threads. (Clang needs an OpenMP of its
own, with a pool of its own.)
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from vlm_serve.kernels.native_processor import (
    lacking,
    processor_identity,
    tile_registers_refused,
)
from vlm_serve.kernels.native_seal import seal
from vlm_serve.private_files import cache_path, make_private

SOURCES = (Path(__file__).parent / "native", Path(__file__).parents[1] / "models" / "native")
"""Roots of the C++ sources: ops of single layers, and the compiled forward on top of them. Sources
include headers by their path below a root. No two sources have the same name."""
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fopenmp",
    "-fPIC",
    # A product and a sum are one operation only where the code says so.
    "-ffp-contract=off",
    # Neither is used, and both keep compilers from vectorising.
    "-fno-math-errno",
    "-fno-trapping-math",
)
SANITIZER_FLAGS = (
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
    "-fno-omit-frame-pointer",
    "-g",
    "-O1",
)
WITHOUT_TILES = ("-mno-amx-bf16", "-mno-amx-int8", "-mno-amx-tile")
TIME_LIMIT_S = 120.0

APART = "_VLM_SERVE_KERNELS"
"""A variable for processes that this one starts: the temporary folder that has the library."""


_log = logging.getLogger(__name__)


class BuildError(Exception):
    """There is no library; the message says why, in one sentence."""


@dataclass(frozen=True)
class Recipe:
    """How the library is built here.

    Attributes:
        compiler: path of the C++ compiler.
        arch: the processor to compile for, as `-march` takes it.
        sanitized: whether the library checks its memory accesses and arithmetic as it runs.
        tiles: whether it may use tile registers if the processor has any.
    """

    compiler: str
    arch: str
    sanitized: bool
    tiles: bool = True

    @property
    def flags(self) -> tuple[str, ...]:
        """The compiler's flags."""
        without = () if self.tiles else WITHOUT_TILES
        sanitizer = SANITIZER_FLAGS if self.sanitized else ()
        return (*FLAGS, f"-march={self.arch}", *without, *sanitizer)

    def path(self) -> Path:
        """Where the library is kept, whether or not it has been built.

        Raises:
            BuildError: there is no home directory.
        """
        return _folder() / f"kernels-{self._digest().hex()[:32]}.so"

    def _digest(self) -> bytes:
        """Of sources, flags, compiler and processor."""
        hasher = blake3()
        for folder in SOURCES:
            for source in sorted(path for path in folder.rglob("*") if path.is_file()):
                hasher.update(source.relative_to(folder).as_posix().encode())
                hasher.update(source.read_bytes())
        status = Path(self.compiler).stat()
        identity = (self, self.flags, status.st_size, status.st_mtime_ns, platform.machine())
        hasher.update(repr(identity).encode())
        hasher.update(processor_identity())
        return hasher.digest()


def recipe() -> Recipe:
    """What the environment asks for: CXX, VLM_SERVE_NATIVE_ARCH and VLM_SERVE_NATIVE_SANITIZE.

    Raises:
        BuildError: there is no compiler.
    """
    arch = os.environ.get("VLM_SERVE_NATIVE_ARCH") or "native"
    sanitized = os.environ.get("VLM_SERVE_NATIVE_SANITIZE", "0") == "1"
    return Recipe(_compiler(), arch, sanitized, tiles=not tile_registers_refused())


def build(how: Recipe, target: Path) -> None:
    """Compiles in parallel and links, in a folder of its own, then moves: several processes may do
    this at once.

    Raises:
        BuildError: the compiler fails or takes too long, or this processor lacks instructions that
            the code would have.
        OSError: there is no room for the result.
    """
    _log.info("compiling kernels for this processor: half a minute on two idle cores, once")
    deadline = time.monotonic() + TIME_LIMIT_S * (5 if how.sanitized else 1)
    macros = instructions(how, deadline)
    make_private(target.parent)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        sources = translation_units()
        objects = [str(Path(scratch) / f"{source.stem}.o") for source in sources]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            command = (how.compiler, *how.flags, *includes(), "-c")
            jobs = [
                pool.submit(_run, deadline, *command, str(source), "-o", compiled, folder=scratch)
                for source, compiled in zip(sources, objects, strict=True)
            ]
        for job in jobs:
            job.result()
        linked = Path(scratch) / "linked.so"
        # GCC's without -fopenmp, which would bring in a second libgomp; Clang's calls are not
        # those of a libgomp.
        openmp = ("-fopenmp",) if "__clang__" in macros else ()
        sanitizer = SANITIZER_FLAGS if how.sanitized else ()
        link = (how.compiler, "-shared", *openmp, *sanitizer, *objects, "-o", str(linked))
        _run(deadline, *link, folder=scratch)
        seal(linked)
        linked.chmod(0o600)
        linked.replace(target)


def translation_units() -> list[Path]:
    """Return every source that is compiled to an object of its own."""
    return sorted(source for folder in SOURCES for source in folder.rglob("*.cpp"))


def includes() -> Iterator[str]:
    """The flags with which sources find the headers of every folder."""
    return (f"-I{folder}" for folder in SOURCES)


def _compiler() -> str:
    wanted = os.environ.get("CXX")
    # An entry of PATH that is no absolute path leads into whichever folder is the current one.
    path = os.pathsep.join(filter(os.path.isabs, os.get_exec_path()))
    for candidate in [wanted] if wanted else ["g++", "c++", "clang++"]:
        found = shutil.which(candidate, path=path)
        if found:
            return os.path.abspath(found)
    raise BuildError(f"{wanted or 'a C++ compiler'} was not found")


def _folder() -> Path:
    elsewhere, root = apart(), cache_path()
    if elsewhere is not None:
        return elsewhere
    if root is None:
        raise BuildError("there is no home directory to keep it in")
    return root / "native"


def apart() -> Path | None:
    """The temporary folder that this process, or the one that has started it, has built into."""
    named = os.environ.get(APART)
    return Path(named) if named else None


def instructions(how: Recipe, deadline: float) -> set[str]:
    """As `predefined`, for code that may run on this processor.

    Raises:
        BuildError: also if it would have instructions that the processor lacks: the first of them
            would end the process.
    """
    macros = predefined(how, deadline)
    problem = lacking(macros, compilers_choice=how.arch == "native")
    if problem:
        raise BuildError(f"code for {_march(how)} {problem}")
    return macros


def predefined(how: Recipe, deadline: float) -> set[str]:
    """The macros that the compiler predefines, which name the instructions that it would use.

    Args:
        how: the compiler and its flags.
        deadline: on the clock of `time.monotonic`.

    Raises:
        BuildError: the compiler fails, as it does if it does not know the processor.
    """
    command = (how.compiler, *how.flags, "-dM", "-E", "-x", "c++", os.devnull)
    try:
        defined = _run(deadline, *command)
    except _CompilerFailed as error:
        raise BuildError(f"the compiler failed with {_march(how)}: {error}") from error
    return {words[1] for line in defined.splitlines() if len(words := line.split()) > 1}


def _march(how: Recipe) -> str:
    named = "" if how.arch == "native" else " (VLM_SERVE_NATIVE_ARCH)"
    return f"-march={how.arch}{named}"


class _CompilerFailed(BuildError):
    """The first line of what the compiler said."""


def _run(deadline: float, *command: str, folder: str | None = None) -> str:
    """The output of a compiler's command.

    Args:
        folder: the current one of the compiler, and that of its own temporary files; None: those of
            this process.

    Raises:
        BuildError: it fails, or is not done by the deadline; then it is killed with all of the
            processes that it started.
    """
    # Not under the sanitizer's library, which is for the process that tests run in.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    if folder is not None:
        environment["TMPDIR"] = folder  # What a killed one leaves goes with the folder.
    try:
        started = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=environment,
            cwd=folder,
            process_group=0,
        )
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run: {error.strerror}") from error
    with started as process:
        try:
            output, said = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                limit = f"{TIME_LIMIT_S:g} seconds"
                raise BuildError(f"the compiler took more than {limit}") from error
            raise
    if process.returncode:
        lines = said.strip().splitlines()
        lines = [line for line in lines if "error" in line] or lines
        raise _CompilerFailed(lines[0] if lines else f"it exits with {process.returncode}")
    return output
