"""Compiler of the C++ sources, into the library in the cache of `native_kept`.

The sources are compiled once, where they run, for this processor or for VLM_SERVE_NATIVE_ARCH. (So
does Triton with its launchers.) The library is cached under the digest of everything it depends on.
It links no OpenMP: its symbols resolve to torch's libgomp, so both share one pool of worker
threads. (Clang needs an OpenMP of its own, with its own pool.)

Loading a truncated or changed library kills the process, by SIGBUS or SIGSEGV. A digest at the end
of the file, which the loader ignores, detects such damage.
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
from collections.abc import Iterator, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from vlm_serve.kernels.native_processor import lacking, processor_identity, tile_registers_refused
from vlm_serve.system.private_files import cache_path, make_private

SOURCES = (Path(__file__).parent / "native", Path(__file__).parents[1] / "models" / "native")
"""Roots of the C++ sources: ops of single layers, and the compiled forward on top of them. Sources
include headers by their path below a root. No two sources have the same name."""
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fopenmp",
    "-fPIC",
    # Fuse multiplications and additions only where the code says so.
    "-ffp-contract=off",
    # The code uses neither, and both prevent vectorisation.
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
"""Environment variable for child processes: the temporary folder of the library."""


_log = logging.getLogger(__name__)
_MARK = b"vlm-serve kernels 1"
_DIGEST_BYTES = 32


class BuildError(Exception):
    """No library can be built; the message gives the reason in one sentence."""


class TooSlowError(BuildError):
    """The compiler takes longer than its time limit, as on a busy machine."""


@dataclass(frozen=True)
class Recipe:
    """Compiler and flags of a build.

    Attributes:
        compiler: path of the C++ compiler.
        arch: target processor, as a value of `-march`.
        sanitized: build with the address and undefined-behaviour sanitizers.
        tiles: allow tile registers (AMX) if the processor has them.
        extra: further flags, after `-march`.
    """

    compiler: str
    arch: str
    sanitized: bool
    tiles: bool = True
    extra: tuple[str, ...] = ()

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags of the compiler."""
        without = () if self.tiles else WITHOUT_TILES
        sanitizer = SANITIZER_FLAGS if self.sanitized else ()
        return (*FLAGS, f"-march={self.arch}", *self.extra, *without, *sanitizer)

    def path(self) -> Path:
        """Return the path of the cached library, built or not.

        Raises:
            BuildError: there is no home directory.
        """
        return _folder() / f"kernels-{self._digest().hex()[:32]}.so"

    def _digest(self) -> bytes:
        """Return the digest of sources, flags, compiler and processor."""
        hasher = blake3(sources_digest())
        status = Path(self.compiler).stat()
        identity = (self, self.flags, status.st_size, status.st_mtime_ns, platform.machine())
        hasher.update(repr(identity).encode())
        hasher.update(processor_identity())
        return hasher.digest()


def recipe() -> Recipe:
    """Return the recipe of CXX, VLM_SERVE_NATIVE_ARCH and VLM_SERVE_NATIVE_SANITIZE.

    Raises:
        BuildError: there is no compiler.
    """
    arch = os.environ.get("VLM_SERVE_NATIVE_ARCH") or "native"
    sanitized = os.environ.get("VLM_SERVE_NATIVE_SANITIZE", "0") == "1"
    return Recipe(_compiler(), arch, sanitized, tiles=not tile_registers_refused())


def build(how: Recipe, target: Path) -> None:
    """Compile in parallel and link in a scratch folder, then move the library to `target`.

    Several processes may build at the same time.

    Raises:
        BuildError: the compiler fails or times out, or the code would use instructions missing on
            this processor.
        OSError: the result cannot be written.
    """
    _log.info("compiling kernels for this processor: half a minute on two idle cores, once")
    deadline = time.monotonic() + TIME_LIMIT_S * (5 if how.sanitized else 1)
    macros = instructions(how, deadline)
    make_private(target.parent)
    compile_to(target, how, macros, deadline)


