"""Lets vLLM's processes import torchvision's PyPI wheel beside a CPU build of torch.

Python runs this at start-up in every process that has this folder on PYTHONPATH. The wheel's
compiled ops do not load there; importing it needs no more than their schemas, which are defined
right before the import.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

ORACLE = Path(__file__).resolve().parents[3] / "examples" / "oracle.py"
"""Where the schemas stand; this folder must not put all of `examples` on vLLM's path."""


class _BeforeTorchvision:
    """A finder that finds nothing, and defines the schemas when torchvision is first looked for."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "torchvision":
            return None
        # First of all: whoever defines the schemas looks for torchvision as well.
        sys.meta_path.remove(self)
        spec = importlib.util.spec_from_file_location("torchvision_schemas", ORACLE)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # Keeps the definitions for as long as the process.
        spec.loader.exec_module(module)
        module.prepare_torchvision()
        return None


sys.meta_path.insert(0, _BeforeTorchvision())

if os.environ.get("VLM_BENCHMARK_ISA") == "avx2":
    # vLLM asks torch which of its compiled modules to load, and torch asks the processor.
    import torch

    for _name in ("_is_avx512_supported", "_is_avx512_bf16_supported", "_is_vnni_supported"):
        setattr(torch.cpu, _name, lambda: False)
    torch.cpu._is_amx_tile_supported = lambda: False
