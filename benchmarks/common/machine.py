"""Describe the processor of a benchmark, and emulate one without AVX-512."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_TOLD = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")
_EMULATED = "VLM_BENCHMARK_ISA"

EMULATION = {
    "avx2": {
        "VLM_SERVE_NATIVE_ARCH": "x86-64-v3",  # Our kernels.
        # Kernels of commits that do not know the variable, and what torch.compile generates.
        "CXX": str(Path(__file__).resolve().parent / "cxx_avx2"),
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    }
}
"""For each `--isa`, the environment in which everything that can choose leaves the rest alone."""


def add_isa_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--isa",
        choices=EMULATION,
        help="compute as a machine that has nothing beyond it would; llama.cpp and the limits of "
        "the machine are built for it as well",
    )


def run_as(isa: str | None) -> None:
    """Starts the program anew in the environment of that instruction set, where it is not yet.

    The libraries read these variables once, when they are loaded.
    """
    if isa is not None and emulated() != isa:
        os.environ.update(EMULATION[isa] | {_EMULATED: isa})
        os.execv(sys.executable, [sys.executable, *sys.argv])


def emulated() -> str | None:
    """The instruction set that this process and its children pretend to end at."""
    return os.environ.get(_EMULATED)


def describe(threads: int) -> str:
    """One line: processor, its instruction sets, threads, commit, load; a second for emulation."""
    has = set(_of_processor("flags", "Features").split())
    sets = " ".join(name for name in _TOLD if name in has) or "none of the known instruction sets"
    load = ", ".join(f"{average:.1f}" for average in os.getloadavg())
    line = (
        f"{_of_processor('model name', 'CPU part') or 'unknown processor'} ({sets}), "
        f"{threads} of {os.cpu_count()} threads, commit {commit(ROOT)}, load averages {load}"
    )
    if emulated() is None:
        return line
    told = " ".join(f"{name}={value}" for name, value in EMULATION[emulated() or ""].items())
    return f"{line}\nemulated: {emulated()} only, by {told}"


def commit(folder: Path) -> str:
    """The short name of a checkout's commit, with a plus where files differ from it."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _of_processor(*names: str) -> str:
    """What /proc/cpuinfo says first under one of the names; x86 and Arm call them differently."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in names:
            return value.strip()
    return ""
