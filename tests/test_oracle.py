"""The oracle's preparations: torchvision imports beside whichever build of torch is installed, and
transformers computes with torch, whatever else has been imported."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def test_torchvision_imports_beside_any_build_of_torch() -> None:
    """In a process of its own: where schemas and compiled ops meet, torch ends the process."""
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import oracle; oracle.prepare_torchvision()\n"
            "import torch, torchvision.ops\n"
            "print(torch.ops.torchvision.nms.default._schema.name)",
        ],
        cwd=EXAMPLES,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "torchvision::nms"), done.stderr


BESIDE_FLA = """
import importlib, inspect, sys
from types import ModuleType

def rule(query, key, value, g, beta):
    raise AssertionError("a kernel of fla was called")

rule.__module__ = "fla"
for name in ("fla", "fla.ops", "fla.ops.gated_delta_rule"):
    module = sys.modules[name] = ModuleType(name)
    module.__path__ = []
    module.chunk_gated_delta_rule = module.fused_recurrent_gated_delta_rule = rule
import oracle

oracle.prepare_models()
code = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
used = inspect.getclosurevars(code.torch_chunk_gated_delta_rule).nonlocals.values()
print(*sorted({each.__module__ for each in used if callable(each)}))
"""


def test_models_keep_their_own_gated_delta_rule_beside_fla() -> None:
    """As after a test of fla's kernels, which an oracle that was imported later would call."""
    command = [sys.executable, "-c", BESIDE_FLA]
    done = subprocess.run(command, cwd=EXAMPLES, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["transformers.models.qwen3_next.modeling_qwen3_next"]
