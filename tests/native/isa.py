"""Compares what the kernels compute on several processors: `make test-isa`.

The program in this folder calls every kernel with seeded inputs and prints a digest of each result.
It is built for the processors below, and run where this machine can: its own processor runs the
library that Python would load, QEMU the code of another architecture if Debian's cross compiler for
it is there, and a header stands in for the tile registers (AMX) that a processor lacks. float32
must have the same bits everywhere, bfloat16 where it is multiplied in the same way.
Then the kernels' Python tests run, natively and as on a machine that has AVX2 at most.

What is only compiled, or not even that, is listed with its reason and counted.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from vlm_serve.kernels.native_build import (
    SOURCES,
    BuildError,
    Recipe,
    includes,
    predefined,
    recipe,
    translation_units,
)
from vlm_serve.kernels.native_kept import kept
from vlm_serve.kernels.native_library import FUNCTIONS
from vlm_serve.kernels.native_processor import lacking

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
HOST = {"amd64": "x86_64", "arm64": "aarch64"}.get(
    platform.machine().lower(), platform.machine().lower()
)
PROCESSORS = {
    "native": HOST,
    "x86-64-v3": "x86_64",
    "x86-64-v4": "x86_64",
    "znver4": "x86_64",
    "sapphirerapids": "x86_64",
    "emulated tiles": "x86_64",
    "armv8.2-a": "aarch64",
}
"""What `-march` takes, and the architecture of it; EMULATED is none of those."""
PRODUCTS = ("singles", "pairs", "tiles")
# For compilers that do not know a processor (GCC knows znver4 from 12.3 on): another one with the
# same instructions for the kernels.
STAND_INS = {"znver4": "cooperlake"}
# Tile registers in memory, beside the instructions of a processor without them.
EMULATED, EMULATED_BESIDE = "emulated tiles", "cooperlake"
EMULATED_FLAGS = (
    *("-mamx-tile", "-mamx-int8", "-mamx-bf16"),
    *("-include", str(FOLDER / "emulated_tiles.h")),
)
# A kernel's struct that gains a field must not find zero in it.
EXTRA_FLAGS = ("-Werror=missing-field-initializers", *includes())
COMPILE_LIMIT_S, RUN_LIMIT_S, TEST_LIMIT_S = 300.0, 900.0, 1200.0
TESTS = ("tests/kernels", *map(str, ROOT.glob("tests/models/test_*_step.py")))
# Neither depends on the processor's instructions: Triton's kernels are interpreted or need a GPU.
WITHOUT = "not triton and not aot"
AS_WITH_AVX2 = {
    "VLM_SERVE_NATIVE_ARCH": "x86-64-v3",
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
}


class Unbuilt(Exception):
    """There is no program for a processor; the message says why."""


@dataclass(frozen=True)
class Report:
    """What the program prints.

    Attributes:
        products: how bfloat16 is multiplied: in "singles", "pairs" or "tiles" an instruction.
        digests: by case: activations, kernel and what it was called with.
        differing: cases that depend on the number of threads or on other rows, and how.
    """

    products: str
    digests: dict[str, str]
    differing: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What has become of the program for one processor.

    Attributes:
        processor: a key of `PROCESSORS`.
        state: "run", "compiled only" or "not built".
        note: how it was run, or why not.
        report: what it printed, if it was run.
        seconds: how long building and running took.
    """

    processor: str
    state: str
    note: str
    report: Report | None = None
    seconds: float = 0.0


def outcome(processor: str) -> Outcome:
    """Builds the program for a processor and runs it where that is possible.

    Raises:
        BuildError: the library cannot be built.
        RuntimeError: the compiler or the program fails.
    """
    began = time.monotonic()
    try:
        how = _recipe(processor)
        command, obstacle = _runner(how, PROCESSORS[processor])
    except (Unbuilt, BuildError) as error:
        return Outcome(processor, "not built", str(error))
    notes = []
    if processor == EMULATED:
        notes.append(f"beside the instructions of {how.arch}")
    elif how.arch != processor:
        notes.append(f"as {how.arch}, since {how.compiler} does not know it")
    if command:
        notes.append(f"under {command[0]}")
    with tempfile.TemporaryDirectory() as folder:
        foreign, emulated = PROCESSORS[processor] != HOST, processor == EMULATED
        library = None if foreign or emulated or obstacle else kept(how)
        extra = EMULATED_FLAGS if emulated else ()
        program = _build(how, Path(folder), extra, library, foreign=foreign)
        if obstacle:
            note, seconds = "; ".join([*notes, obstacle]), time.monotonic() - began
            return Outcome(processor, "compiled only", note, seconds=seconds)
        printed = _run([*command, str(program)], RUN_LIMIT_S, results=(0, 1))
    return Outcome(processor, "run", "; ".join(notes), parsed(printed), time.monotonic() - began)


