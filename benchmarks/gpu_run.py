"""Check and measure a GPU in one run of at most ten minutes: correctness first, then times.

    python benchmarks/gpu_run.py [--out FOLDER] [--only BOX ...] [--rehearse]

Boxes in order of value, each with a time limit and a log of its own; what one of them does changes
nothing for the others. Some are several processes beside each other. A box's verdict is its
processes' exit status. `--out` gets a log for each box and `summary.md`. `--rehearse` goes through
the boxes on a CPU with tiny shapes, as far as they know one.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
PYTHON = sys.executable


@dataclass(frozen=True)
class Box:
    """One question to the GPU.

    Attributes:
        name: of its log.
        seconds: it is ended after.
        commands: that run beside each other.
        rehearsal: what runs instead on a CPU.
        variables: environment variables besides those of this process.
    """

    name: str
    seconds: int
    commands: tuple[tuple[str, ...], ...]
    rehearsal: tuple[tuple[str, ...], ...] = ()
    variables: tuple[tuple[str, str], ...] = ()


def _script(name: str, *options: str) -> tuple[str, ...]:
    return PYTHON, str(HERE / name), *options


def boxes() -> list[Box]:
    """Return all boxes, the most valuable first."""
    shares = 8
    agreement = [
        _script("gpu_agreement.py", "--pairs", "2", "--share", f"{share}/{shares}")
        for share in range(1, shares + 1)
    ]
    # Beside each other they would take all processors each.
    few = ("OMP_NUM_THREADS", "2")
    tests = ("-m", "pytest", "-q", "-n", "8", "-p", "no:cacheprovider", "-p", "no:benchmark")
    return [
        Box("machine", 30, (("nvidia-smi",),)),
        Box(
            "steps",
            120,
            (_script("gpu_steps.py"),),
            (_script("gpu_steps.py", "--device", "cpu", "--rounds", "1"),),
        ),
        Box(
            "agreement",
            200,
            tuple(agreement),
            (_script("gpu_agreement.py", "--device", "cpu", "--pairs", "1", "--only", "text, ti"),),
            variables=(few,),
        ),
        Box(
            "kernel-tests",
            120,
            ((PYTHON, *tests, "tests/kernels", "-k", "triton and not aot"),),
            variables=(("TRITON_INTERPRET", "0"), few),
        ),
        Box("engine", 200, (_script("engine_gpu.py", "--no-agreement", "--rounds", "3"),)),
        Box("kernels", 100, (_script("kernels_gpu.py"),)),
    ]


def run(box: Box, commands: Sequence[Sequence[str]], folder: Path) -> str:
    """Run a box and return a line on how it went; its output goes into its log."""
    begin = time.monotonic()
    # A source tree needs no installation to be measured.
    path = os.pathsep.join(filter(None, (str(HERE.parent), os.environ.get("PYTHONPATH"))))
    own = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **dict(box.variables)}
    variables = os.environ | own
    with (folder / f"{box.name}.log").open("w") as log:
        running = []
        for command in commands:
            try:
                running.append(
                    subprocess.Popen(
                        command, stdout=log, stderr=log, env=variables, cwd=HERE.parent
                    )
                )
            except OSError as error:
                log.write(f"{error}\n")
        results = [_result(each, begin + box.seconds) for each in running]
    words = ", ".join(results) or "not started"
    return f"- {box.name}: {words} ({time.monotonic() - begin:.0f} s)"


def _result(process: subprocess.Popen[bytes], deadline: float) -> str:
    try:
        status = process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return "out of time"
    return "right" if status == 0 else f"exit status {status}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu_run"))
    parser.add_argument("--only", nargs="+", help="these boxes")
    parser.add_argument("--rehearse", action="store_true")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    lines = []
    for box in boxes():
        commands = box.rehearsal if given.rehearse else box.commands
        if (given.only and box.name not in given.only) or not commands:
            continue
        lines.append(run(box, commands, given.out))
        print(lines[-1], flush=True)
        (given.out / "summary.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0 if lines and all("right" in line for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