def compile_to(target: Path, how: Recipe, macros: Set[str], deadline: float) -> None:
    """Compile and link as `build` does, for any processor: the code need not run here.

    Args:
        target: path of the library, in a folder that exists.
        how: compiler and flags.
        macros: their `predefined`.
        deadline: on the clock of `time.monotonic`.

    Raises:
        BuildError, OSError: as from `build`.
    """
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
        # With GCC, -fopenmp would link a second libgomp. Clang's calls need another library.
        openmp = ("-fopenmp",) if "__clang__" in macros else ()
        sanitizer = SANITIZER_FLAGS if how.sanitized else ()
        link = (how.compiler, "-shared", *openmp, *sanitizer, *objects, "-o", str(linked))
        _run(deadline, *link, folder=scratch)
        seal(linked)
        linked.chmod(0o600)
        linked.replace(target)


def sources_digest() -> bytes:
    """Return the digest of the names and contents of all sources."""
    hasher = blake3()
    for folder in SOURCES:
        for source in sorted(path for path in folder.rglob("*") if path.is_file()):
            hasher.update(source.relative_to(folder).as_posix().encode())
            hasher.update(source.read_bytes())
    return hasher.digest()


def translation_units() -> list[Path]:
    """Return the sources to compile, each to its own object."""
    return sorted(source for folder in SOURCES for source in folder.rglob("*.cpp"))


def includes() -> Iterator[str]:
    """Yield the include flags of the sources' roots."""
    return (f"-I{folder}" for folder in SOURCES)


def _compiler() -> str:
    wanted = os.environ.get("CXX")
    # A relative entry of PATH would depend on the current directory.
    path = os.pathsep.join(filter(os.path.isabs, os.get_exec_path()))
    for candidate in [wanted] if wanted else ["g++", "c++", "clang++"]:
        program = shutil.which(candidate, path=path)
        if program:
            return os.path.abspath(program)
    raise BuildError(f"{wanted or 'a C++ compiler'} was not found")


def _folder() -> Path:
    elsewhere, root = apart(), cache_path()
    if elsewhere is not None:
        return elsewhere
    if root is None:
        raise BuildError("there is no home directory to keep it in")
    return root / "native"


def apart() -> Path | None:
    """Return the temporary folder of a build by this process or its parent."""
    named = os.environ.get(APART)
    return Path(named) if named else None


def instructions(how: Recipe, deadline: float) -> set[str]:
    """Return `predefined` after a check against this processor.

    Raises:
        BuildError: also if the code would use instructions missing on the processor, since the
            first of them would kill the process.
    """
    macros = predefined(how, deadline)
    problem = lacking(macros, compilers_choice=how.arch == "native")
    if problem:
        raise BuildError(f"code for {_march(how)} {problem}")
    return macros


def predefined(how: Recipe, deadline: float) -> set[str]:
    """Return the compiler's predefined macros; they name the instructions it may use.

    Args:
        how: compiler and flags.
        deadline: on the clock of `time.monotonic`.

    Raises:
        BuildError: the compiler fails, for example because it does not know the processor.
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
    """The first line of the compiler's error output."""


def _run(deadline: float, *command: str, folder: str | None = None) -> str:
    """Run a compiler command and return its output.

    Args:
        folder: the compiler's current directory and its TMPDIR; None inherits those of this
            process.

    Raises:
        BuildError: the command fails or exceeds the deadline. Past the deadline it is killed with
            all of its child processes.
    """
    # The preloaded sanitizer is for the test process only.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    if folder is not None:
        environment["TMPDIR"] = folder  # Leftovers of a killed compiler go with the folder.
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
            output, errors = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                limit = f"{TIME_LIMIT_S:g} seconds"
                raise TooSlowError(f"the compiler took more than {limit}") from error
            raise
    if process.returncode:
        lines = errors.strip().splitlines()
        lines = [line for line in lines if "error" in line] or lines
        raise _CompilerFailed(lines[0] if lines else f"it exits with {process.returncode}")
    return output


def seal(path: Path) -> None:
    """Append the digest to a file. Raises OSError."""
    with path.open("r+b") as file:
        digest = blake3(file.read()).digest()
        file.write(digest + _MARK)
        file.flush()
        os.fsync(file.fileno())  # A power cut must not leave the name without its content.


def is_sealed(descriptor: int) -> bool:
    """Return True if a file is unchanged since `seal`. Raises OSError."""
    with open(os.dup(descriptor), "rb") as file:
        file.seek(0)
        data = file.read()
    content, end = data[: -_DIGEST_BYTES - len(_MARK)], data[-_DIGEST_BYTES - len(_MARK) :]
    return bool(content) and end == blake3(content).digest() + _MARK