def parsed(printed: str) -> Report:
    """What the program has printed, line by line."""
    products, digests, differing = "singles", {}, []
    for line in printed.splitlines():
        kind, _, rest = line.partition(" ")
        if kind == "products":
            products = rest
        elif kind == "differs":
            differing.append(rest)
        elif kind in ("float32", "bf16"):
            name, digest = rest.split()
            digests[f"{kind} {name}"] = digest
    return Report(products, digests, tuple(differing))


def kernel(case: str) -> str:
    """The kernel that a case calls."""
    return case.split()[1].partition("/")[0]


def differences(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """A line for every case whose result is not what it must be, and for every kernel without."""
    reports = [(each.processor, each.report) for each in outcomes if each.report]
    for processor, report in reports:
        for line in report.differing:
            yield f"{processor}: {line} differ"
        for name in sorted(set(FUNCTIONS) - {kernel(case) for case in report.digests}):
            yield f"{processor}: no case calls {name}"
        for case, digest in report.digests.items():
            # The first build whose result must be the same; for the first one, itself.
            first, other = next(
                (name, each)
                for name, each in reports
                if case.startswith("float32 ") or each.products == report.products
            )
            if other.digests.get(case) != digest:
                theirs = other.digests.get(case, "absent")
                yield f"{kernel(case)}: {case} is {digest} on {processor}, {theirs} on {first}"


def summary(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """The lines of a table of what has been run, and of what has been compared."""
    for each in outcomes:
        cases = f"{len(each.report.digests)} cases" if each.report else ""
        line = f"{each.processor:14} {each.state:13} {cases:10} {each.seconds:4.0f} s  {each.note}"
        yield line.rstrip()
    states = [each.state for each in outcomes]
    counts = (f"{states.count(state)} {state}" for state in ("run", "compiled only", "not built"))
    yield f"{len(outcomes)} processors: {', '.join(counts)}"
    yield f"float32 cases compared between: {', '.join(_ran(outcomes, PRODUCTS))}"
    for how in PRODUCTS:
        names = ", ".join(_ran(outcomes, (how,))) or "none"
        yield f"bfloat16 cases compared between those that multiply {how}: {names}"


def _ran(outcomes: Sequence[Outcome], products: tuple[str, ...]) -> list[str]:
    return [each.processor for each in outcomes if each.report and each.report.products in products]


def _recipe(processor: str) -> Recipe:
    """How a program for a processor is compiled here.

    Raises:
        Unbuilt: there is no compiler for it.
    """
    machine = PROCESSORS[processor]
    name = recipe().compiler if machine == HOST else f"{machine}-linux-gnu-g++"
    compiler = shutil.which(name)
    if not compiler:
        raise Unbuilt(f"{name} was not found; {machine} was not run")
    if processor == EMULATED:
        return Recipe(compiler, EMULATED_BESIDE, False)
    how = Recipe(compiler, processor, False)
    if processor not in STAND_INS:
        return how
    try:
        predefined(how, time.monotonic() + COMPILE_LIMIT_S)
    except BuildError:
        return Recipe(compiler, STAND_INS[processor], False)
    return how


def _runner(how: Recipe, machine: str) -> tuple[list[str], str | None]:
    """The command that runs a program, and why it cannot be run.

    Raises:
        Unbuilt: it would not even compile.
    """
    macros = predefined(how, time.monotonic() + COMPILE_LIMIT_S)
    if machine == HOST:
        problem = lacking(macros, compilers_choice=how.arch == "native")
        if problem and how.arch == "native":
            raise Unbuilt(f"code for this processor {problem}")
        return [], f"it {problem}" if problem else None
    emulator = f"qemu-{machine}"
    if not shutil.which(emulator):
        return [], f"{emulator} was not found; {machine} was not run"
    return [emulator, "-cpu", "max"], "QEMU has no AVX-512" if "__AVX512F__" in macros else None


def _build(
    how: Recipe, folder: Path, extra: Sequence[str], library: Path | None, *, foreign: bool
) -> Path:
    """A program of the sources here and of a library, or else of its sources, with extra flags. A
    foreign one brings what it needs along.

    Raises:
        RuntimeError: the compiler fails.
    """
    kernels = [] if library else translation_units()
    sources = sorted([*FOLDER.glob("*.cpp"), *kernels])
    objects = [str(folder / f"{source.stem}.o") for source in sources]
    commands = [
        [how.compiler, *how.flags, *extra, *EXTRA_FLAGS, "-c", str(source), "-o", compiled]
        for source, compiled in zip(sources, objects, strict=True)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda command: _run(command, COMPILE_LIMIT_S), commands))
    program = folder / "cases"
    static = ["-static"] if foreign else []
    linked = [*objects, *([str(library)] if library else [])]
    _run([how.compiler, "-fopenmp", *static, *linked, "-o", str(program)], COMPILE_LIMIT_S)
    return program


def _run(command: Sequence[str], limit_s: float, results: tuple[int, ...] = (0,)) -> str:
    """What a command prints.

    Raises:
        RuntimeError: it takes too long, or does not end with one of `results`.
    """
    # Three threads of two cores that wait for each other had better let the others run.
    environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit_s, env=environment, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{' '.join(command)} takes more than {limit_s:g} seconds") from error
    if done.returncode not in results:
        said = f"{done.stdout[-2000:]}{done.stderr[-6000:]}"
        raise RuntimeError(f"{' '.join(command)} ends with {done.returncode}:\n{said}")
    return done.stdout


def _test(processor: str) -> tuple[str, bool]:
    """Runs the kernels' Python tests: a line with their numbers, and whether they have passed."""
    if processor != "native":
        try:
            how = _recipe(processor)
            obstacle = _runner(how, PROCESSORS[processor])[1]
        except (Unbuilt, BuildError) as error:
            obstacle = str(error)
        if obstacle or PROCESSORS[processor] != HOST:
            return f"not run: {obstacle or 'it is another architecture'}", True
    environment = os.environ | (AS_WITH_AVX2 if processor == "x86-64-v3" else {})
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-n", "auto", "--maxprocesses", "4"]
    done = subprocess.run(
        [*command, "--dist", "loadfile", "-k", WITHOUT, *TESTS],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=TEST_LIMIT_S,
        check=False,
    )
    lines = done.stdout.strip().splitlines() or ["nothing was printed"]
    shown = lines if done.returncode else [x for x in lines if x.startswith("SKIPPED")]
    for line in shown:
        print(f"    {line}")
    return lines[-1].strip("= "), done.returncode == 0


def main() -> int:
    """Runs it all; 1 if something differs or fails."""
    parser = argparse.ArgumentParser(description="Compares the kernels on several processors.")
    parser.add_argument(
        "--tests",
        nargs="*",
        choices=("native", "x86-64-v3"),
        default=("native", "x86-64-v3"),
        help="the processors that Python's tests of the kernels run for",
    )
    chosen = parser.parse_args().tests
    if SOURCES[0].resolve() != ROOT / "kernels" / "native":
        parser.error(f"vlm_serve is imported from another tree, with the kernels in {SOURCES[0]}")
    outcomes = [outcome(processor) for processor in PROCESSORS]
    for line in summary(outcomes):
        print(line)
    wrong = list(differences(outcomes))
    for line in wrong:
        print(line)
    print(f"{len(wrong)} differences", flush=True)
    passed = not wrong
    for processor in ("native", "x86-64-v3"):
        result, fine = _test(processor) if processor in chosen else ("not asked for", True)
        print(f"Python's tests, {processor}: {result}", flush=True)
        passed = passed and fine
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
