"""Check the Triton kernels on a GPU against float64 and time them against the roofline.

    python benchmarks/kernels_gpu.py [--engine] [--write]

Per kernel: the largest error relative to the reference's scale, the median time of a replayed CUDA
graph, the time predicted from its bytes, FLOPs and latency chains, and the share of the device's
limit that it reaches (bytes moved or FLOPs, whichever takes longer at peak, counted from the
operands). flash-linear-attention and SDPA are timed beside them where installed.
`--engine` also runs `engine_gpu.py`: CUDA graphs, agreement with the CPU, prefill and decode.
`--write` puts the tables into benchmarks/gpu.md, above those of before, with the date, device and
commit. Without a GPU the script says so and ends.
"""

from __future__ import annotations

import argparse
import datetime
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from common.gpu_bench import Bench
from common.gpu_work import Device

OUTPUT = Path(__file__).with_name("gpu.md")


# Vendors' data sheets; an unknown device is measured against a copy and a GEMM of its own.
PEAKS = {
    "H100": (3.35e12, 989e12),
    "H200": (4.8e12, 989e12),
    "A100": (2.04e12, 312e12),
    "B200": (8.0e12, 2250e12),
    "MI300X": (5.3e12, 1307e12),
}


def find_device() -> Device:
    name = torch.cuda.get_device_name()
    for key, (bandwidth, flops) in PEAKS.items():
        if key in name:
            return Device(name, bandwidth, flops)
    return _measured(name)


def _measured(name: str) -> Device:
    """What a large copy and a large GEMM reach."""
    probe = Bench(Device(name, 1, 1))
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    probe.add("probe: copy", lambda: target.copy_(source))
    square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    probe.add("probe: GEMM", lambda: square @ square)
    copy, product = (row.microseconds / 1e6 for row in probe.rows)
    return Device(name, 2 * source.numel() / copy, 2 * 8192**3 / product)


def _commit() -> str:
    """A measurement is not lost where there is no repository."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()


def _write(lines: list[str]) -> None:
    """Put lines below the title of benchmarks/gpu.md."""
    title, _, before = OUTPUT.read_text(encoding="utf-8").partition("\n\n")
    text = "\n".join(lines)
    OUTPUT.write_text(f"{title}\n\n{text}\n\n{before}", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", action="store_true", help="also measure the whole engine")
    parser.add_argument("--write", action="store_true", help="write benchmarks/gpu.md")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("No GPU found: nothing was measured. Run this script as it is on a machine with one.")
        return 0
    from common import gpu_cases

    bench = Bench(find_device())
    head = ["| kernel | error | us | predicted | of the limit |", "|---|---|---|---|---|"]
    print("\n".join(head))
    gpu_cases.run(bench)
    engine = []
    if arguments.engine:
        import engine_gpu

        engine = ["", "### The engine", "", *engine_gpu.report(None, "cuda", rounds=5)]
    if arguments.write:
        versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "triton"))
        where = f"{bench.device.name} ({versions})"
        title = f"## {datetime.date.today()}, {where}, commit {_commit()}"
        rows = [row.text() for row in bench.rows]
        _write([title, "", "### Kernels", "", *head, *rows, *engine])
    return 0


if __name__ == "__main__":
    sys.exit(main())
