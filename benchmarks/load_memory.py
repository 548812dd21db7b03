"""What checkpoints take in memory, while they are loaded and after, read from the kernel's books.

    python benchmarks/load_memory.py [CHECKPOINT ...] [--quantization none int8 int6 int4]
        [--formats fp8 gptq awq int8 mixed]

Each is loaded by a process of its own, as a server loads it. `peak` is the largest anonymous memory
that was seen while it loaded (every millisecond), less what there was before; `after` is the
process's proportional set size (PSS) and its anonymous part when it is done, less the same. PSS
has what was read of the file as well, as long as the kernel has no other use for that memory. Named
checkpoints are loaded as they are and quantised; `--formats` are random checkpoints in those. A
quantised checkpoint is due to take its file and 5 % and, while it is loaded, its largest tensor on
top. A table of embeddings stays in its file.
"""

from __future__ import annotations

import argparse
import math
import select
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import engine_cases  # noqa: F401  # says where the next two are
from machine import ROOT, describe
from safetensors import safe_open

from checkpoint_spec import BENCHMARK_SPEC  # isort: skip
from make_checkpoint import make_checkpoint  # isort: skip

SPEC = replace(
    BENCHMARK_SPEC,
    hidden_size=1024,
    num_layers=12,
    intermediate_size=4096,
    vocab_size=24_000,
    dtype="bfloat16",
    group_size=128,
)
# It stops before and after loading, so that its parent can look.
CHILD = """
import sys
import torch
from vlm_serve.kernels.host_memory import retain_freed_memory
from vlm_serve.kernels.native_library import load
from vlm_serve.models import load_model

load()
retain_freed_memory()  # as the engine does
print(flush=True)
sys.stdin.readline()
bits = {"none": None, "int8": 8, "int6": 6, "int4": 4}[sys.argv[2]]
plain = torch.bfloat16
model = load_model(sys.argv[1], plain, "cpu", compute_dtype=plain, compiled=True, bits=bits)
print(flush=True)
sys.stdin.readline()
"""
FIELDS = ("Pss", "Anonymous")


def books(process: int) -> dict[str, int]:
    """Bytes of a process by the kernel's names."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()[1:]
    found = {line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines}
    return {field: found[field] for field in FIELDS}


def anonymous(process: int) -> int:
    """The same as `Anonymous` to within some pages, and quickly read."""
    status = Path(f"/proc/{process}/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


def loading(path: Path, bits: str) -> tuple[int, dict[str, int]]:
    """The peak of anonymous memory, and the books afterwards, less what there was before."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", CHILD, str(path), bits]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdout.readline()
        before, peak = books(child.pid), anonymous(child.pid)
        child.stdin.write("\n")
        child.stdin.flush()
        while not select.select([child.stdout], [], [], 0.001)[0]:
            peak = max(peak, anonymous(child.pid))
        if child.stdout.readline() != "\n":
            raise RuntimeError(f"{path} could not be loaded")
        after = books(child.pid)
        peak = max(peak, after["Anonymous"])
        child.stdin.write("\n")
    return peak - before["Anonymous"], {name: after[name] - before[name] for name in FIELDS}


def largest(path: Path) -> int:
    """Bytes of a checkpoint's largest tensor in bfloat16."""
    with safe_open(path / "model.safetensors", framework="pt") as file:
        return 2 * max(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118


def show(name: str, path: Path, bits: str) -> None:
    peak, after = loading(path, bits)
    file = (path / "model.safetensors").stat().st_size
    cells = (file, largest(path), peak, after["Anonymous"], after["Pss"])
    print(
        f"| {name} | {' | '.join(f'{cell / 1e6:.0f}' for cell in cells)} "
        f"| {after['Anonymous'] / file:.2f} |",
        flush=True,
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("checkpoints", type=Path, nargs="*")
    kinds = ("none", "int8", "int6", "int4")
    parser.add_argument("--quantization", nargs="+", choices=kinds, default=list(kinds))
    parser.add_argument("--formats", nargs="*", default=["fp8", "gptq", "awq", "int8", "mixed"])
    return parser.parse_args(arguments)


def main() -> None:
    given = parse()
    print(describe(1))
    print("| MB | file | largest tensor | peak | anonymous | PSS | anonymous / file |")
    print("|---|---|---|---|---|---|---|")
    for path in given.checkpoints:
        for bits in given.quantization:
            show(f"{path.name}, {bits}", path, bits)
    for kind in given.formats:
        with tempfile.TemporaryDirectory() as folder:
            path = make_checkpoint(folder, replace(SPEC, quantization=kind))
            show(kind, path, "none")


if __name__ == "__main__":
    main()
