"""Builds the source distribution and wheels with compiled kernels: `make wheels`.

    python release/wheels.py [--machines x86_64 aarch64] [--out dist] [--kept build/kernels]

A wheel is `py3-none-manylinux_2_28_<machine>`: it has no extension module, but shared libraries
that `kernels/native_shipped.py` loads with ctypes, for any version of Python. Each wheel is built
from the unpacked source distribution, so both have the same files.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from digests import compile_program, digests, runner, runs_here
from libraries import PROCESSORS, compiler_for, libraries

from vlm_serve.kernels.native_build import BuildError
from vlm_serve.kernels.native_self_test import FLOAT32
from vlm_serve.kernels.native_shipped import Shipped

ROOT = Path(__file__).resolve().parent.parent
PLATFORM = "manylinux_2_28"
BUILD = (
    "import json, sys\n"
    "from setuptools import build_meta\n"
    "print(getattr(build_meta, sys.argv[1])(sys.argv[2], json.loads(sys.argv[3])))\n"
)
"""Program that calls a function of the build backend; it prints the name of the file made."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Build everything and print what was made; return 1 if a compiler is missing or fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--machines", nargs="*", choices=PROCESSORS, default=list(PROCESSORS))
    parser.add_argument("--out", type=Path, default=ROOT / "dist", metavar="FOLDER")
    parser.add_argument("--kept", type=Path, default=ROOT / "build" / "kernels", metavar="FOLDER")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="vlm-serve-source-") as scratch:
        source = build(tracked(Path(scratch)), options.out, "sdist")
    show(source)
    for machine in options.machines:
        try:
            show(platform_wheel(source, machine, options.out, options.kept))
        except BuildError as error:
            print(f"wheels: {machine}: {error}", file=sys.stderr)
            return 1
    return 0


def tracked(target: Path) -> Path:
    """Copy what git tracks into an empty folder and return it; nothing else may be packed.

    Raises:
        subprocess.CalledProcessError, OSError: this is no git checkout, or has lost a file.
    """
    command = ["git", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, path, follow_symlinks=False)
    return target


def build(tree: Path, out: Path, kind: str, *options: str) -> Path:
    """Build a source tree's "sdist" or "wheel" into a folder and return its path.

    Args:
        tree: with setup.py and pyproject.toml.
        out: an existing folder; a file of the same name is replaced.
        kind: of the distribution.
        options: of setuptools' command.

    Raises:
        subprocess.CalledProcessError: it cannot be built; setuptools has printed the reason.
    """
    settings = json.dumps({"--build-option": options})
    command = [sys.executable, "-W", "ignore", "-c", BUILD, f"build_{kind}", str(out), settings]
    done = subprocess.run(command, cwd=tree, check=True, stdout=subprocess.PIPE, text=True)
    return out / done.stdout.strip().splitlines()[-1]


def unpack(source: Path, folder: Path) -> None:
    """Unpack a source distribution of our own; Debian 12's Python 3.11.2 knows no filters."""
    with tarfile.open(source) as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(folder)


def platform_wheel(source: Path, machine: str, out: Path, kept: Path) -> Path:
    """Build the wheel of an architecture from a source distribution and return its path.

    Args:
        source: the source distribution.
        machine: a key of `PROCESSORS`.
        out: folder of the wheel.
        kept: folder of libraries from earlier runs.

    Raises:
        BuildError, OSError: as from `libraries`.
        subprocess.CalledProcessError: as from `build`.
    """
    with tempfile.TemporaryDirectory(prefix="vlm-serve-wheel-") as scratch:
        unpack(source, Path(scratch))
        (tree,) = (each for each in Path(scratch).iterdir() if each.is_dir())
        shipped = tree / "vlm_serve" / "kernels" / "shipped"
        began, command = time.monotonic(), runner(machine)
        if command is not None:
            command.append(str(compile_program(compiler_for(machine), Path(scratch))))
        for library in libraries(machine, shipped, kept):
            found = self_test(library, shipped, command)
            spent = time.monotonic() - began
            print(f"  {library.arch}, after {spent:.0f} s: {found}", flush=True)
        return build(tree, out, "wheel", f"--plat-name={PLATFORM}_{machine}")


def self_test(library: Shipped, folder: Path, command: list[str] | None) -> str:
    """Check a library's digest of float32 where it can run, and return the result in words.

    Raises:
        BuildError: the digest is another one, or the self-test fails.
    """
    if command is None or not runs_here(library):
        return "not run, for want of such a processor"
    found = digests(folder / library.file, command)
    if found.float32 != FLOAT32:
        raise BuildError(f"{library.file} computes {found.float32}, not {FLOAT32}")
    how = "tiles" if found.tiles else "pairs"
    return (
        f"float32 as everywhere, bfloat16 in {how}: {found.pairs}"
        if found.pairs
        else "float32 as everywhere"
    )


def show(path: Path) -> None:
    """Print a file's name and size."""
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB", flush=True)


if __name__ == "__main__":
    sys.exit(main())
