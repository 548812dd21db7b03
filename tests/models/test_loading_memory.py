"""Loading needs the memory of the model and of its largest tensor, not more."""

from __future__ import annotations

import dataclasses
import json
import math
import select
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest
from checkpoint_spec import CheckpointSpec
from gguf import GGMLQuantizationType as Kind
from gguf_writer import blocks, write_model
from make_checkpoint import make_checkpoint
from safetensors import safe_open
from sweeps import quick

from vlm_serve.models import resolve_checkpoint
from vlm_serve.models.weight_sizes import WeightBytes

MIB = 1 << 20
SLACK = 24 * MIB
"""A piece of a tensor on its way, and what Python and its allocator need."""
SPEC = CheckpointSpec(
    hidden_size=1024, intermediate_size=6144, vocab_size=24_000, num_layers=4, dtype="bfloat16"
)
# Groups of 128: the scales of smaller ones take more of a file than zero points add in memory.
FORMATS = ("fp8", "awq", "mixed", "nvfp4-modelopt")
# It stops before and after loading, so that its parent can look.
CHILD = """
import dataclasses, json, sys
import torch
from vlm_serve.system.host_memory import retain_freed_memory
from vlm_serve.kernels.native_library import load
from vlm_serve.models import load_model, read_spec
from vlm_serve.models.weight_sizes import weight_bytes

path, weights, compute = sys.argv[1], *(getattr(torch, name) for name in sys.argv[2:4])
expected = weight_bytes(
    read_spec(path),
    weights=weights, compute=compute, device=torch.device("cpu"), compiled=True,
)
load()
retain_freed_memory()  # as the engine does
print(json.dumps(dataclasses.asdict(expected)), flush=True)
sys.stdin.readline()
model = load_model(path, weights, "cpu", compute_dtype=compute, compiled=True)
print(flush=True)
sys.stdin.readline()
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("large"), SPEC)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize(
    ("weights", "compute"),
    quick(
        [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "float32")],
        1,
        pytest.mark.memory,
        several=True,
    ),
)
def test_peak_of_anonymous_memory(checkpoint: Path, weights: str, compute: str) -> None:
    command = [sys.executable, "-c", CHILD, str(checkpoint), weights, compute]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) as child:
        assert child.stdin is not None and child.stdout is not None
        expected = WeightBytes(**json.loads(child.stdout.readline()))
        before = peak = anonymous(child.pid)
        child.stdin.write("\n")
        child.stdin.flush()
        while not select.select([child.stdout], [], [], 0.001)[0]:
            peak = max(peak, anonymous(child.pid))
        assert child.stdout.readline() == "\n", "loading failed"
        peak = max(peak, anonymous(child.pid))
        child.stdin.write("\n")
    assert expected.mapped == (weights == "bfloat16")
    assert 150 * MIB < expected.in_memory < peak - before + SLACK
    assert peak - before <= expected.in_memory + largest(checkpoint, weights) + SLACK


@pytest.mark.memory
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize("kind", FORMATS)
def test_a_quantised_checkpoint_takes_its_files_size(tmp_path: Path, kind: str) -> None:
    """But for the table, which stays in its file; at most five percent more, and while it is loaded
    no more on top than its largest tensor."""
    spec = dataclasses.replace(SPEC, gdn_value_dim=32, quantization=kind, group_size=128)
    path = make_checkpoint(tmp_path, spec)
    file = (path / "model.safetensors").stat().st_size
    command = [sys.executable, "-c", CHILD, str(path), "bfloat16", "float32"]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) as child:
        assert child.stdin is not None and child.stdout is not None
        expected = WeightBytes(**json.loads(child.stdout.readline()))
        before = peak = anonymous(child.pid)
        child.stdin.write("\n")
        child.stdin.flush()
        while not select.select([child.stdout], [], [], 0.001)[0]:
            peak = max(peak, anonymous(child.pid))
        assert child.stdout.readline() == "\n", "loading failed"
        after = anonymous(child.pid)
        peak = max(peak, after)
        child.stdin.write("\n")
    assert expected.mapped and expected.formats
    assert 0.9 * file < expected.in_memory + expected.table <= 1.05 * file
    # What reading needed besides has gone back to the system.
    assert after - before <= 1.05 * (file - expected.table) + SLACK
    assert peak - before <= 1.05 * (file - expected.table) + SLACK + largest(path)


@pytest.mark.memory
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_a_file_in_blocks_takes_what_is_foreseen(tmp_path: Path, kind: str) -> None:
    """While it is loaded, no more on top than its largest tensor as numbers."""
    spec = dataclasses.replace(SPEC, gdn_value_dim=64, vision_depth=0)
    checkpoint = make_checkpoint(tmp_path / "model", spec)
    file = write_model(checkpoint, tmp_path / "model.gguf", blocks(Kind[kind]))
    path = resolve_checkpoint(file)
    command = [sys.executable, "-c", CHILD, str(path), "bfloat16", "float32"]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) as child:
        assert child.stdin is not None and child.stdout is not None
        expected = WeightBytes(**json.loads(child.stdout.readline()))
        before = peak = anonymous(child.pid)
        child.stdin.write("\n")
        child.stdin.flush()
        while not select.select([child.stdout], [], [], 0.001)[0]:
            peak = max(peak, anonymous(child.pid))
        assert child.stdout.readline() == "\n", "loading failed"
        after = anonymous(child.pid)
        peak = max(peak, after)
        child.stdin.write("\n")
    assert not expected.mapped and expected.formats[0][0] == kind
    of_blocks = file.stat().st_size
    assert expected.in_memory < 1.05 * (of_blocks + expected.table)
    assert 0.95 * expected.in_memory - SLACK < after - before < 1.05 * expected.in_memory + SLACK
    assert peak - before <= 1.05 * expected.in_memory + SLACK + largest(checkpoint)


def anonymous(process: int) -> int:
    """Bytes of memory that belong to no file."""
    status = Path(f"/proc/{process}/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


def largest(checkpoint: Path, weights: str = "bfloat16") -> int:
    """Bytes of the largest tensor in the model's type."""
    with safe_open(checkpoint / "model.safetensors", framework="pt") as file:
        sizes = [math.prod(file.get_slice(name).get_shape()) for name in file.keys()]  # noqa: SIM118
    most: int = max(sizes)
    return most * (2 if weights == "bfloat16" else 4)
