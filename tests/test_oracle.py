"""The oracle's preparations: torchvision imports beside whichever build of torch is installed."""

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
