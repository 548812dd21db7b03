"""Check and measure a GPU in one run of at most ten minutes: correctness first, then times.

    python benchmarks/gpu_run.py [--out FOLDER] [--only BOX ...] [--rehearse]

Boxes in order of value, each with a time limit; what one of them does changes nothing for the
others, so `--only` goes on where a run was cut. Some are several processes beside each other. A
box's verdict is its processes' exit status. `--out` gets `summary.md` and `boxes.log`, to which
further runs add, and of the box tune a table of tiles for `kernels/tuning/`. `--rehearse` goes
through the boxes on a CPU with tiny shapes, as far as they know one.
"""

from __future__ import annotations

import argparse
import os
import shutil
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
        name: heads its part of the log.
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


def boxes(out: Path) -> list[Box]:
    """Return all boxes, the most valuable first; `out`: folder for what they write."""
    few = ("OMP_NUM_THREADS", "2")  # Beside each other they would take all processors each.
    tests = ("-m", "pytest", "-q", "-n", "8", "-p", "no:cacheprovider", "-p", "no:benchmark")
    demo = ("--images", "300", "--videos", "60", "--schemas", "60", "--clients", "0")
    evaluate = str(HERE.parent / "train_demo" / "evaluate.py")
    on_cpu, tuned = ("--device", "cpu"), out.resolve() / "tune.json"
    return [
        Box("machine", 30, (("nvidia-smi",),)),
        Box(
            "steps",
            120,
            (_script("gpu_steps.py"),),
            (_script("gpu_steps.py", *on_cpu, "--rounds", "1"),),
        ),
        Box(
            "agreement",
            200,
            _shared("gpu_agreement.py", 8, "--pairs", "2"),
            (_script("gpu_agreement.py", *on_cpu, "--pairs", "1", "--only", "text, ti"),),
            variables=(few,),
        ),
        Box(
            "kernel-check",
            100,
            _shared("gpu_kernel_check.py", 8),
            (_script("gpu_kernel_check.py", "--rehearse", "--only", "text, ti"),),
            variables=(few,),
        ),
        Box(
            "kernel-tests",
            150,
            ((PYTHON, *tests, "tests/kernels", "-k", "triton and not aot"),),
            variables=(("TRITON_INTERPRET", "0"), few),
        ),
        Box(
            "repeats",
            120,
            _shared("gpu_repeats.py", 6),
            (_script("gpu_repeats.py", *on_cpu, "--runs", "2"),),
            variables=(few,),
        ),
        Box(
            "invariance",
            200,
            _shared("gpu_invariance.py", 7, "--requests", "60"),
            (_script("gpu_invariance.py", *on_cpu, "--requests", "3", "--share", "2/7"),),
            variables=(few,),
        ),
        Box(
            "lora",
            60,
            (_script("gpu_lora.py"),),
            (_script("gpu_lora.py", *on_cpu, "--requests", "3"),),
            variables=(few,),
        ),
        Box("faults", 60, (_script("gpu_faults.py"),)),
        Box(
            "server",
            90,
            (_script("gpu_server.py"),),
            (_script("gpu_server.py", *on_cpu, "--requests", "8"),),
        ),
        Box(
            "ahead",
            120,
            (_script("gpu_ahead.py"),),
            (_script("gpu_ahead.py", *on_cpu, "--sequences", "1", "4", "--tokens", "8"),),
        ),
        Box("memory", 90, (_script("gpu_memory.py"),)),
        Box("demo", 90, ((PYTHON, evaluate, "demo", *demo), (PYTHON, evaluate, "demo-moe", *demo))),
        Box("kernels", 100, (_script("kernels_gpu.py"),)),
        Box(
            "tune",
            120,
            (_script("gpu_tune.py", "--table", str(out.resolve()), "--out", str(tuned)),),
        ),
        Box("engine", 220, (_script("engine_gpu.py", "--no-agreement", "--rounds", "3"),)),
        Box(
            "long",
            150,
            (_script("engine_gpu_long.py"),),
            (_script("engine_gpu_long.py", *on_cpu),),
        ),
        _sanitizer(),
    ]


def _shared(script: str, shares: int, *options: str) -> tuple[tuple[str, ...], ...]:
    """Return processes that share a script's cases."""
    return tuple(
        _script(script, *options, "--share", f"{share}/{shares}") for share in range(1, shares + 1)
    )


def _sanitizer() -> Box:
    """Return the box of NVIDIA's checks for bad addresses and races, where they are installed."""
    tool = shutil.which("compute-sanitizer")
    commands = [
        (tool, "--tool", check, "--error-exitcode", "1", *_script("gpu_repeats.py", "--small"))
        for check in ("memcheck", "racecheck")
        if tool is not None
    ]
    # A block of torch's cache would hide what is written behind a tensor.
    return Box(
        "sanitizer", 150, tuple(commands), variables=(("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),)
    )


def run(box: Box, commands: Sequence[Sequence[str]], log: Path) -> str:
    """Run a box, add its output to the log and return a line on how it went."""
    begin = time.monotonic()
    # A source tree needs no installation to be measured.
    path = os.pathsep.join(filter(None, (str(HERE.parent), os.environ.get("PYTHONPATH"))))
    own = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **dict(box.variables)}
    variables = os.environ | own
    with log.open("a") as output:
        output.write(f"\n==== {box.name}\n")
        output.flush()
        running = []
        for command in commands:
            try:
                running.append(
                    subprocess.Popen(
                        command, stdout=output, stderr=output, env=variables, cwd=HERE.parent
                    )
                )
            except OSError as error:
                output.write(f"{error}\n")
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
    for box in boxes(given.out):
        commands = box.rehearsal if given.rehearse else box.commands
        if (given.only and box.name not in given.only) or not commands:
            continue
        lines.append(run(box, commands, given.out / "boxes.log"))
        print(lines[-1], flush=True)
        with (given.out / "summary.md").open("a", encoding="utf-8") as summary:
            summary.write(lines[-1] + "\n")
    return 0 if lines and all("right" in line for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
